"""bulk/jobs/service.py: waits for jobs."""

import contextlib
import dataclasses
import time
from typing import Any, cast

import pytest
from google.rpc.code_pb2 import Code

from neuronpipe.bulk.jobs.job import ListPlace, StoredJob, end_of
from neuronpipe.bulk.jobs.service import Jobs
from neuronpipe.bulk.jobs.settings import JobSettings
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput, Unavailable
from neuronpipe.gateway.settings import PipelineSettings

_RUNNING = StoredJob.of("a", {b"state": b"running", b"priority": b"normal"})


class _Store:
    """A job that ends as soon as it has been found running, before any wait for it listens."""

    def __init__(self, job: StoredJob = _RUNNING) -> None:
        self._job = job

    async def jobs_of(self, tenant: str, before: ListPlace | None, count: int) -> tuple[list[StoredJob], None]:
        return [self._job, dataclasses.replace(_RUNNING, id="b")], None

    async def get(self, id: str) -> StoredJob:
        found = self._job
        self._job = dataclasses.replace(_RUNNING, state="failed", end=end_of(Unavailable("x")))
        return found

    async def is_over(self, job: StoredJob) -> bool:
        return False


def _jobs(store: _Store) -> Jobs:
    nothing: Any = None
    return Jobs(cast(Any, store), JobSettings(), PipelineSettings(), nothing, None, contextlib.nullcontext)


async def test_a_job_that_ends_before_its_wait_listens_is_told_at_once() -> None:
    jobs = _jobs(_Store())
    began_s = time.monotonic()
    operation = await jobs.wait("jobs/a", 4.0, Call())
    assert operation.done
    assert time.monotonic() - began_s < 1


@pytest.mark.parametrize(
    "damage",
    [
        {"state": "nope"},
        {"priority": "zz"},
        {"end": b"r\xff\xff"},
        {"end": b"e\xff"},
        {"end": b"e"},
        {"end": b"x"},
        {"expires_ms": 99999999999999999999},
        {"inputs": -5},
    ],
    ids=str,
)
async def test_a_damaged_job_has_failed_and_others_are_listed(
    damage: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    damaged = dataclasses.replace(_RUNNING, **damage)
    got = await _jobs(_Store(damaged)).get("jobs/a", Call())
    listed = await _jobs(_Store(damaged)).list_jobs(10, "", Call())
    assert [operation.done for operation in (got, *listed.operations)] == [True, True, False]
    assert [got.error.code, got.error.message] == [Code.INTERNAL, "the job is damaged in Redis"]
    assert [(record.getMessage(), vars(record)["fields"]) for record in caplog.records] == [
        ("a job in Redis is damaged", {"job": "a"})
    ] * 2


_ID = "01a22cfe53f0009e435fb6276c9a755d"  # of a job


@pytest.mark.parametrize("token", ["zzz", _ID, "0" * 43, "0" * 43 + "G", "٣" * 44, "0" * 44 + "\n"])
async def test_a_page_token_that_no_answer_had_is_refused(token: str) -> None:
    with pytest.raises(InvalidInput, match=r"^page_token: is none that an answer had$"):
        await _jobs(_Store()).list_jobs(10, token, Call())
