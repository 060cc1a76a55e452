"""Jobs of several tenants: none stops another's, waits away its places, fills its Redis, or reaches its objects."""

import asyncio
import json
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from google.longrunning.operations_pb2 import WaitOperationRequest

from demo.processes import ServiceProcess
from neuronpipe.api.v1.jobs_pb2 import JobPriority
from neuronpipe.client import AsyncClient, Client
from neuronpipe.gateway.callers.keys import create_key
from neuronpipe.rpc.client import KEY_VARIABLE
from tests.callers.requests import embed
from tests.models.repository import link_models
from tests.suite.waiting import happens, until
from tests.systems.jobs import JobSystem, job_system
from tests.systems.pipelines import make_slow

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_TENANTS = """
[tenants.small]
tokens_per_minute = 100

[tenants.night]
highest_priority = "bulk"

[tenants.workers]
acts_for_others = true

[tenants."*"]
"""
_NAMES = ("small", "night", "workers", "victim", "mallory", "mallory/eu", "hoarder")
_WAIT = "/google.longrunning.Operations/WaitOperation"


@dataclass(frozen=True)
class Shared:
    """A gateway that several tenants share. `folder`: of the objects of jobs."""

    jobs: JobSystem
    folder: Path
    keys: Mapping[str, str]
    secret: Path

    def client(self, tenant: str) -> Client:
        return Client(self.jobs.gateway.target, api_key=self.keys[tenant], retries=False)

    def worker(self, *options: str) -> ServiceProcess:
        gateway = self.jobs.gateway
        where = ("--jobs-redis-url", self.jobs.redis.url, "--target", gateway.target, "--grace-s", "0.2")
        http = ("--http-target", f"http://{gateway.wait_for('listening for HTTP')['address']}")
        signed = ("--jobs-secret", str(self.secret))
        environment = {KEY_VARIABLE: self.keys["workers"]}
        return ServiceProcess("worker", *where, *http, *signed, *options, environment=environment)


@pytest.fixture(scope="module")
def shared(fake_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    folder = tmp_path_factory.mktemp("shared")
    models = link_models(folder / "repository", fake_repository, "minilm")
    make_slow(fake_repository, folder / "repository")
    objects, keys, secret = folder / "objects", folder / "keys", folder / "secret"
    secret.write_bytes(b"a secret of gateways and their workers")
    (folder / "tenants.toml").write_text(_TENANTS)
    given = {tenant: create_key(keys, tenant, tenant) for tenant in _NAMES}
    options = {
        "api-keys": keys,
        "tenants": folder / "tenants.toml",
        "http-listen": "127.0.0.1:0",
        "jobs-secret": secret,
        "jobs-uris": f"file://{objects}/{{tenant}}/",
        "jobs-sagemaker-output": f"file://{objects}/{{tenant}}/",
        "jobs-notification-hosts": "localhost",
        "jobs-max-tenant-bytes": 100_000,
    }
    with job_system(models, *(word for name, value in options.items() for word in (f"--{name}", str(value)))) as jobs:
        yield Shared(jobs, objects, given, secret)


async def test_waits_have_places_of_their_own_and_one_look_for_each_job(shared: Shared) -> None:
    with shared.client("mallory") as mallory, shared.client("victim") as victim:
        job, other = mallory.submit([embed("a")]), victim.submit([embed("b")])
    target = shared.jobs.gateway.target
    metadata = [("authorization", f"Bearer {shared.keys['mallory']}")]
    ended: list[grpc.StatusCode] = []
    async with (
        grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as first,
        grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as second,
        AsyncClient(target, api_key=shared.keys["victim"], retries=False) as client,
    ):
        data = WaitOperationRequest(name=job.name).SerializeToString()

        async def wait(channel: grpc.aio.Channel) -> None:
            try:
                await channel.unary_unary(_WAIT)(data, metadata=metadata, timeout=200)
            except grpc.aio.AioRpcError as failure:
                ended.append(failure.code())

        waits = [asyncio.create_task(wait(channel)) for channel in (first, second) for _ in range(700)]
        # Half of 2,048 places are the tenant's.
        await happens(lambda: len(waits) - len(ended) <= 1025)
        await asyncio.sleep(0.5)
        assert len(waits) - len(ended) == pytest.approx(1024, abs=1)
        assert set(ended) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        looks, began_s = _looks(shared), time.monotonic()
        theirs = asyncio.create_task(client.job(other.name).wait(60))
        for number in range(20):
            await client.infer(embed(f"{number}"), timeout_s=20)
        await asyncio.sleep(6)
        # Of two jobs, each now and then, however many wait.
        assert 0 < _looks(shared) - looks < max(30, 4 * (time.monotonic() - began_s))
        with shared.worker():
            assert await theirs
            await asyncio.gather(*waits)
    assert len(ended) < 400


def _looks(shared: Shared) -> int:
    """How often jobs were read."""
    return int(shared.jobs.redis.ask("INFO", "commandstats")["cmdstat_hmget"]["calls"])


def test_a_tenant_of_bulk_work_has_no_jobs_of_high_priority(shared: Shared) -> None:
    for tenant, priority in (("night", JobPriority.JOB_PRIORITY_NORMAL), ("victim", JobPriority.JOB_PRIORITY_HIGH)):
        with shared.client(tenant) as client:
            job = client.submit([embed("a")], priority=JobPriority.JOB_PRIORITY_HIGH)
            assert job.status().metadata.priority == priority
            job.cancel()


def test_an_invocation_whose_time_is_over_has_failed(shared: Shared) -> None:
    body = shared.folder / "mallory" / "body.json"
    body.parent.mkdir(parents=True, exist_ok=True)
    body.write_text(json.dumps({"inputs": "a"}))
    address = shared.jobs.gateway.wait_for("listening for HTTP")["address"]
    amazon = {"InputLocation": f"file://{body}", "InvocationTimeoutSeconds": "1"}
    headers = {f"X-Amzn-SageMaker-{name}": value for name, value in amazon.items()}
    headers |= {"authorization": f"Bearer {shared.keys['mallory']}", "content-type": "application/json"}
    url = f"http://{address}/endpoints/classifier/async-invocations"  # each batch takes a second and a half
    with shared.worker():
        asked = urllib.request.Request(url, b"", headers, method="POST")
        with urllib.request.urlopen(asked, timeout=20) as answer:
            failure = Path(answer.headers["X-Amzn-SageMaker-FailureLocation"].removeprefix("file://"))
        until(failure.exists, "the failure is written")
    assert b"deadline" in failure.read_bytes() or b"time" in failure.read_bytes()
