"""A tenant that calls 50 times a second and measures, in a process of its own: an attacker's work in Python does not
count as the server's.
"""

import asyncio
import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

import grpc
import numpy as np

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, SentenceEmbeddingInput, TaskInput, TextGenerationInput
from neuronpipe.measure.figures import Distribution, distribution
from neuronpipe.platform.process.worker import Worker
from tests.bench.load import INFER, send_all

_RATE_PER_S = 50.0
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


@dataclass(frozen=True)
class Calls:
    """The calls of some seconds, which begin at their times, however long the others take. `failures`: by gRPC's code
    and message.
    """

    count: int
    failures: Mapping[str, int]
    latency_ms: Distribution


class Victim:
    """The process, as its parent sees it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @classmethod
    @contextmanager
    def started(cls, target: str, key: str, limit_s: float, asks_for: str) -> Iterator[Self]:
        """A victim that has called; ended with the block. `key`: empty for none. `limit_s`: the deadline of a call."""
        with Worker.started(_serve, target, key, limit_s, asks_for, name="victim") as worker:
            victim = cls(worker)
            victim.measure(1)  # the first calls open what the others use
            yield victim

    def measure(self, seconds: float) -> Calls:
        """Calls for some seconds, and blocks."""
        self._worker.send(seconds)
        calls: Calls = self._worker.receive()
        return calls


def _serve(pipe: "Connection[Calls, float]", target: str, key: str, limit_s: float, asks_for: str) -> None:
    asyncio.run(_measure(pipe, target, key, limit_s, asks_for))


async def _measure(pipe: "Connection[Calls, float]", target: str, key: str, limit_s: float, asks_for: str) -> None:
    metadata = [("authorization", f"Bearer {key}")] if key else []
    async with grpc.aio.insecure_channel(target) as channel:
        infer: Any = channel.unary_unary(INFER)
        while True:
            seconds, failures = await asyncio.to_thread(pipe.recv), Counter[str]()

            async def call(number: int, failures: Counter[str] = failures) -> None:
                try:
                    await infer(_REQUESTS[asks_for](number).SerializeToString(), timeout=limit_s, metadata=metadata)
                except grpc.aio.AioRpcError as failure:
                    failures[f"{failure.code().name}: {failure.details()}"] += 1

            kept = await send_all(call, itertools.count(), rate_per_s=_RATE_PER_S, seconds=seconds)
            latency_ms = distribution(np.array([answer.latency_s * 1e3 for answer in kept.answers]))
            assert latency_ms, "no call in all the time"
            pipe.send(Calls(len(kept.answers), dict(failures), latency_ms))
