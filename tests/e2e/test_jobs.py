"""The stack with the layer jobs: jobs outlive the worker and the Redis that have them."""

from collections.abc import Iterator

import pytest

from neuronpipe.client import Client
from tests.callers.requests import classify
from tests.e2e.stack import Stack, wait_until


@pytest.fixture(scope="module")
def jobs(stack: Stack) -> Iterator[Stack]:
    """The stack while it takes jobs."""
    with stack.with_jobs():
        yield stack


def test_a_job_is_answered(jobs: Stack) -> None:
    with Client(jobs.target) as client:
        request = classify("a fine day")
        (outcome,) = client.submit([request]).wait(60)
        assert outcome.response.result == client.infer(request).result
    (worker,) = jobs.containers("worker")
    assert jobs.metric(worker, "neuronpipe_jobs_ended_total") >= 1


def test_jobs_outlive_a_worker_and_a_redis_that_are_killed(jobs: Stack) -> None:
    with Client(jobs.target) as client:
        submitted = [client.submit([classify(f"text {number}")]) for number in range(50)]
        for service in ("worker", "jobs-redis"):
            (container,) = jobs.containers(service)
            jobs.kill(container)
        wait_until("both are back", lambda: all(jobs.containers(service) for service in ("worker", "jobs-redis")))
        for job in submitted:
            (outcome,) = job.wait(120)
            assert outcome.HasField("response")
