"""A Redis of jobs for tests of its store and of what reads it."""

from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from neuronpipe.bulk.jobs.settings import JobSettings
from neuronpipe.bulk.jobs.store import JobStore
from tests.servers.redis import RedisServer, redis_server


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server(is_durable=True) as redis:
        yield redis


@pytest_asyncio.fixture
async def store(redis: RedisServer) -> AsyncIterator[JobStore]:
    redis.ask("FLUSHALL")
    store = JobStore(JobSettings(jobs_redis_url=redis.url))
    yield store
    await store.close()
