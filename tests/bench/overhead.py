"""Latency of everything but the model: one caller, fake back end, through four processes and through one.

Run: make bench
A gRPC call that does nothing at all, to a process of its own, is measured in the same rounds: a request through four processes takes
four such calls and one through one process takes one, so its time is the floor, and the ratio to it is comparable between machines.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from multiprocessing.connection import Connection
from pathlib import Path

import grpc
import uvloop

from demo.model import find_minilm
from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferRequest, StageTimings
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput
from neuronpipe.bundles.compiler import CompileRequest, compile_bundle
from neuronpipe.client import AsyncClient

MODEL = "minilm"
REPOSITORY = Path(".cache/bench-repository")
TEXT = "A gateway passes every request through three stages and says how long each of them took."
ROUND = 100
WARM_UP = 300
# gRPC calls behind one request.
CALLS = {"four processes": 4, "one process": 1, "empty gRPC call": 1}


async def measure(targets: dict[str, str], empty_target: str, rounds: int) -> None:
    """Lets the systems take turns, so that a busy machine slows all alike, and prints a table."""
    request = InferRequest(model=MODEL, input=TaskInput(sentence_embedding=SentenceEmbeddingInput(text=TEXT)))
    timings: dict[str, list[StageTimings]] = {name: [] for name in targets}
    async with AsyncExitStack() as stack:
        calls: dict[str, Callable[[], Awaitable[None]]] = {}
        for name, target in targets.items():
            calls[name] = _request(await stack.enter_async_context(AsyncClient(target)), request, timings[name])
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(empty_target))
        calls["empty gRPC call"] = _empty_call(channel, request.SerializeToString())
        times_ms: dict[str, list[float]] = {name: [] for name in calls}
        for name, call in calls.items():
            await _time(call, WARM_UP)
            timings.get(name, []).clear()
        for _ in range(rounds):
            for name, call in calls.items():
                times_ms[name] += await _time(call, ROUND)
    _print(times_ms, timings)


def _request(client: AsyncClient, request: InferRequest, timings: list[StageTimings]) -> Callable[[], Awaitable[None]]:
    async def call() -> None:
        timings.append((await client.infer(request)).timings)

    return call


def _empty_call(channel: grpc.aio.Channel, message: bytes) -> Callable[[], Awaitable[None]]:
    method: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/bench.Empty/Call")

    async def call() -> None:
        await method(message)

    return call


async def _time(call: Callable[[], Awaitable[None]], count: int) -> list[float]:
    times_ms = []
    for _ in range(count):
        began_s = time.perf_counter()
        await call()
        times_ms.append((time.perf_counter() - began_s) * 1e3)
    return times_ms


def _print(times_ms: dict[str, list[float]], timings: dict[str, list[StageTimings]]) -> None:
    floor_ms = statistics.median(times_ms["empty gRPC call"])
    parts = f"{'total':>6} {'pre':>6} {'predict':>7} {'post':>6}"
    print(f"{'':16} {'p50 ms':>7} {'p90 ms':>7} {'p99 ms':>7} {'x floor':>8}   server's own p50: {parts}")
    for name, times in times_ms.items():
        cuts = statistics.quantiles(times, n=100)
        line = f"{name:16} {cuts[49]:7.2f} {cuts[89]:7.2f} {cuts[98]:7.2f} {cuts[49] / (CALLS[name] * floor_ms):8.2f}"
        if name in timings:
            total, pre, predict, post = (_median_ms(timings[name], part) for part in ("total", "preprocess", "predict", "postprocess"))
            line += f"{'':21}{total:6.2f} {pre:6.2f} {predict:7.2f} {post:6.2f}"
        print(line)


def _median_ms(timings: Sequence[StageTimings], part: str) -> float:
    durations_ns: list[int] = [getattr(one, f"{part}_ns") for one in timings]
    return statistics.median(durations_ns) / 1e6


def serve_empty_calls(parent: "Connection[int, int]") -> None:
    """A gRPC server that returns what it gets; sends its port to the parent. Runs in a process of its own."""

    async def echo(message: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> bytes:
        return message

    async def serve() -> None:
        server = grpc.aio.server()
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Empty", {"Call": handler}),))
        parent.send(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        await server.wait_for_termination()

    uvloop.run(serve())


def main() -> None:
    """Compiles the fake model where it is not there yet, starts the systems and measures."""
    parser = argparse.ArgumentParser(description="Latency of everything but the model.")
    parser.add_argument("--rounds", type=int, default=30, help=f"rounds of {ROUND} requests to each system")
    options = parser.parse_args()
    if not (REPOSITORY / MODEL).is_dir():
        request = CompileRequest(source=str(find_minilm()), task="sentence_embedding", repository=REPOSITORY, name=MODEL, backend="fake")
        compile_bundle(request, print)
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    empty = context.Process(target=serve_empty_calls, args=(sender,), daemon=True)
    empty.start()
    try:
        with four_processes(REPOSITORY) as processes, ServiceProcess("all", "--repository", str(REPOSITORY)) as one:
            targets = {"four processes": processes["gateway"].target, "one process": one.wait_until_ready().target}
            uvloop.run(measure(targets, f"127.0.0.1:{receiver.recv()}", options.rounds))
    finally:
        empty.terminate()
        empty.join()


if __name__ == "__main__":
    main()
