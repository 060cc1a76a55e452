"""bulk/jobs: workers while Redis, its answers or one of them are lost: each job runs once at a time, and from its begin
only where its worker has died.
"""

import asyncio
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from neuronpipe.api.v1.jobs_pb2 import JobResult
from neuronpipe.bulk.jobs.job import JobProgress, NewJob, StoredJob, new_id
from neuronpipe.bulk.jobs.settings import JobSettings, WorkerSettings
from neuronpipe.bulk.jobs.store import JobStore
from neuronpipe.bulk.jobs.worker import JobWorker
from neuronpipe.core.metrics import Telemetry
from tests.servers.redis import RedisServer, proxy
from tests.suite.waiting import cancelled, happens

_LEASE_S = 1.0
_STEP_S = 0.05


class _Gateway:
    def closed_s(self) -> dict[str, float]:
        return {}


class _Runs:
    """Runs jobs of several workers in steps of a gateway's calls, and knows what happened. `is_held`: none ends."""

    def __init__(self, steps: int) -> None:
        self.began: Counter[str] = Counter()
        self.steps: list[tuple[str, str, float]] = []
        self.is_held = False
        self._steps = steps

    def of(self, worker: str) -> Any:
        runs = self

        class Runner:
            async def run(self, job: StoredJob, progress: JobProgress, trace: object) -> JobResult:
                progress.begin()
                runs.began[job.id] += 1
                left = runs._steps
                while left or runs.is_held:
                    await progress.leased()
                    runs.steps.append((job.id, worker, time.monotonic()))
                    await asyncio.sleep(_STEP_S)
                    left = max(0, left - 1)
                return JobResult(succeeded=1)

        return Runner()


@asynccontextmanager
async def _worker(url: str, runner: Any, max_jobs: int = 8) -> AsyncIterator[JobWorker]:
    store, gateway = JobStore(JobSettings(jobs_redis_url=url)), _Gateway()
    await store.check()
    settings = WorkerSettings.of(max_jobs=max_jobs, lease_s=_LEASE_S)
    worker = JobWorker(store, gateway, runner, settings, Telemetry())  # type: ignore[arg-type]
    running = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        await cancelled(running)
        await store.close()


async def _submit(store: JobStore) -> str:
    fields: dict[str, str | int] = {"request_id": "", "notify": "", "limit": 900, "trace": "", "inputs": 1}
    id = new_id()
    await store.submit(NewJob(id, id, "digest", "", "normal", b"x", 100, 100, fields), 1000, 0, 0)
    return id


async def _ended(store: JobStore, id: str) -> StoredJob:
    """A job, once it has ended."""
    async with asyncio.timeout(20):
        while not ((job := await store.get(id)) and job.end):
            await asyncio.sleep(_STEP_S)
    return job


async def _go_away(redis: RedisServer, how: str, seconds: float) -> None:
    """Redis is away for a time."""
    if how == "hangs":
        redis.send(signal.SIGSTOP)
    else:
        redis.stop()
    await asyncio.sleep(seconds)
    if how == "hangs":
        redis.send(signal.SIGCONT)
    else:
        redis.start()


@pytest.mark.parametrize("how", ["hangs", "is killed"])
async def test_while_redis_is_away_for_longer_than_a_lease_jobs_go_on(
    store: JobStore, redis: RedisServer, how: str
) -> None:
    """Three times, as after three workers that died a job is set aside. Two workers, of which one has places left."""
    runs = _Runs(steps=3)
    async with _worker(redis.url, runs.of("one"), 2), _worker(redis.url, runs.of("two"), 4):
        runs.is_held = True
        ids = [await _submit(store) for _ in range(4)]
        await happens(lambda: len(runs.began) == 4)
        for _ in range(3):
            await _go_away(redis, how, 1.5 * _LEASE_S)
            await asyncio.sleep(_LEASE_S)
        runs.is_held = False
        ended = [await _ended(store, id) for id in ids]
    assert [(job.state, job.attempts) for job in ended] == [("succeeded", 1)] * 4
    assert set(runs.began.values()) == {1}


async def test_what_was_computed_without_redis_is_stored_and_not_repeated(store: JobStore, redis: RedisServer) -> None:
    runs = _Runs(steps=3)
    async with _worker(redis.url, runs.of("one")), _worker(redis.url, runs.of("two")):
        id = await _submit(store)
        await happens(lambda: bool(runs.began))
        await _go_away(redis, "is killed", 2 * _LEASE_S)
        job = await _ended(store, id)
    assert (job.state, job.attempts, runs.began[id]) == ("succeeded", 1, 1)


async def test_jobs_in_answers_that_were_lost_run_once(store: JobStore, redis: RedisServer) -> None:
    runs = _Runs(steps=3)
    async with proxy(redis.port) as between, _worker(between.url, runs.of("one")):
        between.is_cutting, between.cuts_from_bytes = True, 300  # a job has more
        ids = [await _submit(store) for _ in range(4)]
        async with asyncio.timeout(10):
            while not any([(job := await store.get(id)) and job.attempts for id in ids]):
                await asyncio.sleep(_STEP_S)
        await asyncio.sleep(1.5 * _LEASE_S)
        assert not runs.began
        between.is_cutting = False
        ended = [await _ended(store, id) for id in ids]
    assert [(job.state, job.attempts) for job in ended] == [("succeeded", 1)] * 4
    assert set(runs.began.values()) == {1}


async def test_a_worker_that_is_cut_off_stops_before_another_takes_its_job(store: JobStore, redis: RedisServer) -> None:
    runs = _Runs(steps=3)
    async with (
        proxy(redis.port) as between,
        _worker(between.url, runs.of("cut off"), 1) as cut_off,
        _worker(redis.url, runs.of("other"), 1),
    ):
        runs.is_held = True
        ids = [await _submit(store), await _submit(store)]
        await happens(lambda: len(runs.began) == 2)
        (theirs,) = {id for id, worker, _ in runs.steps if worker == "cut off"}
        between.is_open = False
        between.close()
        runs.is_held = False
        other = next(id for id in ids if id != theirs)
        await _ended(store, other)
        runs.is_held = True
        await happens(lambda: runs.began[theirs] == 2)
        between.is_open = True
        await happens(lambda: not cut_off._running)
        runs.is_held = False
        job = await _ended(store, theirs)
    assert (job.state, job.attempts) == ("succeeded", 2)
    last_s = max(at_s for id, worker, at_s in runs.steps if (id, worker) == (theirs, "cut off"))
    assert last_s < min(at_s for id, worker, at_s in runs.steps if (id, worker) == (theirs, "other"))
