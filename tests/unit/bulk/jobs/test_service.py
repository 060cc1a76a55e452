"""bulk/jobs/service.py: waits for jobs."""

import contextlib
import dataclasses
import time
from typing import Any, cast

from neuronpipe.bulk.jobs.job import StoredJob, end_of
from neuronpipe.bulk.jobs.service import Jobs
from neuronpipe.bulk.jobs.settings import JobSettings
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Unavailable
from neuronpipe.gateway.settings import PipelineSettings

_RUNNING = StoredJob.of("a", {b"state": b"running", b"priority": b"normal"})


class _Store:
    """A job that ends as soon as it has been found running, before any wait for it listens."""

    def __init__(self) -> None:
        self._job = _RUNNING

    async def get(self, id: str) -> StoredJob:
        found = self._job
        self._job = dataclasses.replace(_RUNNING, state="failed", end=end_of(Unavailable("x")))
        return found

    async def is_over(self, job: StoredJob) -> bool:
        return False


async def test_a_job_that_ends_before_its_wait_listens_is_told_at_once() -> None:
    nothing: Any = None
    jobs = Jobs(cast(Any, _Store()), JobSettings(), PipelineSettings(), nothing, None, contextlib.nullcontext)
    began_s = time.monotonic()
    operation = await jobs.wait("jobs/a", 4.0, Call())
    assert operation.done
    assert time.monotonic() - began_s < 1
