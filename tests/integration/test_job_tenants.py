"""Jobs of several tenants: none stops another's, waits away its places, fills its Redis, or reaches its objects."""

import asyncio
import contextlib
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
from neuronpipe.api.v1.jobs_pb2 import JobPriority, SubmitInferenceRequest
from neuronpipe.client import AsyncClient, Client, InvalidInput, Job, NotAllowed, Overloaded
from neuronpipe.gateway.callers.keys import create_key
from neuronpipe.rpc.client import KEY_VARIABLE
from tests.integration.job_system import JobSystem, job_system, until
from tests.integration.requests import embed
from tests.integration.systems import make_slow
from tests.models.repository import link_models

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


def test_a_tenant_over_its_quota_does_not_stop_the_jobs_of_others(shared: Shared) -> None:
    with shared.worker(), shared.client("small") as small, shared.client("victim") as victim:
        flood = [small.submit([embed(f"{job} {n} " * 20) for n in range(20)]) for job in range(30)]
        until(lambda: any(shared.jobs.state(job.name) == "running" for job in flood), "the flood has begun")
        time.sleep(1)
        took_s = []
        for number in range(10):
            began_s = time.monotonic()
            victim.submit([embed(str(number))]).wait(20)
            took_s.append(time.monotonic() - began_s)
        assert max(took_s) < 10, took_s
        assert not all(job.status().is_done for job in flood)
        for job in flood:
            job.cancel()


async def test_waits_have_places_of_their_own_and_one_look_for_each_job(shared: Shared) -> None:
    with shared.client("mallory") as mallory, shared.client("victim") as victim:
        job, other = mallory.submit([embed("a")]), victim.submit([embed("b")])
    target = shared.jobs.gateway.target
    metadata = [("authorization", f"Bearer {shared.keys['mallory']}")]
    ended: list[grpc.StatusCode] = []
    async with (
        grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as one,
        grpc.aio.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)]) as two,
        AsyncClient(target, api_key=shared.keys["victim"], retries=False) as client,
    ):
        data = WaitOperationRequest(name=job.name).SerializeToString()

        async def wait(channel: grpc.aio.Channel) -> None:
            try:
                await channel.unary_unary(_WAIT)(data, metadata=metadata, timeout=60)
            except grpc.aio.AioRpcError as failure:
                ended.append(failure.code())

        waits = [asyncio.create_task(wait(channel)) for channel in (one, two) for _ in range(700)]
        async with asyncio.timeout(30):
            while len(ended) < 300:
                await asyncio.sleep(0.05)
        # Half of 2,048 places are the tenant's.
        await asyncio.sleep(0.5)
        assert len(waits) - len(ended) == pytest.approx(1024, abs=1)
        assert set(ended) == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        looks = _looks(shared)
        theirs = asyncio.create_task(client.job(other.name).wait(60))
        for number in range(20):
            await client.infer(embed(f"{number}"), timeout_s=20)
        await asyncio.sleep(6)
        assert 0 < _looks(shared) - looks < 30  # two jobs, each five seconds
        with shared.worker():
            assert await theirs
            await asyncio.gather(*waits)
    assert len(ended) < 400


def _looks(shared: Shared) -> int:
    """How often jobs were read."""
    return int(shared.jobs.redis.ask("INFO", "commandstats")["cmdstat_hmget"]["calls"])


def test_a_job_that_no_gateway_has_signed_reads_and_writes_nothing(shared: Shared) -> None:
    secret, stolen = shared.folder / "victim" / "secret.jsonl", shared.folder / "victim" / "stolen.jsonl"
    secret.parent.mkdir(parents=True, exist_ok=True)
    secret.write_text("{}\n")
    with shared.client("mallory") as mallory:
        folder = f"file://{shared.folder}/mallory"
        job = mallory.submit(input_uri=f"{folder}/in.jsonl", output_uri=f"{folder}/out.jsonl")
        key = f"neuronpipe-jobs:job:{job.name.removeprefix('jobs/')}"
        content = shared.jobs.fields(job.name)["request"]
        message = SubmitInferenceRequest.FromString(content)
        message.input_uri, message.output_uri = f"file://{secret}", f"file://{stolen}"
        shared.jobs.redis.ask("HSET", key, "request", message.SerializeToString())
        with shared.worker(), pytest.raises(NotAllowed, match="not signed"):
            job.wait(30)
    assert not stolen.exists()


def test_no_tenant_reaches_the_folder_of_another_whose_name_begins_with_its_own(shared: Shared) -> None:
    with shared.client("mallory") as mallory, shared.client("mallory/eu") as eu:
        own, theirs = f"file://{shared.folder}/mallory/eu/x.jsonl", f"file://{shared.folder}/mallory%252Feu/x.jsonl"
        with pytest.raises(InvalidInput, match="must be below"):
            eu.submit(input_uri=own)
        with pytest.raises(InvalidInput, match="must be below"):
            mallory.submit(input_uri=theirs)
        eu.submit(input_uri=theirs).cancel()
        mallory.submit(input_uri=own).cancel()


def test_ended_jobs_count_with_their_bytes_until_they_are_deleted(shared: Shared) -> None:
    with shared.client("hoarder") as hoarder, shared.client("victim") as victim:
        with pytest.raises(InvalidInput, match="notification_url: 1000017 characters, the limit is 2048"):
            hoarder.submit([embed("a")], notification_url=f"http://localhost/{'x' * 1_000_000}")
        kept: list[Job] = []

        def hoard() -> None:
            for number in range(1000):
                kept.append(hoarder.submit([embed(str(number))], notification_url=f"http://localhost/{'x' * 2000}"))
                kept[-1].cancel()

        with pytest.raises(Overloaded, match="'hoarder' and their results have 100000 bytes, the limit"):
            hoard()
        assert 20 < len(kept) < 60
        victim.submit([embed("a")]).cancel()
        for job in kept:
            job.delete()
        assert int(shared.jobs.redis.ask("GET", "neuronpipe-jobs:bytes:hoarder")) == 0
        hoarder.submit([embed("a")]).cancel()
        for list_name in ("jobs", "bytes", "kept"):
            assert int(shared.jobs.redis.ask("TTL", f"neuronpipe-jobs:{list_name}:hoarder")) > 0


def test_results_keep_to_the_bytes_of_their_tenant_and_others_have_room(shared: Shared) -> None:
    """Twelve jobs of 25 vectors each, whose results have some 40 KB."""

    def used() -> int:
        return int(shared.jobs.redis.ask("GET", "neuronpipe-jobs:bytes:victim"))

    with shared.worker(), shared.client("victim") as victim, shared.client("mallory") as mallory:
        kept: list[Job] = []
        with contextlib.suppress(Overloaded):
            kept.extend(victim.submit([embed(f"{job} {n}") for n in range(25)]) for job in range(12))
        assert len(kept) > 3
        mallory.submit([embed("a")]).wait(30)
        failed = 0
        while kept:
            until(lambda: any(shared.jobs.state(job.name) in ("succeeded", "failed") for job in kept), "some end")
            for _ in range(20):
                assert used() <= 100_000
                time.sleep(0.05)
            for job in [job for job in kept if job.status().is_done]:
                try:
                    assert len(job.wait(1)) == 25
                except Overloaded as error:
                    failed += 1
                    assert "100000 bytes, the limit (the gateway's jobs_max_tenant_bytes)" in str(error)  # noqa: PT017
                job.delete()
                kept.remove(job)
        assert failed < 3  # of those that began before the size of a result was known


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
