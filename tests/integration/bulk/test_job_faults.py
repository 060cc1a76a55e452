"""Jobs while workers, Redis and the gateway die: none is lost, and none is answered twice."""

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from demo.processes import ServiceProcess
from neuronpipe.client import Client, Job, Overloaded, Unavailable
from tests.callers.requests import classify
from tests.models.repository import link_models
from tests.suite.commands import output
from tests.suite.waiting import until
from tests.systems.jobs import JobSystem, job_system
from tests.systems.pipelines import make_slow

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_JOBS = int(os.environ.get("NEURONPIPE_JOBS", "200"))
_long_only = pytest.mark.skipif("NEURONPIPE_JOBS" not in os.environ, reason="takes long; `make soak` runs it")
_ENDED = "neuronpipe-jobs:ended"
_QUICK = ("--lease-s", "1")


class Endings:
    """The messages of Redis that jobs have ended."""

    def __init__(self, jobs: JobSystem) -> None:
        client: Any = redis.Redis.from_url(jobs.redis.url)
        self._client = client  # which ends the subscription with itself
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(_ENDED)
        self.counts: Counter[str] = Counter()

    def read(self, at_least: int) -> Counter[str]:
        """How often each job has ended, once there are so many messages, and no more of them."""
        give_up_s, quiet = time.monotonic() + 20, 0
        while time.monotonic() < give_up_s and (self.counts.total() < at_least or quiet < 3):
            message = self._pubsub.get_message(timeout=0.1)
            quiet = 0 if message else quiet + 1
            if message:
                self.counts[f"jobs/{message['data'].decode()}"] += 1
        return self.counts


@pytest.fixture(scope="module")
def quick(fake_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that answers at once."""
    return link_models(tmp_path_factory.mktemp("quick") / "repository", fake_repository, "classifier")


@pytest.fixture(scope="module")
def slow(fake_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose every batch takes a second and a half."""
    return make_slow(fake_repository, tmp_path_factory.mktemp("slow"))


@pytest.fixture(scope="module")
def slow_jobs(slow: Path) -> Iterator[JobSystem]:
    with job_system(slow) as jobs:
        yield jobs


@pytest.fixture(scope="module")
def quick_jobs(quick: Path) -> Iterator[JobSystem]:
    with job_system(quick) as jobs:
        yield jobs


def _submit(client: Client, count: int, name: str) -> list[Job]:
    """Jobs that are submitted until they are taken, as callers do."""
    submitted = []
    for number in range(count):
        while True:
            with contextlib.suppress(Unavailable):
                request_id = f"{name}-{number}"
                submitted.append(client.submit([classify(f"text {number}")], request_id=request_id))
                break
    return submitted


@pytest.mark.parametrize(
    "phase",
    [
        pytest.param("before it sends", marks=_long_only),
        "while the model computes",
        pytest.param("while the end is stored", marks=_long_only),
    ],
)
def test_a_job_whose_worker_is_killed_is_run_by_another_and_answered_once(slow_jobs: JobSystem, phase: str) -> None:
    with Client(slow_jobs.gateway.target) as client:
        endings = Endings(slow_jobs)
        with slow_jobs.worker(*_QUICK) as worker:
            if phase == "before it sends":
                slow_jobs.gateway.signal(signal.SIGSTOP)
                job_id = _submit_behind(slow_jobs)
            else:
                job_id = client.submit([classify("a")]).name
            until(lambda: slow_jobs.state(job_id) == "running", "a worker takes it")
            if phase == "while the end is stored":
                slow_jobs.redis.ask("CLIENT", "PAUSE", 60_000, "WRITE")
                time.sleep(2.5)  # it is computed by now, and Redis takes no end
            worker.signal(signal.SIGKILL)
            worker.wait()
        slow_jobs.redis.ask("CLIENT", "UNPAUSE")
        slow_jobs.gateway.signal(signal.SIGCONT)
        with slow_jobs.worker(*_QUICK):
            job = client.job(job_id)
            job.wait(60)
            assert job.status().metadata.attempts == 2
        assert endings.read(1) == {job_id: 1}


def _submit_behind(jobs: JobSystem) -> str:
    """A job, as another gateway would store it: the one that workers call is stopped."""
    where = ("--repository", str(jobs.repository), "--jobs-redis-url", jobs.redis.url)
    with ServiceProcess("all", *where) as gateway, Client(gateway.wait_until_ready().target) as client:
        return client.submit([classify("a")]).name


def test_a_job_that_kills_workers_is_set_aside_and_may_be_retried(slow_jobs: JobSystem) -> None:
    limits = (*_QUICK, "--max-attempts", "2")
    with Client(slow_jobs.gateway.target) as client:
        job = client.submit([classify("a")])
        for attempt in (b"1", b"2"):
            with slow_jobs.worker(*limits) as worker:
                until(lambda: slow_jobs.fields(job.name).get("attempts") == attempt, f"attempt {attempt!r}")  # noqa: B023
                worker.signal(signal.SIGKILL)
                worker.wait()
        with slow_jobs.worker(*limits):
            with pytest.raises(Unavailable, match="2 workers died or hung while they had this job"):
                job.wait(60)
            (dead,) = slow_jobs.redis.ask("ZRANGE", "neuronpipe-jobs:dead", 0, -1)
            assert f"jobs/{dead.decode()}" == job.name
            _retry(slow_jobs, job.name)
            (outcome,) = job.wait(60)
            assert outcome.HasField("response")
        assert slow_jobs.redis.ask("ZCARD", "neuronpipe-jobs:dead") == 0


def _retry(jobs: JobSystem, name: str) -> None:
    assert output("job", "dead", "retry", name, "--jobs-redis-url", jobs.redis.url) == f"{name} waits again\n"


def test_a_worker_that_drains_gives_back_what_it_cannot_finish(slow_jobs: JobSystem) -> None:
    with Client(slow_jobs.gateway.target) as client:
        submitted = _submit(client, 3, "drained")
        with slow_jobs.worker("--max-jobs", "2", "--grace-s", "0.3") as worker:
            until(lambda: sum(slow_jobs.state(job.name) == "running" for job in submitted) == 2, "two run")
            worker.signal(signal.SIGTERM)
            assert worker.wait() == 0
        assert {slow_jobs.state(job.name) for job in submitted} == {"queued"}
        with slow_jobs.worker():
            for job in submitted:
                job.wait(60)
                assert job.status().metadata.attempts == 1


@_long_only
def test_a_worker_ends_while_redis_hangs_and_another_takes_its_jobs(slow_jobs: JobSystem) -> None:
    with Client(slow_jobs.gateway.target) as client:
        job = client.submit([classify("a")])
        with slow_jobs.worker(*_QUICK, "--grace-s", "0.3") as worker:
            until(lambda: slow_jobs.state(job.name) == "running", "it runs")
            slow_jobs.redis.send(signal.SIGSTOP)
            worker.signal(signal.SIGTERM)
            assert worker.wait(10) == 0
            slow_jobs.redis.send(signal.SIGCONT)
        with slow_jobs.worker(*_QUICK):
            job.wait(60)


def test_a_worker_that_hangs_longer_than_its_lease_leaves_its_job_to_another(slow_jobs: JobSystem) -> None:
    """Each batch takes a second and a half, so that the job is not done when the worker goes on."""
    with Client(slow_jobs.gateway.target) as client:
        endings = Endings(slow_jobs)
        with slow_jobs.worker(*_QUICK) as hung:
            job = client.submit([classify(f"text {number}") for number in range(40)])
            until(lambda: slow_jobs.fields(job.name).get("completed", b"0") != b"0", "some inputs are done")
            hung.signal(signal.SIGSTOP)
            with slow_jobs.worker(*_QUICK) as second:
                until(lambda: slow_jobs.fields(job.name).get("attempts") == b"2", "another worker has it")
                hung.signal(signal.SIGCONT)
                until(lambda: not _held(slow_jobs, hung) and _held(slow_jobs, second) == 1, "the first one lets it go")
                job.wait(60)
                assert job.status().metadata.attempts == 2
        assert endings.read(1) == {job.name: 1}


def _held(jobs: JobSystem, worker: ServiceProcess) -> int:
    """How many jobs a worker has by what Redis knows."""
    keys = jobs.redis.ask("KEYS", f"neuronpipe-jobs:held:*-{worker.pid}-*")
    return sum(jobs.redis.ask("SCARD", key) for key in keys)


@_long_only
def test_a_running_job_that_is_cancelled_stops(slow_jobs: JobSystem) -> None:
    with Client(slow_jobs.gateway.target) as client, slow_jobs.worker(*_QUICK) as worker:
        job = client.submit([classify(f"text {number}") for number in range(300)])
        until(lambda: slow_jobs.state(job.name) == "running", "a worker takes it")
        job.cancel()
        next_job = client.submit([classify("other")])
        next_job.wait(60)
        worker.signal(signal.SIGTERM)
        assert worker.wait() == 0
        assert slow_jobs.state(job.name) == "cancelled"


def test_redis_is_killed_and_started_again_with_its_file(quick_jobs: JobSystem) -> None:
    jobs = quick_jobs
    with Client(jobs.gateway.target) as client, jobs.worker(*_QUICK):
        submitted = _submit(client, 30, "before")
        jobs.redis.stop()
        with pytest.raises(Unavailable):
            client.submit([classify("while it is down")])
        jobs.redis.start()
        submitted += _submit(client, 30, "after")
        for job in submitted:
            assert [outcome.WhichOneof("outcome") for outcome in job.wait(60)] == ["response"]


def test_a_full_redis_refuses_jobs_and_those_that_it_has_still_end(quick_jobs: JobSystem) -> None:
    jobs = quick_jobs
    with Client(jobs.gateway.target) as client:
        used = int(jobs.redis.ask("INFO", "memory")["used_memory"])
        jobs.redis.ask("CONFIG", "SET", "maxmemory", used + (2 << 20))
        text = "word " * 20_000
        request = classify("a")
        request.input.text_classification.text_pair = text
        submitted: list[Job] = []
        with pytest.raises(Overloaded, match="Redis of jobs is full"):
            submitted.extend(client.submit([request]) for _ in range(1000))
        assert len(submitted) > 5
        with jobs.worker():
            for job in submitted:
                job.wait(60)
            client.submit([classify("there is room again")]).wait(60)
        jobs.redis.ask("CONFIG", "SET", "maxmemory", 0)


def test_no_job_is_lost_and_none_is_answered_twice(quick_jobs: JobSystem) -> None:
    """On the way a worker is killed, and another one drains."""
    jobs = quick_jobs
    with Client(jobs.gateway.target) as client:
        endings = Endings(jobs)
        with jobs.worker(*_QUICK) as killed, jobs.worker(*_QUICK) as drained, jobs.worker(*_QUICK):
            names = []
            for number in range(_JOBS):
                names.append(client.submit([classify(f"text {number}")]).name)
                if number == _JOBS // 3:
                    killed.signal(signal.SIGKILL)
                if number == 2 * _JOBS // 3:
                    drained.signal(signal.SIGTERM)
            for name in names:
                (outcome,) = client.job(name).wait(60)
                assert outcome.response.request_id == f"{name.removeprefix('jobs/')}/0"
            killed.wait()
        counts = endings.read(_JOBS)
        assert {name: count for name, count in counts.items() if count != 1} == {}
        assert set(counts) == set(names)
        assert jobs.redis.ask("KEYS", "neuronpipe-jobs:waiting:*") == []
        assert jobs.redis.ask("KEYS", "neuronpipe-jobs:running:*") == []
        assert jobs.redis.ask("KEYS", "neuronpipe-jobs:held:*") == []
        assert jobs.redis.ask("ZCARD", "neuronpipe-jobs:open") == 0
