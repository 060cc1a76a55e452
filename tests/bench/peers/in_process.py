"""A pipeline of transformers in the process of its callers. A thread calls it with one text, or with all that wait."""

import asyncio
import functools
import json
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

Call: TypeAlias = Callable[[bytes, object], Awaitable[bytes]]


@functools.cache
def _pipeline(source: str) -> Any:
    import torch
    import transformers

    return transformers.pipeline("text-classification", model=source, dtype=torch.float32, device="cpu")


@asynccontextmanager
async def pipeline_call(source: str, *, is_batching: bool) -> AsyncIterator[Call]:
    """The call of the pipeline of a folder: a text, to the JSON of its label and score."""
    import torch

    pipeline, loop = _pipeline(source), asyncio.get_running_loop()
    waiting: deque[tuple[bytes, asyncio.Future[bytes]]] = deque()
    arrived = asyncio.Event()

    def classify(texts: list[str]) -> list[bytes]:
        with torch.inference_mode():
            answers = pipeline(texts, batch_size=len(texts), truncation=True, max_length=128)
        return [json.dumps(answer).encode() for answer in answers]

    async def work(thread: ThreadPoolExecutor) -> None:
        while True:
            await arrived.wait()
            taken = [waiting.popleft() for _ in range(len(waiting) if is_batching else 1)]
            if not waiting:
                arrived.clear()
            answers = await loop.run_in_executor(thread, classify, [text.decode() for text, _ in taken])
            for (_, future), answer in zip(taken, answers, strict=True):
                if not future.done():
                    future.set_result(answer)
            # Callers with an answer send their next text before the next list is made.
            await asyncio.sleep(0)

    async def call(text: bytes, _: object) -> bytes:
        future: asyncio.Future[bytes] = loop.create_future()
        waiting.append((text, future))
        arrived.set()
        return await future

    with ThreadPoolExecutor(1) as thread:
        worker = asyncio.create_task(work(thread))
        try:
            yield call
        finally:
            worker.cancel()
