"""What is looked at during the day: health and memory of each process; and at its end: what must be back at zero."""

import asyncio
import ssl
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import grpc
import httpx
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from neuronpipe.bundles.repository import read_repository
from neuronpipe.gateway.held_items import MAX_HELD_BYTES
from neuronpipe.gateway.settings import ResultCacheSettings
from neuronpipe.stages.neuron_executor.memory import plan_memory
from neuronpipe.stages.settings import EncodingSettings, EngineSettings
from tests.day.system import GATEWAYS, RECEIVING_BYTES, WORKERS, Member, System
from tests.servers.tls_files import STAGES

_EVERY_S = 0.5
_LIMIT_S = 3.0
_MIB = 1 << 20
_PROCESS_MIB = 110
# The largest image or text that is decoded: see docs/deployment.md#memory.
_DECODED_MIB = 256
_SERVICE = "neuronpipe.api.v1.InferenceService"
# Gauges of what is on its way.
_GAUGES = (
    "neuronpipe_request_in_flight",
    "neuronpipe_request_tokens_in_flight",
    "neuronpipe_request_in_flight_share",
    "neuronpipe_tenant_in_flight",
    "neuronpipe_held_requests",
    "neuronpipe_item_in_flight",
    "neuronpipe_queue_sequences",
    "neuronpipe_queue_tokens",
    "neuronpipe_generation_sequences",
    "neuronpipe_jobs_waiting",
    "neuronpipe_jobs_running",
    "neuronpipe_jobs_dead",
    "neuronpipe_job_notifications_waiting",
)
_SOON_S = 30.0


def limits_mib(system: System) -> dict[str, float]:
    """The memory that each process may take by docs/deployment.md#memory."""
    bundles = read_repository(system.repository)
    results, tokenizer = ResultCacheSettings(), EncodingSettings()
    messages = 2 * RECEIVING_BYTES / _MIB
    of_gateway = _PROCESS_MIB + messages + (results.result_cache_bytes + MAX_HELD_BYTES) / _MIB
    of_tokenizer = _PROCESS_MIB + messages + 2 * tokenizer.token_cache_bytes / _MIB
    return {
        "tokenizer": of_tokenizer + _DECODED_MIB,
        # Versions 1 and 2 of the encoder are loaded together while a canary has a share.
        "neuron-executor": plan_memory(bundles, EngineSettings()).total / _MIB + messages,
        "postprocessor": _PROCESS_MIB + messages,
        **dict.fromkeys(GATEWAYS, of_gateway),
        **dict.fromkeys(WORKERS, _PROCESS_MIB + messages),
    }


class Watch:
    """Looks at health and memory until it is cancelled. `memory`: by process, times and MiB."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.memory: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.health_checks = 0

    async def run(self) -> None:
        """Looks at all processes twice a second."""
        while True:
            for name, member in self._system.members.items():
                if (size := member.rss_mib()) is not None:
                    self.memory[name].append((time.monotonic(), size))
            await asyncio.gather(*(self._check(name, member) for name, member in self._system.members.items()))
            await asyncio.sleep(_EVERY_S)

    async def all_is_reached(self) -> None:
        """Waits until each gateway reaches each stage."""
        ends_s = time.monotonic() + _SOON_S
        for gateway in GATEWAYS:
            for stage in STAGES:
                while problem := await self._problem(gateway, self._system.members[gateway], stage):
                    if time.monotonic() > ends_s:
                        self._system.timeline.faults[f"{gateway} does not reach {stage} again: {problem}"] += 1
                        break
                    await asyncio.sleep(0.1)

    async def _check(self, name: str, member: Member) -> None:
        """A process that nothing happens to answers that it serves; a gateway, that it reaches all stages or holds."""
        if not member.is_steady or not member.process:
            return
        process = member.process
        problem = await self._problem(name, member, _SERVICE if name in GATEWAYS else "")
        self.health_checks += 1
        if problem and member.is_steady and member.process is process:
            self._system.timeline.faults[f"health of {name}: {problem}"] += 1
        if member.has_ended:
            self._system.timeline.faults[f"{name} has ended by itself"] += 1

    async def _problem(self, name: str, member: Member, service: str) -> str:
        """Why a service of a process is not healthy; empty where it is."""
        try:
            async with self._channel(name, member) as channel:
                answer = await HealthStub(channel).Check(HealthCheckRequest(service=service), timeout=_LIMIT_S)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        is_well = answer.status == HealthCheckResponse.SERVING
        return "" if is_well else HealthCheckResponse.ServingStatus.Name(answer.status)

    def _channel(self, name: str, member: Member) -> grpc.aio.Channel:
        # Not what a channel before it knew of this address.
        own = [("grpc.use_local_subchannel_pool", 1)]
        if name not in STAGES:
            return grpc.aio.insecure_channel(member.address, own)
        files = self._system.tls.files("gateway")
        pem = [Path(file).read_bytes() for file in (files.ca, files.key, files.certificate)]
        credentials = grpc.ssl_channel_credentials(*pem)
        return grpc.aio.secure_channel(member.address, credentials, own)


async def look_at_rest(system: System) -> None:
    """Once nobody calls, all that was on its way is at zero, in each process and in Redis."""
    ends_s = time.monotonic() + _SOON_S
    while left := {**await _gauges(system), **_keys(system)}:
        if time.monotonic() > ends_s:
            for name, value in left.items():
                system.timeline.faults[f"at the end: {name} is {value:g}"] += 1
            return
        await asyncio.sleep(0.5)


async def _gauges(system: System) -> Mapping[str, float]:
    left: dict[str, float] = {}
    shown = set[str]()
    for name, member in system.members.items():
        verify = _tls_context(system) if name in STAGES else False
        try:
            async with httpx.AsyncClient(timeout=30, verify=verify) as http:
                page = (await http.get(f"http{'s' if verify else ''}://{member.metrics}/metrics")).text
        except httpx.HTTPError as error:
            left[f"{name}: its metrics page, {error}"] = 1.0
            continue
        for line in page.splitlines():
            metric, _, value = line.rpartition(" ")
            shown.add(metric.partition("{")[0])
            if metric.partition("{")[0] in _GAUGES and float(value):
                left[f"{name}: {metric}"] = float(value)
    return left | {f"a page of metrics without {gauge}": 1.0 for gauge in _GAUGES if gauge not in shown}


def _tls_context(system: System) -> ssl.SSLContext:
    files = system.tls.files("gateway")
    context = ssl.create_default_context(cafile=files.ca)
    context.load_cert_chain(files.certificate, files.key)
    return context


def _keys(system: System) -> Mapping[str, float]:
    redis = system.master()
    patterns = ("waiting", "running", "held")
    found = [key.decode() for pattern in patterns for key in redis.ask("KEYS", f"neuronpipe-jobs:{pattern}:*")]
    left = dict.fromkeys(found, 1.0)
    if count := redis.ask("ZCARD", "neuronpipe-jobs:open"):
        left["open jobs in Redis"] = float(count)
    return left
