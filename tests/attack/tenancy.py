"""Attacks of one tenant on what tenants share: the overload of models, jobs and their waits, the table of tenants."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import httpx
from google.longrunning.operations_pb2 import Operation, WaitOperationRequest

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferBatchRequest
from neuronpipe.api.v1.jobs_pb2 import SubmitInferenceRequest
from neuronpipe.core.names import ON_BEHALF
from neuronpipe.gateway.callers.keys import create_key
from neuronpipe.rpc.client import KEY_VARIABLE
from tests.attack.frame import MALLORY, SYSTEMS, VICTIM, Attacked, attack
from tests.callers.requests import classify, embed
from tests.servers.redis import redis_server
from tests.systems.http_server import running_http_server
from tests.systems.pipelines import make_slow

_TENANTS = f"""
[tenants.{MALLORY}]
acts_for_others = true
tokens_per_minute = 100_000

[tenants.small]
tokens_per_minute = 100

[tenants.workers]
acts_for_others = true

[tenants."*"]
"""
_API = "/neuronpipe.api.v1"
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
# A tenant's own, in one try.
_WAITS, _JOBS, _NAMES = 4300, 60, 5000


@contextmanager
def _shared(repository: Path, folder: Path) -> Iterator[Attacked]:
    """`serve all` with jobs and a worker. Of two models one takes seconds to answer, as the attacker knows already.

    The victim's deadlines are short.
    """
    models = make_slow(repository, folder / "models")
    (models / "minilm").symlink_to(repository / "minilm")
    keys, tenants = folder / "keys", folder / "tenants.toml"
    tenants.write_text(_TENANTS)
    given = {tenant: create_key(keys, tenant, tenant) for tenant in (VICTIM, MALLORY, "workers")}
    with ExitStack() as stack:
        redis = stack.enter_context(redis_server(is_durable=True))
        jobs = ("--jobs-redis-url", redis.url)
        options = ("--api-keys", str(keys), "--tenants", str(tenants), "--open-services", "health,metrics")
        server = stack.enter_context(running_http_server(models, *options, *jobs))
        where = (*jobs, "--target", server.process.target)
        worker = ServiceProcess("worker", *where, "--grace-s", "1", environment={KEY_VARIABLE: given["workers"]})
        stack.enter_context(worker).wait_until_ready()
        attacked = Attacked(server.process, server.address, given, limit_s=3.0)
        requests = InferBatchRequest(requests=[classify(f"{number}") for number in range(8)])
        with grpc.insecure_channel(server.process.target) as channel:
            infer_batch: Any = channel.unary_unary(f"{_API}.InferenceService/InferBatch")
            infer_batch(requests.SerializeToString(), metadata=attacked.metadata, timeout=120)
        yield attacked


SYSTEMS["shared"] = _shared


@attack("H4", "requests that are always late, of a tenant whose answers take seconds", system="shared", is_quick=True)
async def late_requests(server: Attacked) -> None:
    data = classify("a").SerializeToString()
    async with grpc.aio.insecure_channel(server.target, _OPTIONS) as channel:
        infer: Any = channel.unary_unary(f"{_API}.InferenceService/Infer")
        while True:
            for limit_s in (0.02, 1.2):
                with contextlib.suppress(grpc.aio.AioRpcError):
                    await infer(data, metadata=server.metadata, timeout=limit_s)
                await asyncio.sleep(0.03)


async def _submit(channel: grpc.aio.Channel, metadata: list[tuple[str, str]], inputs: int) -> str:
    submitted = SubmitInferenceRequest(requests=[embed(f"{number} " * 20) for number in range(inputs)])
    submit: Any = channel.unary_unary(f"{_API}.JobService/SubmitInference")
    operation = Operation.FromString(await submit(submitted.SerializeToString(), metadata=metadata, timeout=20))
    return str(operation.name)


@attack("H5", "jobs of a tenant that is over its quota", system="shared", is_quick=True)
async def jobs_over_a_quota(server: Attacked) -> None:
    small = [*server.metadata, (ON_BEHALF, "small")]
    async with grpc.aio.insecure_channel(server.target, _OPTIONS) as channel:
        names = [await _submit(channel, small, 20) for _ in range(_JOBS)]
        # Beside them the jobs of others end within their usual time.
        for _ in range(3):
            began_s, name = time.monotonic(), await _submit(channel, [*server.metadata, (ON_BEHALF, "other")], 1)
            wait: Any = channel.unary_unary("/google.longrunning.Operations/WaitOperation")
            asked = WaitOperationRequest(name=name).SerializeToString()
            ended = await wait(asked, metadata=[*server.metadata, (ON_BEHALF, "other")], timeout=20)
            assert Operation.FromString(ended).done
            assert time.monotonic() - began_s < 3
        cancel: Any = channel.unary_unary("/google.longrunning.Operations/CancelOperation")
        for name in names:
            await cancel(WaitOperationRequest(name=name).SerializeToString(), metadata=small, timeout=20)


@attack("H6", "thousands of waits for one job", system="shared", is_quick=True)
async def idle_waits(server: Attacked) -> None:
    small = [*server.metadata, (ON_BEHALF, "small")]
    async with contextlib.AsyncExitStack() as stack:
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(server.target, _OPTIONS)) for _ in range(4)
        ]
        await asyncio.gather(*(_submit(channels[0], small, 20) for _ in range(_JOBS)))
        data = WaitOperationRequest(name=await _submit(channels[0], small, 20)).SerializeToString()

        async def wait(channel: grpc.aio.Channel) -> None:
            call: Any = channel.unary_unary("/google.longrunning.Operations/WaitOperation")
            with contextlib.suppress(grpc.aio.AioRpcError):
                await call(data, metadata=small, timeout=60)

        await asyncio.gather(*(wait(channels[number % 4]) for number in range(_WAITS)), asyncio.sleep(3600))


@attack("L3", "calls for thousands of tenants, and who reads the metrics", system="shared", sends_mib=8)
async def thousands_of_tenants(server: Attacked) -> None:
    data = embed("a").SerializeToString()
    async with (
        grpc.aio.insecure_channel(server.target, _OPTIONS) as channel,
        httpx.AsyncClient(base_url=f"http://{server.http}", timeout=20) as http,
    ):
        infer: Any = channel.unary_unary(f"{_API}.InferenceService/Infer")
        for number in range(_NAMES):
            with contextlib.suppress(grpc.aio.AioRpcError):
                await infer(data, metadata=[*server.metadata, (ON_BEHALF, f"tenant {number}")], timeout=20)
            if number % 50 == 0:
                assert (await http.get("/metrics")).status_code == 200
