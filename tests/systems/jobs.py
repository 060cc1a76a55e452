"""A Redis for jobs, a gateway, and workers, as processes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo.processes import ServiceProcess
from tests.servers.redis import RedisServer, redis_server


@dataclass(frozen=True)
class JobSystem:
    """A store of jobs, and the gateway that accepts them."""

    repository: Path
    redis: RedisServer
    gateway: ServiceProcess

    @contextmanager
    def worker(self, *options: str) -> Iterator[ServiceProcess]:
        """Runs a worker, and yields it when it is ready. A test may kill the worker."""
        where = ("--jobs-redis-url", self.redis.url, "--target", self.gateway.target)
        with ServiceProcess("worker", *where, *options) as worker:
            yield worker.wait_until_ready()

    def fields(self, name: str) -> dict[str, bytes]:
        """Returns a job as Redis has it; empty for a job that does not exist."""
        found = self.redis.ask("HGETALL", f"neuronpipe-jobs:job:{name.removeprefix('jobs/')}")
        return {key.decode(): value for key, value in dict(found).items()}

    def state(self, name: str) -> str:
        """Returns the state of a job in Redis."""
        return self.fields(name).get("state", b"").decode()


@contextmanager
def job_system(repository: Path, *options: str, redis_options: Sequence[str] = ()) -> Iterator[JobSystem]:
    """Runs a gateway that accepts jobs, without a worker yet. `options`: options of the gateway."""
    with redis_server(*redis_options, is_durable=True) as redis:
        where = ("--repository", str(repository), "--jobs-redis-url", redis.url)
        with ServiceProcess("all", *where, *options) as gateway:
            yield JobSystem(repository, redis, gateway.wait_until_ready())
