"""Latency of everything but the model: one caller, fake back end, through four processes and through one.

Run: python -m tests.bench.overhead --repository DIR --model M [--requests N]
DIR holds a bundle of a sentence-embedding model compiled with --backend fake. Both systems run at the same time and take turns, so
that a busy machine slows both alike.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput
from neuronpipe.client import AsyncClient

_ROUND = 100
_WARM_UP = 300


async def _round(client: AsyncClient, request: InferRequest, count: int) -> tuple[list[float], list[InferResponse]]:
    times_ms, responses = [], []
    for _ in range(count):
        began_s = time.perf_counter()
        responses.append(await client.infer(request))
        times_ms.append((time.perf_counter() - began_s) * 1e3)
    return times_ms, responses


async def _measure(targets: dict[str, str], model: str, requests: int) -> None:
    text = "A gateway passes every request through three stages and says how long each of them took."
    request = InferRequest(model=model, input=TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text)))
    clients = {name: AsyncClient(target) for name, target in targets.items()}
    times_ms: dict[str, list[float]] = {name: [] for name in targets}
    responses: dict[str, list[InferResponse]] = {name: [] for name in targets}
    for client in clients.values():
        await _round(client, request, _WARM_UP)
    for _ in range(requests // _ROUND):
        for name, client in clients.items():
            more_times, more_responses = await _round(client, request, _ROUND)
            times_ms[name] += more_times
            responses[name] += more_responses
    print(f"{'system':16} {'p50 ms':>8} {'p90 ms':>8} {'p99 ms':>8}   server's p50 ms: {'total':>7} {'pre':>7} {'predict':>7} {'post':>7}")
    for name in targets:
        cuts = statistics.quantiles(times_ms[name], n=100)
        split = [_median_ms(responses[name], part) for part in ("total_ns", "preprocess_ns", "predict_ns", "postprocess_ns")]
        print(f"{name:16} {cuts[49]:8.2f} {cuts[89]:8.2f} {cuts[98]:8.2f} {'':19}" + " ".join(f"{value:7.2f}" for value in split))
    for client in clients.values():
        await client.close()


def _median_ms(responses: Sequence[InferResponse], part: str) -> float:
    durations_ns: list[int] = [getattr(response.timings, part) for response in responses]
    return statistics.median(durations_ns) / 1e6


def main() -> None:
    """Starts both systems and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repository", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    with four_processes(options.repository) as processes, ServiceProcess("all", "--repository", str(options.repository)) as one:
        targets = {"four processes": processes["gateway"].target, "one process": one.wait_until_ready().target}
        asyncio.run(_measure(targets, options.model, options.requests))


if __name__ == "__main__":
    main()
