"""A tenant that calls at a steady rate and measures, in a process of its own, so that an attacker's work in Python does
not count as the server's.

It reads a number of seconds from each line of its input, calls for so long, and writes a line of JSON.
"""

import asyncio
import json
import statistics
import sys
import time
from collections import Counter
from typing import Any

import grpc

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, SentenceEmbeddingInput, TaskInput, TextGenerationInput

_EVERY_S = 0.02
_PATH = "/neuronpipe.api.v1.InferenceService/Infer"
_TEXT = "The weather report promises a fine day, with some clouds in the evening and a light wind from the west. "
_SCHEMA = json.dumps({"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]})


def _vector(number: int) -> InferRequest:
    input = TaskInput(sentence_embedding=SentenceEmbeddingInput(text=f"{_TEXT} {number} {time.time_ns()}"))
    return InferRequest(model="minilm", input=input)


def _text(number: int) -> InferRequest:
    """A short text; one of five has a form, of which every other one is new."""
    options = GenerationOptions(max_new_tokens=8)
    if number % 5 == 0:
        options.json_schema = _SCHEMA if number % 10 else _SCHEMA.replace('"a"', f'"{time.time_ns()}"')
    input = TaskInput(text_generation=TextGenerationInput(prompt=f"{number} {time.time_ns()}", options=options))
    return InferRequest(model="writer", input=input)


_REQUESTS = {"vectors": _vector, "texts": _text}


async def measure(
    channel: grpc.aio.Channel, key: str, limit_s: float, asks_for: str, seconds: float
) -> dict[str, object]:
    """An open loop: calls begin at their times, however long the others take."""
    infer: Any = channel.unary_unary(_PATH)
    metadata = [("authorization", f"Bearer {key}")] if key else []
    latencies_s: list[float] = []
    failures: Counter[str] = Counter()

    async def call(number: int) -> None:
        data = _REQUESTS[asks_for](number).SerializeToString()
        began_s = time.perf_counter()
        try:
            await infer(data, timeout=limit_s, metadata=metadata)
        except grpc.aio.AioRpcError as failure:
            failures[f"{failure.code().name}: {failure.details()}"] += 1
        latencies_s.append(time.perf_counter() - began_s)

    began_s = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for number in range(round(seconds / _EVERY_S)):
            await asyncio.sleep(max(0.0, began_s + number * _EVERY_S - time.monotonic()))
            group.create_task(call(number))
    quantiles = statistics.quantiles(latencies_s, n=100)
    return {
        "calls": len(latencies_s),
        "failures": dict(failures),
        "p50_ms": quantiles[49] * 1e3,
        "p99_ms": quantiles[98] * 1e3,
        "max_ms": max(latencies_s) * 1e3,
    }


async def _main(target: str, key: str, limit_s: float, asks_for: str) -> None:
    async with grpc.aio.insecure_channel(target) as channel:
        await measure(channel, key, limit_s, asks_for, 1)  # the first calls open what the others use
        print("{}", flush=True)
        while line := await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps(await measure(channel, key, limit_s, asks_for, float(line))), flush=True)


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2], float(sys.argv[3]), sys.argv[4]))
