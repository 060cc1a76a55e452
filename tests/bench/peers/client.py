"""Calls one peer in a closed loop. Runs in an environment of its own: a JSON line in on standard input, a JSON line
out.

Run: python -m tests.bench.peers.client PROTOCOL TARGET WORKLOAD  where WORKLOAD is a JSON file with `source`, `texts`
and `expected`. First it checks the peer's answers and says what is wrong with them; then it answers each {"callers",
"seconds"}. A Triton client needs a process without neuronpipe's protos: a descriptor pool holds a full name once.
"""

import asyncio
import collections
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import uvloop

from tests.bench.callers import percentiles_ms, run_callers

Answer = tuple[str, float]
Call = Callable[[str], Awaitable[Answer]]
_REQUEST_LIMIT_S = 60
# Padding and the order of float32 sums differ between systems; these differences are some 1e-6.
_SCORE_TOLERANCE = 1e-3


@contextlib.asynccontextmanager
async def http(url: str, body: Callable[[str], Any], answer: Callable[[Any], Answer]) -> AsyncIterator[Call]:
    """One keep-alive connection a caller. aiohttp, because it costs less than httpx and leaves the peer more of the
    machine.
    """
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=_REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=timeout, raise_for_status=True
    ) as session:

        async def call(text: str) -> Answer:
            async with session.post(url, json=body(text)) as response:
                return answer(await response.json())

        yield call


@contextlib.asynccontextmanager
async def triton(target: str) -> AsyncIterator[Call]:
    """Triton's own client over one channel."""
    import numpy as np
    import tritonclient.grpc.aio as client

    async with client.InferenceServerClient(target) as server:

        async def call(text: str) -> Answer:
            tensor = client.InferInput("TEXT", [1, 1], "BYTES")
            tensor.set_data_from_numpy(np.array([[text.encode()]], dtype=np.object_))
            result = await server.infer("classifier", [tensor], client_timeout=_REQUEST_LIMIT_S)
            return result.as_numpy("LABEL").item().decode(), result.as_numpy("SCORE").item()

        yield call


@contextlib.asynccontextmanager
async def in_process(source: str, *, is_batching: bool) -> AsyncIterator[Call]:
    """A transformers pipeline in this process and one thread that calls it: with one text, or with a list of all that
    wait.
    """
    import torch
    import transformers

    pipeline = transformers.pipeline("text-classification", model=source, dtype=torch.float32, device="cpu")

    def classify(texts: list[str]) -> list[Answer]:
        with torch.inference_mode():
            answers = pipeline(texts, batch_size=len(texts), truncation=True, max_length=128)
        return [(answer["label"], answer["score"]) for answer in answers]

    loop = asyncio.get_running_loop()
    waiting: collections.deque[tuple[str, asyncio.Future[Answer]]] = collections.deque()
    arrived = asyncio.Event()

    async def work(thread: ThreadPoolExecutor) -> None:
        while True:
            await arrived.wait()
            taken = [waiting.popleft() for _ in range(len(waiting) if is_batching else 1)]
            if not waiting:
                arrived.clear()
            answers = await loop.run_in_executor(thread, classify, [text for text, _ in taken])
            for (_, future), answer in zip(taken, answers, strict=True):
                future.set_result(answer)
            # Those who got an answer send their next text before the next list is made.
            await asyncio.sleep(0)

    async def call(text: str) -> Answer:
        future: asyncio.Future[Answer] = loop.create_future()
        waiting.append((text, future))
        arrived.set()
        return await future

    with ThreadPoolExecutor(1) as thread:
        worker = asyncio.create_task(work(thread))
        try:
            yield call
        finally:
            worker.cancel()


def open_protocol(protocol: str, target: str, source: str) -> contextlib.AbstractAsyncContextManager[Call]:
    """The way to call a peer."""
    model = Path(source).name

    def by_name(answer: Any) -> Answer:
        return answer["label"], answer["score"]

    match protocol:
        case "transformers" | "transformers-batch":
            return in_process(source, is_batching=protocol == "transformers-batch")
        case "litserve":
            return http(f"http://{target}/predict", lambda text: {"text": text}, by_name)
        case "ray":
            return http(f"http://{target}/", lambda text: {"text": text}, by_name)
        case "infinity":
            return http(f"http://{target}/classify", lambda text: {"model": model, "input": [text]}, _likeliest)
        case "tei":
            return http(f"http://{target}/predict", lambda text: {"inputs": text, "truncate": True}, _first)
        case "triton":
            return triton(target)
    raise ValueError(f"no such protocol: {protocol}")


def _first(answer: Any) -> Answer:
    """TEI answers with every label, the likeliest first."""
    return answer[0]["label"], answer[0]["score"]


def _likeliest(answer: Any) -> Answer:
    """infinity answers with every label."""
    best = max(answer["data"][0], key=lambda scored: scored["score"])
    return best["label"], best["score"]


async def wrong_answer(call: Call, expected: list[tuple[str, str, float]]) -> str | None:
    """What is wrong with the answers to texts that are sent one by one and all at once; None where nothing is."""
    one_by_one = [await call(text) for text, _, _ in expected]
    at_once = await asyncio.gather(*(call(text) for text, _, _ in expected))
    for (text, label, score), *answers in zip(expected, one_by_one, at_once, strict=True):
        for answer in answers:
            if answer[0] != label or abs(answer[1] - score) > _SCORE_TOLERANCE:
                return f"{answer} instead of {(label, score)} for {text!r}"
    return None


async def closed_loop(call: Call, texts: Iterator[str], callers: int, seconds: float) -> dict[str, float]:
    """N callers, each sending its next text when it has its answer. What ends in the warm-up does not count."""

    async def told() -> Answer:
        try:
            return await call(next(texts))
        except Exception as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise

    answered, errors = await run_callers(told, callers, seconds, expected_error=Exception)
    if len(answered) < 2:
        raise RuntimeError(f"{len(answered)} answers in {seconds} s: no percentiles")
    p50, p90, p99 = percentiles_ms([duration_s for duration_s, _ in answered])
    figures = {"p50_ms": p50, "p90_ms": p90, "p99_ms": p99}
    return {"requests": len(answered), "errors": errors, "throughput_per_s": len(answered) / seconds, **figures}


async def main() -> None:
    """Serves the commands on standard input until it is closed."""
    protocol, target, workload_file = sys.argv[1:]
    workload = json.loads(Path(workload_file).read_text())
    texts = itertools.cycle(workload["texts"])
    async with open_protocol(protocol, target, workload["source"]) as call:
        print(json.dumps({"event": "checked", "wrong": await wrong_answer(call, workload["expected"])}), flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            command = json.loads(line)
            figures = await closed_loop(call, texts, command["callers"], command["seconds"])
            print(json.dumps({"event": "measured", **figures}), flush=True)


if __name__ == "__main__":
    uvloop.run(main())
