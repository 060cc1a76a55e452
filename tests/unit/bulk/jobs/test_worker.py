"""bulk/jobs/worker.py: how an attempt of a job ends."""

import asyncio
from typing import Any

import pytest

from neuronpipe.api.v1.jobs_pb2 import JobResult
from neuronpipe.bulk.jobs import worker
from neuronpipe.bulk.jobs.job import StoredJob, TakenJob, end_of, expired
from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.core.errors import InvalidInput, Unavailable
from neuronpipe.core.metrics import Telemetry

_ATTEMPTS = 4
_AWAY = Unavailable("the bucket does not answer")
_RESULT = JobResult(succeeded=2)


class _Runner:
    """Fails with an error for a number of times, and then has the result."""

    def __init__(self, failures: int, error: Exception) -> None:
        self.runs = 0
        self._failures, self._error = failures, error

    async def run(self, job: StoredJob, progress: Any, trace: object) -> JobResult:
        assert progress.completed == 0
        progress.completed = 1
        self.runs += 1
        if self.runs <= self._failures:
            raise self._error
        return _RESULT


async def _attempt(runner: Any, left_s: float = 60) -> tuple[str, bytes]:
    store: Any = None
    job_worker = worker.JobWorker(store, store, runner, WorkerSettings.of(max_jobs=1), Telemetry())
    return await job_worker._attempt(worker._Running(TakenJob(StoredJob.of("j", {b"attempts": b"1"}), left_s)))


@pytest.mark.parametrize(
    ("failures", "error", "runs", "end"),
    [
        (0, _AWAY, 1, ("succeeded", _RESULT)),
        (_ATTEMPTS - 1, _AWAY, _ATTEMPTS, ("succeeded", _RESULT)),
        (_ATTEMPTS, _AWAY, _ATTEMPTS, ("failed", _AWAY)),
        (1, InvalidInput("input_uri", "is not there"), 1, ("failed", InvalidInput("input_uri", "is not there"))),
    ],
)
async def test_an_object_that_is_away_is_tried_again_from_the_begin(
    monkeypatch: pytest.MonkeyPatch, failures: int, error: Exception, runs: int, end: tuple[str, Any]
) -> None:
    monkeypatch.setattr(worker, "_OBJECT_PAUSE_S", 0)
    runner = _Runner(failures, error)
    assert await _attempt(runner) == (end[0], end_of(end[1]))
    assert runner.runs == runs


async def test_a_job_whose_time_to_live_is_over_has_expired() -> None:
    class Endless:
        async def run(self, *_: object) -> JobResult:
            await asyncio.Event().wait()
            return _RESULT

    assert await _attempt(Endless(), left_s=0.05) == ("expired", end_of(expired()))


async def test_a_timeout_within_a_job_is_no_expiry() -> None:
    state, _ = await _attempt(_Runner(1, TimeoutError()))
    assert state == "failed"
