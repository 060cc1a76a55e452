"""A closed loop, or an open one, in a process of its own: the same for echo servers, all systems of ours and those
beside them.

It sends bytes and keeps bytes: what the answers say is read after the loop. A fuller generator (neuronpipe load) takes
more of the machine from the system that it measures, and would hide differences between systems.
"""

import asyncio
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Self, TypeAlias

import grpc
import psutil
import uvloop

from neuronpipe.api.v1.inference_pb2 import InferResponse, StageTimings
from neuronpipe.measure.load.generator import poisson_arrivals_s
from neuronpipe.platform.process.worker import Worker
from neuronpipe.rpc.client import open_channel
from tests.bench.callers import WARM_UP_S, percentiles_ms, run_callers
from tests.bench.light_clients import Calls, run_arrivals, run_grpc, run_http

INFER = "/neuronpipe.api.v1.InferenceService/Infer"
ECHO = "/bench.Echo/Call"
# How a system is called: by the clients of light_clients, or by grpc.aio.
GRPC, HTTP, GRPCIO = "gRPC", "HTTP", "grpcio"
_CALL_LIMIT_S = 30.0
_PARTS = ("total", "preprocess", "predict_queue", "predict_compute", "predict", "postprocess")


@dataclass(frozen=True)
class System:
    """Where a server answers calls of a method, or of a path of HTTP.

    `pids`: the server's processes; their children count, too. `ca`: the authority of its certificate; empty: no TLS.
    """

    name: str
    target: str
    method: str = INFER
    pids: tuple[int, ...] = ()
    client: str = GRPC
    ca: bytes = b""


@dataclass(frozen=True)
class Loop:
    """What one closed loop found.

    `figures`: the share of a CPU that the generator took, the CPU time of it and of all server processes per request in
    µs (warm-up included), how many were answered (the same; not by grpcio), and what our method's answers tell.
    """

    throughput_per_s: float
    errors: int
    latencies_ms: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenLoop:
    """What an open loop found. `in_time_s`: latencies, from when a call was due, of the answers that came before
    the deadline.
    """

    offered_per_s: float
    in_time_s: Sequence[float]
    refused: int
    send_lag_p99_ms: float
    generator_cpu: float


# What the generator does with its requests, and the further arguments of that.
_Order: TypeAlias = tuple[Callable[..., Coroutine[None, None, Any]], tuple[Any, ...]]


class ClosedLoop:
    """The generator, as its process's parent sees it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def measure(self, system: System, callers: int, seconds: float) -> Loop:
        """Blocks for the seconds and the warm-up. Raises ConnectionError, and ProcessEnded where the generator ends."""
        loop: Loop = self._order(_run, system, callers, seconds)
        return loop

    def answers(self, system: System, callers: int, count: int) -> list[bytes]:
        """The answers to the first requests, in the order in which they came. Raises ConnectionError."""
        answers: list[bytes] = self._order(_answers, system, callers, count)
        return answers

    def offer(self, system: System, rate_per_s: float, seconds: float, deadline_s: float, seed: int) -> OpenLoop:
        """Calls that arrive at random, whether earlier ones are answered or not. Raises ConnectionError."""
        loop: OpenLoop = self._order(_offer, system, rate_per_s, seconds, deadline_s, seed)
        return loop

    def _order(self, work: Callable[..., Coroutine[None, None, Any]], *arguments: Any) -> Any:
        self._worker.send((work, arguments))
        found = self._worker.receive()
        if isinstance(found, Exception):
            raise found
        return found

    @classmethod
    @contextmanager
    def started(cls, requests: Sequence[bytes]) -> Iterator[Self]:
        """A generator that sends these requests, round and round; ended with the block."""
        with Worker.started(_serve, list(requests), name="closed loop") as worker:
            yield cls(worker)


def _serve(pipe: "Connection[Any, _Order]", requests: Sequence[bytes]) -> None:
    while True:
        work, arguments = pipe.recv()
        try:
            pipe.send(uvloop.run(work(requests, *arguments)))
        except OSError as error:
            pipe.send(ConnectionError(str(error) or f"no answer within {_CALL_LIMIT_S:g} s"))


async def _answers(requests: Sequence[bytes], system: System, callers: int, count: int) -> list[bytes]:
    calls = Calls(iter(requests[:count]), callers)
    await _call(system, calls, callers)
    if calls.errors:
        raise ConnectionError(f"{system.name}: {calls.errors} of {count} calls failed: {calls.failure}")
    return [answer for _, answer in calls.answered]


async def _offer(
    requests: Sequence[bytes], system: System, rate_per_s: float, seconds: float, deadline_s: float, seed: int
) -> OpenLoop:
    arrivals_s = poisson_arrivals_s(rate_per_s, seconds, (seed,))
    cpu_began_s = time.process_time()
    calls, lags_s = await run_arrivals(arrivals_s, itertools.cycle(requests), deadline_s, system.target, system.method)
    generator_s = time.process_time() - cpu_began_s
    in_time_s = [duration_s for duration_s, _ in calls.answered if duration_s <= deadline_s]
    lag_ms = percentiles_ms(lags_s)[2]
    return OpenLoop(calls.count / seconds, in_time_s, calls.errors, lag_ms, generator_s / (seconds + deadline_s))


async def _call(system: System, calls: Calls, callers: int, seconds: float = 0.0) -> None:
    """Raises ConnectionError, and TimeoutError for a server that does not answer."""
    async with asyncio.timeout(WARM_UP_S + seconds + _CALL_LIMIT_S):
        if system.client == HTTP:
            await run_http(calls, callers, system.target, system.method)
        else:
            await run_grpc(calls, callers, system.target, system.method, system.ca)


async def _run(requests: Sequence[bytes], system: System, callers: int, seconds: float) -> Loop:
    texts = itertools.cycle(requests)
    server_began_s, cpu_began_s = _cpu_s(system.pids), time.process_time()
    cpu: dict[str, float] = {}
    # It would look through all answers again and again.
    gc.disable()
    if system.client == GRPCIO:
        answered, errors, count = await _by_grpcio(texts, system, callers, seconds)
    else:
        began_s = time.perf_counter() + WARM_UP_S
        calls = Calls(texts, callers, began_s, began_s + seconds)
        await _call(system, calls, callers, seconds)
        answered, errors, count = calls.answered, calls.errors, calls.count
        cpu["answered"] = count - calls.failed
    generator_s = time.process_time() - cpu_began_s
    cpu |= {"generator_cpu": generator_s / (WARM_UP_S + seconds), "generator_cpu_us": generator_s / count * 1e6}
    if system.pids:
        cpu["server_cpu_us"] = (_cpu_s(system.pids) - server_began_s) / count * 1e6
    gc.enable()
    if len(answered) < 2:
        return Loop(len(answered) / seconds, errors, figures=cpu)
    latencies_ms = dict(
        zip(("p50", "p90", "p99"), percentiles_ms([duration_s for duration_s, _ in answered]), strict=True)
    )
    figures = _figures([answer for _, answer in answered]) if system.method == INFER else {}
    return Loop(len(answered) / seconds, errors, latencies_ms, {**cpu, **figures})


async def _by_grpcio(
    requests: Iterator[bytes], system: System, callers: int, seconds: float
) -> tuple[list[tuple[float, bytes]], int, int]:
    """Durations and answers, the number of errors, and that of calls with the warm-up's."""
    count = 0
    async with open_channel(system.target) as channel:
        call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(system.method)

        async def ask() -> bytes:
            nonlocal count
            count += 1
            return await call(next(requests), timeout=_CALL_LIMIT_S)

        answered, errors = await run_callers(ask, callers, seconds, expected_error=grpc.aio.AioRpcError)
    return answered, errors, count


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
