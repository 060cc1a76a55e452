"""bulk/jobs/http.py: the words of SageMaker's clients."""

import contextlib
from typing import Any, cast

import pytest

from neuronpipe.bulk.jobs.http import INVOKE, LIST, job_http_handlers
from neuronpipe.bulk.jobs.job import ListPlace, StoredJob
from neuronpipe.bulk.jobs.service import Jobs
from neuronpipe.bulk.jobs.settings import JobSettings
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import AlreadyExists, InvalidInput
from neuronpipe.doors.http.exchange import HttpRequest, Route
from neuronpipe.gateway.settings import PipelineSettings

_AMAZON = "X-Amzn-SageMaker-"


class _Store:
    """A store that has jobs with every id, of other content."""

    async def submit(self, new: object, *limits: int) -> tuple[str, str]:
        return "id", "other"

    async def jobs_of(self, tenant: str, before: ListPlace | None, count: int) -> tuple[list[StoredJob], None]:
        return [], None


class _Catalog:
    def spec(self, name: str) -> None:
        return None


async def _ask(route: Route, query: str = "", **headers: str) -> None:
    settings = JobSettings(jobs_uris="file:///data/", jobs_sagemaker_output="file:///data/out/")
    jobs = Jobs(cast(Any, _Store()), settings, PipelineSettings(), cast(Any, _Catalog()), None, contextlib.nullcontext)
    fields = {f"{_AMAZON}{name}".lower().encode(): value.encode() for name, value in headers.items()}
    (handler,) = [handler for handled, handler in job_http_handlers(jobs) if handled is route]
    await handler(HttpRequest(Call(), {"name": "m"}, query, fields, "", b""))


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("RequestTTLSeconds", "999999999", "999999999, the limit is 604800"),
        ("RequestTTLSeconds", "0.5", "must be a whole number from 1"),
        ("RequestTTLSeconds", "0", "must be a whole number from 1"),
        ("RequestTTLSeconds", "-1", "must be a whole number from 1"),
        ("InvocationTimeoutSeconds", "7200", "7200, the limit is 3600"),
        ("InvocationTimeoutSeconds", "1.5", "must be a whole number from 1"),
        ("InferenceId", "a" * 300, "300 characters, the limit is 256"),
        ("InputLocation", "file:///etc/passwd", ""),
    ],
)
async def test_an_error_names_the_header_that_the_caller_sent(name: str, value: str, problem: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        await _ask(INVOKE, **{"InputLocation": "file:///data/in", name: value})
    assert caught.value.field == f"{_AMAZON}{name}"
    assert problem in caught.value.problem


async def test_a_second_invocation_with_an_id_is_told_by_its_header() -> None:
    with pytest.raises(AlreadyExists, match=f"^{_AMAZON}InferenceId: another job has it, with other content$"):
        await _ask(INVOKE, InputLocation="file:///data/in", InferenceId="a", RequestTTLSeconds="60")


async def test_a_page_has_a_whole_number_of_jobs() -> None:
    await _ask(LIST, "page_size=2")
    with pytest.raises(InvalidInput, match=r"^page_size: must be a whole number from 0$"):
        await _ask(LIST, "page_size=1.5")
