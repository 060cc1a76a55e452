"""Jobs that wait: no worker is there but those that a test starts; and what a Redis for jobs must be."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from demo.processes import ServiceProcess
from neuronpipe.api.keda.v1 import external_scaler_pb2 as keda
from neuronpipe.api.keda.v1.external_scaler_pb2_grpc import ExternalScalerStub
from neuronpipe.api.v1.jobs_pb2 import JobPriority, JobState
from neuronpipe.client import Cancelled, Client, DeadlineExceeded, JobNotFound, NotConfigured
from tests.callers.requests import classify
from tests.models.repository import link_models
from tests.servers.redis import redis_server
from tests.suite.commands import run
from tests.systems.jobs import JobSystem, job_system

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]


@pytest.fixture(scope="module")
def jobs(fake_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobSystem]:
    """A gateway that takes jobs."""
    models = link_models(tmp_path_factory.mktemp("jobs") / "repository", fake_repository, "classifier")
    with job_system(models) as jobs:
        yield jobs


@pytest.fixture
def client(jobs: JobSystem) -> Iterator[Client]:
    with Client(jobs.gateway.target) as client:
        yield client


def test_jobs_of_a_higher_priority_begin_first(jobs: JobSystem, client: Client) -> None:
    submitted = [
        client.submit([classify("a")], priority=priority)
        for priority in (
            JobPriority.JOB_PRIORITY_LOW,
            JobPriority.JOB_PRIORITY_NORMAL,
            JobPriority.JOB_PRIORITY_HIGH,
            JobPriority.JOB_PRIORITY_NORMAL,
        )
    ]
    with jobs.worker("--max-jobs", "1"):
        for job in submitted:
            job.wait(30)
    began = [job.status().metadata.start_time.ToNanoseconds() for job in submitted]
    assert sorted(range(4), key=lambda number: began[number]) == [2, 1, 3, 0]


def test_a_job_that_nobody_takes_expires(client: Client) -> None:
    job = client.submit([classify("a")], time_to_live_s=1)
    with pytest.raises(DeadlineExceeded, match="time to live"):
        job.wait(30)


def test_a_waiting_job_is_cancelled_and_never_run(jobs: JobSystem, client: Client) -> None:
    job = client.submit([classify("a")])
    job.cancel()
    with pytest.raises(Cancelled):
        job.wait(30)
    assert "request" not in jobs.fields(job.name)
    assert jobs.redis.ask("KEYS", "neuronpipe-jobs:waiting:*") == []


def test_a_waiter_is_told_that_the_time_is_over_and_the_job_stays(client: Client) -> None:
    job = client.submit([classify("a")])
    with pytest.raises(DeadlineExceeded, match=r"has not ended within 0\.2 s"):
        job.wait(0.2)
    assert job.status().metadata.state == JobState.JOB_STATE_QUEUED
    job.delete()
    with pytest.raises(JobNotFound):
        job.status()


def test_keda_learns_of_jobs_where_there_is_no_worker(jobs: JobSystem, client: Client) -> None:
    with jobs.worker("--max-jobs", "0") as scaler, grpc.insecure_channel(scaler.target) as channel:
        stub: Any = ExternalScalerStub(channel)
        reference = keda.ScaledObjectRef(scalerMetadata={"jobsPerWorker": "2.5"})
        changes = stub.StreamIsActive(reference)
        assert next(changes).result is False
        submitted = [client.submit([classify("a")]) for _ in range(3)]
        assert next(changes).result is True
        assert stub.IsActive(reference).result is True
        (spec,) = stub.GetMetricSpec(reference).metricSpecs
        assert (spec.metricName, spec.targetSizeFloat) == ("neuronpipe-jobs", 2.5)
        (value,) = stub.GetMetrics(keda.GetMetricsRequest(metricName=spec.metricName)).metricValues
        assert (value.metricValue, value.metricValueFloat) == (3, 3.0)
        for job in submitted:
            job.cancel()
        assert next(changes).result is False
        changes.cancel()


def test_a_gateway_without_redis_says_what_turns_jobs_on(fake_repository: Path, tmp_path: Path) -> None:
    models = link_models(tmp_path / "repository", fake_repository, "classifier")
    with (
        ServiceProcess("all", "--repository", str(models)) as gateway,
        Client(gateway.wait_until_ready().target) as client,
        pytest.raises(NotConfigured, match="set --jobs-redis-url"),
    ):
        client.submit([classify("a")])


@pytest.mark.parametrize(
    ("options", "is_durable", "problem"),
    [
        ((), False, "appendonly"),
        (("--maxmemory-policy", "allkeys-lru"), True, "maxmemory-policy is 'allkeys-lru', must be 'noeviction'"),
    ],
)
def test_a_redis_that_would_lose_jobs_is_refused_by_name(
    options: tuple[str, ...], is_durable: bool, problem: str
) -> None:
    with redis_server(*options, is_durable=is_durable) as redis:
        ran = run("serve", "worker", "--jobs-redis-url", redis.url)
    assert ran.returncode == 2
    assert problem in ran.stderr
