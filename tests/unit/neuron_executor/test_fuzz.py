"""Whatever callers and devices do, every request ends once, with its own answer or the error that it has earned, and leaves nothing behind.

Requests of random lengths, priorities and deadlines, some poisoned, come in bursts and leave when they like; the back end raises when it
likes. `make fuzz` sends ten times as much; NEURONPIPE_FUZZ_SEQUENCES is how many to send. NEURONPIPE_FUZZ_SEED repeats a run that failed,
but for what depends on the time.
"""

import asyncio
import gc
import logging
import os
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import psutil
import pytest

from neuronpipe.core.buckets import Bucket, parse_bucket
from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput, Overloaded
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.neuron_executor.backends.base import LoadRequest
from neuronpipe.neuron_executor.backends.fake import FakeBackend
from neuronpipe.neuron_executor.batch_time import BatchTime
from neuronpipe.neuron_executor.choosing import Limits
from neuronpipe.neuron_executor.queue import Waiting
from neuronpipe.neuron_executor.scheduler import Computed, Scheduler, running_scheduler
from tests.unit.model_specs import model_spec

_FAILING, _NAN = 666, 777
_SPEC = model_spec("question_answering", max_tokens=32)
_LIMITS = Limits(max_batch_size=16, max_batch_tokens=256, max_queue_sequences=150)
# What stays of a hundred thousand sequences, besides what the interpreter's and NumPy's pools keep: one that kept even its token ids
# and its two outputs, of 16 tokens on average, would be 400 bytes more each, with the objects around them a kilobyte: 100 MB.
_MAX_GROWTH_BYTES = 16 << 20


class _MoodyBackend(FakeBackend):
    """Takes any number of the loop's turns for a batch, and raises whatever it likes in one of a hundred."""

    def __init__(self, generator: random.Random, buckets: tuple[Bucket, ...], in_flight: int) -> None:
        properties = {"failing_token_id": str(_FAILING), "nan_token_id": str(_NAN)}
        super().__init__(LoadRequest(_SPEC, [], properties, cores=2, threads=0, in_flight=in_flight, buckets=buckets))
        self._generator = generator
        # Sequences that it raised for though nothing is wrong with them, when they were alone.
        self.unlucky: set[tuple[int, ...]] = set()

    def round_tokens(self, tokens: int) -> int:
        """Steps of four, and always something to cut, so that lengths share a batch."""
        if self.buckets:
            return super().round_tokens(tokens)
        return min(tokens // 4 * 4 + 4, _SPEC.max_tokens)

    async def run(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        for _ in range(self._generator.randrange(8)):
            await asyncio.sleep(0)
        if self._generator.random() < 0.01:
            if len(inputs["input_ids"]) == 1:
                self.unlucky.add(tuple(inputs["input_ids"][inputs["attention_mask"] == 1].tolist()))
            raise self._generator.choice([ZeroDivisionError, KeyError, RuntimeError, TimeoutError])
        return await super().run(core, inputs, is_alone=is_alone)


@dataclass
class _Request:
    sequences: list[tuple[int, ...]]
    deadline_s: float | None
    is_bulk: bool
    # After how many of the loop's turns its caller leaves.
    patience: int | None
    task: "asyncio.Task[list[Computed]]" = field(init=False)

    @property
    def is_malformed(self) -> bool:
        return any(len(ids) > _SPEC.max_tokens or max(ids) >= _SPEC.vocabulary_size for ids in self.sequences)

    def check(self, unlucky: set[tuple[int, ...]]) -> str:
        """What it ended with, which must be what it has earned."""
        is_poisoned = any({_FAILING, _NAN} & set(ids) for ids in self.sequences)
        if self.task.cancelled():
            assert self.patience is not None
            return "cancelled"
        error = self.task.exception()
        if error is None:
            assert not is_poisoned
            assert not self.is_malformed
            for ids, computed in zip(self.sequences, self.task.result(), strict=True):
                _check_answer(ids, computed.outputs)
            return "answered"
        # No others, and none of a foreign class.
        assert type(error) in (InvalidInput, InternalError, DeadlineExceeded, Overloaded), repr(error)
        assert isinstance(error, InvalidInput) == self.is_malformed
        assert not isinstance(error, InternalError) or is_poisoned or unlucky.intersection(self.sequences)
        assert not isinstance(error, DeadlineExceeded) or self.deadline_s is not None
        return type(error).__name__


def _check_answer(ids: tuple[int, ...], outputs: Arrays) -> None:
    """FakeBackend's formula: the sine of id times position, counted from one, plus one for the second output. float32 has 7 digits."""
    angles = np.array(ids) * np.arange(1, len(ids) + 1)
    for shift, name in enumerate(("start_logits", "end_logits")):
        assert outputs[name].shape == angles.shape
        assert np.abs(outputs[name] - np.sin(angles + shift)).max() < 1e-6


def _random_request(generator: random.Random) -> _Request:
    sequences = [tuple(generator.choices(range(1, 600), k=generator.randint(1, 32))) for _ in range(generator.choice([1, 1, 1, 2, 5]))]
    malformed = generator.choice([(1,) * 33, (1, 1000)])
    for chance, bad in (0.01, (_FAILING,)), (0.01, (5, _NAN, 5)), (0.005, malformed):
        if generator.random() < chance:
            sequences.insert(generator.randrange(len(sequences) + 1), bad)
    deadline_s = generator.choice([None, None, time.monotonic() - 1, time.monotonic() + generator.uniform(0, 0.02), time.monotonic() + 60])
    patience = generator.choice([None, None, None, generator.randrange(30)])
    return _Request(sequences, deadline_s, generator.random() < 0.3, patience)


async def _bombard(scheduler: Scheduler, unlucky: set[tuple[int, ...]], generator: random.Random, sequences: int) -> Counter[str]:
    """Sends so many sequences and returns how their requests ended."""
    ends: Counter[str] = Counter()
    open_requests: list[_Request] = []
    while sequences > 0 or open_requests:
        if sequences > 0 and generator.random() < 0.3:
            for _ in range(generator.choice([1, 3, 10, 60])):
                request = _random_request(generator)
                sequences -= len(request.sequences)
                arrays = [{"input_ids": np.array(ids, np.int32)} for ids in request.sequences]
                request.task = asyncio.create_task(scheduler.run(arrays, request.deadline_s, is_bulk=request.is_bulk))
                open_requests.append(request)
        await asyncio.sleep(0)
        still_open = []
        for request in open_requests:
            if request.task.done():
                ends[request.check(unlucky)] += 1
                continue
            if request.patience is not None:
                if request.patience == 0:
                    request.task.cancel()
                request.patience = max(0, request.patience - 1)
            still_open.append(request)
        open_requests = still_open
    return ends


def _alive() -> int:
    """How many sequences and answers are in memory."""
    gc.collect()
    return sum(type(one) in (Waiting, Computed) for one in gc.get_objects())


@pytest.mark.parametrize(
    ("buckets", "in_flight"), [((), 1), (("1x8", "4x8", "16x16", "1x32", "8x32"), 1), (("4x32",), 2)], ids=["any shape", "buckets", "ahead"]
)
async def test_every_request_ends_once_with_what_it_has_earned_and_leaves_nothing_behind(
    buckets: tuple[str, ...], in_flight: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="neuronpipe")  # thousands of faults on purpose, which pytest would keep
    seed = int(os.environ.get("NEURONPIPE_FUZZ_SEED") or random.randrange(1 << 32))
    sequences = int(os.environ.get("NEURONPIPE_FUZZ_SEQUENCES") or 100_000)
    print(f"NEURONPIPE_FUZZ_SEED={seed}")  # shown where the test fails
    generator = random.Random(seed)
    loop, unheard = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    tasks_before = len(asyncio.all_tasks())
    try:
        backend = _MoodyBackend(generator, tuple(map(parse_bucket, buckets)), in_flight)
        async with running_scheduler(backend, _SPEC, _LIMITS, BatchTime()) as scheduler:
            await _bombard(scheduler, backend.unlucky, generator, 4000)  # fills the pools
            backend.unlucky.clear()
            memory_bytes = psutil.Process().memory_info().rss
            ends = await _bombard(scheduler, backend.unlucky, generator, sequences)
            backend.unlucky.clear()
            for _ in range(100):  # lets the cores find those who left
                await asyncio.sleep(0)
            # A core keeps its last batches until the next: as many sequences, and an answer to each.
            assert _alive() <= 2 * backend.cores * in_flight * _LIMITS.max_batch_size
            assert psutil.Process().memory_info().rss <= memory_bytes + _MAX_GROWTH_BYTES
            queue = scheduler._queue
            assert (len(queue), queue.tokens_before(is_bulk=True), list(queue)) == (0, 0, [])
            assert len(asyncio.all_tasks()) == tasks_before + backend.cores * in_flight
        assert len(asyncio.all_tasks()) == tasks_before
        gc.collect()
        assert unheard == []
    finally:
        loop.set_exception_handler(None)
    # All of it happened, or the rest proves little.
    assert set(ends) == {"answered", "cancelled", "InvalidInput", "InternalError", "DeadlineExceeded", "Overloaded"}
    assert ends["answered"] > ends.total() / 4, ends
