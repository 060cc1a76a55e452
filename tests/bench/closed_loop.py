"""A closed loop over gRPC in a process of its own, as light as grpc.aio lets it be, and the same one for the echo
server and all of ours.

It sends bytes and keeps bytes: what the answers say is read after the loop. A fuller generator (neuronpipe load) takes
more of the machine from the system that it measures, and would hide differences between systems.
"""

import itertools
import multiprocessing
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Self, TypeAlias

import grpc
import psutil
import uvloop

from neuronpipe.api.v1.inference_pb2 import InferResponse, StageTimings
from neuronpipe.rpc.client import open_channel
from tests.bench.callers import WARM_UP_S, percentiles_ms, run_callers

INFER = "/neuronpipe.api.v1.InferenceService/Infer"
ECHO = "/bench.Echo/Call"
_CALL_LIMIT_S = 30.0
_PARTS = ("total", "preprocess", "predict_queue", "predict_compute", "predict", "postprocess")


@dataclass(frozen=True)
class System:
    """Where a server answers calls of a method. `pids`: the server's processes; their children count, too."""

    name: str
    target: str
    method: str = INFER
    pids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Loop:
    """What one closed loop found.

    `figures`: the share of a CPU that the generator took, the CPU time of all server processes per request in µs
    (warm-up included), and what our method's answers tell.
    """

    throughput_per_s: float
    errors: int
    latencies_ms: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


_Order: TypeAlias = tuple[System, int, float]


class ClosedLoop:
    """The generator, as its process's parent sees it."""

    def __init__(self, pipe: "Connection[_Order | None, Loop]") -> None:
        self._pipe = pipe

    def measure(self, system: System, callers: int, seconds: float) -> Loop:
        """Blocks for the seconds and the warm-up. Raises EOFError where the generator ends."""
        self._pipe.send((system, callers, seconds))
        return self._pipe.recv()

    @classmethod
    @contextmanager
    def started(cls, requests: Sequence[bytes]) -> Iterator[Self]:
        """A generator that sends these requests, round and round; ended with the block."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, list(requests)), name="closed loop", daemon=True)
        process.start()
        theirs.close()
        try:
            yield cls(ours)
        finally:
            process.terminate()
            process.join()
            ours.close()


def _serve(pipe: "Connection[Loop, _Order | None]", requests: Sequence[bytes]) -> None:
    while True:
        try:
            order = pipe.recv()
        except EOFError:
            return
        if order is None:
            return
        pipe.send(uvloop.run(_run(requests, *order)))


async def _run(requests: Sequence[bytes], system: System, callers: int, seconds: float) -> Loop:
    texts = itertools.cycle(requests)
    async with open_channel(system.target) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(system.method)
        calls = 0

        async def ask() -> bytes:
            nonlocal calls
            calls += 1
            return await call(next(texts), timeout=_CALL_LIMIT_S)

        cpu_began_s, server_began_s = time.process_time(), _cpu_s(system.pids)
        answered, errors = await run_callers(ask, callers, seconds, expected_error=grpc.aio.AioRpcError)
        cpu = {"generator_cpu": (time.process_time() - cpu_began_s) / (WARM_UP_S + seconds)}
        if system.pids:
            cpu["server_cpu_us"] = (_cpu_s(system.pids) - server_began_s) / calls * 1e6
    if len(answered) < 2:
        return Loop(len(answered) / seconds, errors, figures=cpu)
    latencies_ms = dict(
        zip(("p50", "p90", "p99"), percentiles_ms([duration_s for duration_s, _ in answered]), strict=True)
    )
    figures = _figures([answer for _, answer in answered]) if system.method == INFER else {}
    return Loop(len(answered) / seconds, errors, latencies_ms, {**cpu, **figures})


def _cpu_s(pids: Iterable[int]) -> float:
    """The CPU time that processes and their children have taken so far."""
    every = [
        process for pid in pids for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True))
    ]
    return float(sum(times.user + times.system for times in (process.cpu_times() for process in every)))


def _figures(answers: Sequence[bytes]) -> dict[str, float]:
    responses = [InferResponse.FromString(answer) for answer in answers]
    padded = sum(one.usage.padded_tokens for one in responses)
    parts = {f"{part}_p50_ms": statistics.median(_part_ms(one.timings, part) for one in responses) for part in _PARTS}
    covered = [
        (one.timings.preprocess_ns + one.timings.predict_ns + one.timings.postprocess_ns) / one.timings.total_ns
        for one in responses
    ]
    return {
        "covered": statistics.median(covered),
        "covered_least": min(covered),
        "tokens_per_answer": statistics.fmean(one.usage.tokens for one in responses),
        "padding": 1 - sum(one.usage.tokens for one in responses) / max(1, padded),
        "batch_size": statistics.fmean(one.usage.batch_size for one in responses),
        **parts,
    }


def _part_ms(timings: StageTimings, part: str) -> float:
    duration_ns: int = getattr(timings, f"{part}_ns")
    return duration_ns / 1e6
