"""Embeddings of MiniLM in float32 through openai's client: infinity beside `serve all`, in turns, each stopped while it
is not its turn.

It prints figures and writes nothing. CPU time is that of the server's processes, warm-up included.

Run: python -m tests.bench.openai_embeddings [--rounds 5] [--seconds 3] [--callers 1,8,32]
"""

import argparse
import asyncio
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import openai
import psutil
import uvloop

from demo.model import find_minilm, is_compiled
from demo.processes import ServiceProcess
from neuronpipe.compiler import CompileRequest, compile_bundle
from tests.bench.callers import WARM_UP_S, percentiles_ms, run_callers
from tests.bench.peers.environments import CACHE, environment_python
from tests.bench.peers.running import PeerProcess
from tests.bench.systems import NO_CACHE
from tests.bench.texts import make_texts

_TEXTS = 1024
_CHECKED_TEXTS = 16
_LIMIT_S = 120
# Vectors in float32 of two runtimes differ by some 1e-6.
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Server:
    """A server of OpenAI's embeddings. `family`: its processes, as they are now."""

    name: str
    url: str
    model: str
    family: Callable[[], list[psutil.Process]]

    def cpu_s(self) -> float:
        """The CPU time that its processes have taken so far."""
        return float(sum(times.user + times.system for times in (process.cpu_times() for process in self.family())))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops it for the length of the block."""
        family = self.family()
        try:
            for process in family:
                process.suspend()
            yield
        finally:
            for process in reversed(family):
                process.resume()


@contextmanager
def serving_infinity(source: Path) -> Iterator[Server]:
    """infinity with the settings of the benchmark; ended with the block."""
    command = [str(environment_python("infinity")), "-m", "tests.bench.peers.infinity_server", str(source)]
    with TemporaryDirectory() as folder, PeerProcess("infinity", command, Path(folder, "server.log")) as process:
        target = process.wait_for("ready", _LIMIT_S)["target"]
        yield Server("infinity", f"http://{target}", source.name, process.family)


@contextmanager
def serving_all(source: Path) -> Iterator[Server]:
    """`serve all` without a token cache, as the texts come round and round; ended with the block."""
    repository = CACHE / "repository-embeddings"
    if not is_compiled(repository, source.name):
        request = CompileRequest(source=str(source), task="sentence_embedding", repository=repository, name=source.name)
        compile_bundle(request, lambda line: None)
    options = ("--repository", str(repository), "--http-listen", "127.0.0.1:0", *NO_CACHE)
    with ServiceProcess("all", *options) as process:
        process.wait_until_ready()
        url = f"http://{process.wait_for('listening for HTTP')['address']}/v1"
        yield Server("neuronpipe", url, source.name, lambda: [psutil.Process(process.pid)])


Order = tuple[str, str, int, float]
# Answers a second, p50 in ms, p99 in ms, calls in all, the share of a CPU that the client took.
Found = tuple[float, float, float, int, float]


def serve_client(pipe: "Connection[Found, Order]", texts: Sequence[str]) -> None:
    """openai's client in a closed loop, in a process of its own: an order in, what it found out."""
    each = itertools.cycle(texts)

    async def run(url: str, model: str, callers: int, seconds: float) -> Found:
        calls = 0
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=_LIMIT_S) as client:

            async def ask() -> None:
                nonlocal calls
                calls += 1
                await client.embeddings.create(model=model, input=next(each))

            began_s = time.process_time()
            answered, errors = await run_callers(ask, callers, seconds, expected_error=openai.OpenAIError)
            cpu = (time.process_time() - began_s) / (WARM_UP_S + seconds)
        if errors or len(answered) < 2:
            raise RuntimeError(f"{url}: {errors} errors and {len(answered)} answers in {seconds} s: too few to measure")
        p50_ms, _, p99_ms = percentiles_ms([duration_s for duration_s, _ in answered])
        return len(answered) / seconds, p50_ms, p99_ms, calls, cpu

    while True:
        pipe.send(uvloop.run(run(*pipe.recv())))


@dataclass(frozen=True)
class Turn:
    """What one closed loop found."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    server_cpu_ms: float
    client_cpu: float


def measure(servers: Sequence[Server], callers: Sequence[int], rounds: int, seconds: float) -> None:
    """Prints the figures."""
    texts = make_texts(_TEXTS)
    asyncio.run(_check(servers, texts[:_CHECKED_TEXTS]))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    client = context.Process(target=serve_client, args=(theirs, texts), daemon=True)
    client.start()
    theirs.close()
    try:
        for count in callers:
            turns: dict[str, list[Turn]] = {server.name: [] for server in servers}
            for _, (server, other) in itertools.product(range(rounds), (servers, servers[::-1])):
                with other.paused():
                    before_s = server.cpu_s()
                    ours.send((server.url, server.model, count, seconds))
                    rate, p50_ms, p99_ms, calls, client_cpu = ours.recv()
                    cpu_ms = (server.cpu_s() - before_s) / calls * 1e3
                turns[server.name].append(Turn(rate, p50_ms, p99_ms, cpu_ms, client_cpu))
            _report(count, turns)
    finally:
        client.terminate()
        client.join()


async def _check(servers: Sequence[Server], texts: list[str]) -> None:
    """Raises AssertionError where the servers' vectors differ."""
    found: list[list[list[float]]] = []
    for server in servers:
        async with openai.AsyncOpenAI(base_url=server.url, api_key="none", timeout=_LIMIT_S) as client:
            answer = await client.embeddings.create(model=server.model, input=texts)
            found.append([one.embedding for one in answer.data])
    np.testing.assert_allclose(found[0], found[1], atol=_TOLERANCE)


def _report(callers: int, turns: dict[str, list[Turn]]) -> None:
    for name, found in turns.items():
        rate, p50, p99, cpu, client = (
            statistics.median(getattr(one, field) for one in found)
            for field in ("requests_per_s", "p50_ms", "p99_ms", "server_cpu_ms", "client_cpu")
        )
        print(
            f"{callers:3} callers  {name:10} {rate:7.1f} requests/s  p50 {p50:7.1f} ms  p99 {p99:7.1f} ms  "
            f"CPU {cpu:6.2f} ms a request  client {client:4.2f} CPUs"
        )
    ours, theirs = turns["neuronpipe"], turns["infinity"]
    rates = sorted(one.requests_per_s / other.requests_per_s for one, other in zip(ours, theirs, strict=True))
    costs = sorted(one.server_cpu_ms / other.server_cpu_ms for one, other in zip(ours, theirs, strict=True))
    print(
        f"{callers:3} callers  neuronpipe to infinity: requests/s {statistics.median(rates):.2f} "
        f"({rates[0]:.2f} to {rates[-1]:.2f}), CPU time a request {statistics.median(costs):.2f} "
        f"({costs[0]:.2f} to {costs[-1]:.2f})",
        flush=True,
    )


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--callers", type=lambda counts: list(map(int, counts.split(","))), default=[1, 8, 32])
    options = parser.parse_args()
    load = ", ".join(f"{one:.2f}" for one in psutil.getloadavg())
    print(f"{psutil.cpu_count()} CPUs, load before {load} (1, 5, 15 minutes)", file=sys.stderr)
    with serving_all(find_minilm()) as ours, serving_infinity(find_minilm()) as infinity:
        measure((ours, infinity), options.callers, options.rounds, options.seconds)


if __name__ == "__main__":
    main()
