"""Whatever callers and devices do, every request ends once, with its own answer or the error that it has earned, and
leaves nothing behind.

Requests of random lengths, priorities and deadlines, some poisoned, come in bursts and leave when they like; the back
end raises when it likes, and loses its cores until one is left. `make fuzz` sends ten times as much;
NEURONPIPE_FUZZ_SEQUENCES is how many to send in all. NEURONPIPE_FUZZ_SEED repeats a run that failed.
"""

import asyncio
import gc
import itertools
import logging
import math
import os
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import pytest

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.bundles.buckets import parse_bucket
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput, Overloaded, Unavailable
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest, CoreLost
from neuronpipe.stages.neuron_executor.backends.fake import EveryShape, FakeBackend
from neuronpipe.stages.neuron_executor.batching import Limits
from neuronpipe.stages.neuron_executor.cores import CoresLost
from neuronpipe.stages.neuron_executor.executor_model import ExecutorModel
from neuronpipe.stages.neuron_executor.forecast import BatchTime
from neuronpipe.stages.neuron_executor.sequence_queue import ComputedSequence, QueuedSequence
from neuronpipe.stages.neuron_executor.shapes import ShapeMenu
from tests.suite.fixed_clock import FixedClock
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.scheduling import running_model

_Ids: TypeAlias = tuple[int, ...]

_FAILING, _NAN = 666, 777
_SPEC = model_spec("question_answering", max_tokens=32)
_CORES = 5
# The sequences of one life of a scheduler.
_SEQUENCES = 3000
_LIMITS = Limits(max_batch_size=16, max_batch_tokens=256, max_queue_sequences=150)
# How many blocks of Python's memory may stay: caches of the interpreter grow. At least 9,000 sequences run after the
# first count, and one that kept its token ids and its outputs would be five blocks. The process's memory in bytes says
# less, as what ran before in the same process moves it by more.
_MAX_GROWTH_BLOCKS = 20_000


class _StepsOfFour(EveryShape):
    def round_tokens(self, tokens: int) -> int:
        """Steps of four, and always something to cut, so that lengths share a batch."""
        return min(tokens // 4 * 4 + 4, _SPEC.max_tokens)


_CASES: dict[str, tuple[tuple[str, ...] | ShapeMenu, int]] = {
    "any shape": (_StepsOfFour(_SPEC.max_tokens), 1),
    "menu": (ShapeMenu(_SPEC, _LIMITS.max_batch_tokens), 1),
    "buckets": (("1x8", "4x8", "16x16", "1x32", "8x32"), 1),
    "ahead": (("1x16", "4x32"), 2),
}


class _MoodyBackend(FakeBackend):
    """Takes any number of the loop's turns for a batch, and raises whatever it likes in one of a hundred; now and then
    a core is lost.

    Looks after the scheduler, too: `problems` has sequences that it was handed too late, and those that it was made to
    compute twice.
    """

    def __init__(
        self, generator: random.Random, clock: FixedClock, shapes: tuple[str, ...] | ShapeMenu, in_flight: int
    ) -> None:
        properties = {"failing_token_id": str(_FAILING), "nan_token_id": str(_NAN)}
        buckets = () if isinstance(shapes, ShapeMenu) else tuple(map(parse_bucket, shapes))
        request = BackendRequest(_SPEC, [], properties, cores=_CORES, threads=0, in_flight=in_flight, buckets=buckets)
        super().__init__(request)
        if isinstance(shapes, ShapeMenu):
            self.shapes = shapes
        self._generator, self._clock = generator, clock
        self.lost: set[int] = set()
        self.may_lose_all = False
        # Sequences that it raised for though nothing is wrong with them, when they were alone; and during which cores
        # were lost.
        self.unlucky: set[_Ids] = set()
        self.losses: Counter[_Ids] = Counter()
        self.deadlines_s: dict[_Ids, float] = {}
        self.computed: set[_Ids] = set()
        self.problems: list[str] = []

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        rows = [
            tuple(row[mask == 1].tolist())
            for row, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True)
        ]
        shape = inputs["input_ids"].shape
        if len(rows) > 1 and isinstance(self.shapes, ShapeMenu) and self.shapes.rows_for(*shape) != len(rows):
            self.problems.append(f"not on the menu: {shape}")
        self.problems += [f"too late: {ids}" for ids in rows if self.deadlines_s[ids] <= self._clock.now_s]
        if core in self.lost:
            raise CoreLost("lost before", has_begun=False)
        for _ in range(self._generator.randrange(8)):
            await asyncio.sleep(0)
        if core in self.lost:  # as it computed another batch
            raise CoreLost("lost before", has_begun=False)
        if self._generator.random() < (0.05 if self.may_lose_all else 0.005 if len(self.lost) < _CORES - 1 else 0):
            self.lost.add(core)
            self.losses.update(rows)
            raise CoreLost("lost")
        if self._generator.random() < 0.01:
            if len(rows) == 1:
                self.unlucky.update(rows)
            raise self._generator.choice([ZeroDivisionError, KeyError, RuntimeError, TimeoutError])
        outputs = await super().compute(core, inputs, is_alone=is_alone)
        self.problems += [f"computed again: {ids}" for ids in self.computed.intersection(rows)]
        self.computed.update(rows)
        return outputs

    def is_excused(self, ids: _Ids) -> bool:
        """Whether a sequence may fail though nothing is wrong with it."""
        return ids in self.unlucky or self.losses[ids] > 1


@dataclass
class _Request:
    sequences: list[tuple[int, ...]]
    call: Call
    # After how many of the loop's turns its caller leaves.
    patience: int | None
    is_beyond_share: bool
    task: "asyncio.Task[list[ComputedSequence]]" = field(init=False)

    @property
    def is_malformed(self) -> bool:
        return any(len(ids) > _SPEC.max_tokens or max(ids) >= _SPEC.vocabulary_size for ids in self.sequences)

    def check(self, backend: _MoodyBackend) -> str:
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
        # No others, and none of a foreign class; Unavailable only where no core is left.
        known = (
            InvalidInput,
            InternalError,
            DeadlineExceeded,
            Overloaded,
            *([Unavailable] if len(backend.lost) == _CORES else []),
        )
        assert type(error) in known, repr(error)
        assert isinstance(error, InvalidInput) == self.is_malformed
        assert not isinstance(error, InternalError) or is_poisoned or any(map(backend.is_excused, self.sequences))
        assert not isinstance(error, DeadlineExceeded) or self.call.deadline_s is not None
        return type(error).__name__


def _check_answer(ids: tuple[int, ...], outputs: Arrays) -> None:
    """FakeBackend's formula: the sine of id times position, counted from one, plus one for the second output. float32
    has 7 digits.
    """
    angles = np.array(ids) * np.arange(1, len(ids) + 1)
    for shift, name in enumerate(("start_logits", "end_logits")):
        assert outputs[name].shape == angles.shape
        assert np.abs(outputs[name] - np.sin(angles + shift)).max() < 1e-6


class _Callers:
    """Sends requests, and lets the time go on."""

    def __init__(self, generator: random.Random, clock: FixedClock) -> None:
        self._generator, self._clock = generator, clock
        self._numbers = itertools.count()

    def _ids(self) -> _Ids:
        """A sequence like no other."""
        number = next(self._numbers)
        return (
            1 + number // 500 % 500,
            1 + number % 500,
            *self._generator.choices(range(1, 600), k=self._generator.randint(0, 30)),
        )

    def _request(self) -> _Request:
        generator, now_s = self._generator, self._clock.now_s
        sequences = [self._ids() for _ in range(generator.choice([1, 1, 1, 2, 5]))]
        malformed = generator.choice([(1,) * 33, (1, 1000)])
        for chance, bad in (
            (0.01, (*self._ids()[:2], _FAILING)),
            (0.01, (*self._ids()[:2], _NAN, 5)),
            (0.005, malformed),
        ):
            if generator.random() < chance:
                sequences.insert(generator.randrange(len(sequences) + 1), bad)
        deadline_s = generator.choice([None, None, now_s - 1, now_s + generator.uniform(0, 0.02), now_s + 60])
        patience = generator.choice([None, None, None, generator.randrange(30)])
        priority = Priority.PRIORITY_BULK if generator.random() < 0.3 else Priority.PRIORITY_INTERACTIVE
        is_beyond_share = generator.random() < 0.3
        return _Request(sequences, Call(deadline_s=deadline_s, priority=priority), patience, is_beyond_share)

    async def bombard(self, scheduler: ExecutorModel, backend: _MoodyBackend, sequences: int) -> Counter[str]:
        """Sends so many sequences and returns how their requests ended."""
        generator, ends, open_requests = self._generator, Counter[str](), list[_Request]()
        while sequences > 0 or open_requests:
            if sequences > 0 and generator.random() < 0.3:
                for _ in range(generator.choice([1, 3, 10, 60])):
                    request = self._request()
                    sequences -= len(request.sequences)
                    for ids in request.sequences:
                        deadline_s = request.call.deadline_s
                        backend.deadlines_s[ids] = math.inf if deadline_s is None else deadline_s
                    arrays = [{"input_ids": np.array(ids, np.int32)} for ids in request.sequences]
                    request.task = asyncio.create_task(
                        scheduler.run(arrays, request.call, is_beyond_share=request.is_beyond_share)
                    )
                    open_requests.append(request)
            await asyncio.sleep(0)
            self._clock.now_s += generator.uniform(0, 0.0005)
            still_open = []
            for request in open_requests:
                if request.task.done():
                    ends[request.check(backend)] += 1
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
    return sum(type(one) in (QueuedSequence, ComputedSequence) for one in gc.get_objects())


@pytest.fixture
def seed() -> int:
    seed = int(os.environ.get("NEURONPIPE_FUZZ_SEED") or random.randrange(1 << 32))
    print(f"NEURONPIPE_FUZZ_SEED={seed}")  # shown where the test fails
    return seed


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="neuronpipe")  # thousands of faults on purpose, which pytest would keep


@pytest.mark.parametrize(("shapes", "in_flight"), _CASES.values(), ids=_CASES)
async def test_every_request_ends_once_with_what_it_has_earned_and_leaves_nothing_behind(
    shapes: tuple[str, ...] | ShapeMenu, in_flight: int, seed: int, clock: FixedClock
) -> None:
    rounds = max(5, int(os.environ.get("NEURONPIPE_FUZZ_SEQUENCES") or 100_000) // len(_CASES) // _SEQUENCES)
    generator, ends = random.Random(seed), Counter[str]()
    callers = _Callers(generator, clock)
    loop, unheard = asyncio.get_running_loop(), list[object]()
    loop.set_exception_handler(lambda _, context: unheard.append(context))
    tasks_before, blocks = asyncio.all_tasks(), 0
    try:
        for number in range(rounds):
            backend = _MoodyBackend(generator, clock, shapes, in_flight)
            async with running_model(backend, _SPEC, _LIMITS, BatchTime()) as scheduler:
                ends += await callers.bombard(scheduler, backend, _SEQUENCES)
                for _ in range(100):  # lets the cores find those who left
                    await asyncio.sleep(0)
                assert backend.problems == []
                ends["core lost"] += len(backend.lost)
                assert scheduler.cores_left == _CORES - len(backend.lost)
                # A core keeps its last batches until the next: as many sequences, and an answer to each.
                assert _alive() <= 2 * _CORES * in_flight * _LIMITS.max_batch_size
                queue = scheduler.queue
                assert (len(queue), queue.tokens_before(is_bulk=True), list(queue)) == (0, 0, [])
                assert len(asyncio.all_tasks() - tasks_before) == scheduler.cores_left * in_flight
            assert asyncio.all_tasks() <= tasks_before
            if number == 1:  # the pools are filled
                gc.collect()
                blocks = sys.getallocatedblocks()
        gc.collect()
        assert sys.getallocatedblocks() <= blocks + _MAX_GROWTH_BLOCKS
        assert unheard == []
    finally:
        loop.set_exception_handler(None)
    # All of it happened, or the rest proves little.
    expected = {"answered", "cancelled", "InvalidInput", "InternalError", "DeadlineExceeded", "Overloaded", "core lost"}
    assert set(ends) == expected
    assert ends["answered"] > ends.total() / 4, ends


@pytest.mark.parametrize(("shapes", "in_flight"), _CASES.values(), ids=_CASES)
async def test_with_the_last_core_every_request_ends(
    shapes: tuple[str, ...] | ShapeMenu, in_flight: int, seed: int, clock: FixedClock
) -> None:
    generator, ends = random.Random(seed), Counter[str]()
    callers = _Callers(generator, clock)

    async def bombard_until_lost(scheduler: ExecutorModel, backend: _MoodyBackend) -> Counter[str]:
        ends = Counter[str]()
        while len(backend.lost) < _CORES:
            ends += await callers.bombard(scheduler, backend, _SEQUENCES)
        return ends

    async def live(backend: _MoodyBackend) -> None:
        async with running_model(backend, _SPEC, _LIMITS, BatchTime()) as scheduler:
            bombarding.append(asyncio.create_task(bombard_until_lost(scheduler, backend)))
            await asyncio.wait(bombarding)

    for _ in range(5):
        backend = _MoodyBackend(generator, clock, shapes, in_flight)
        backend.may_lose_all = True
        bombarding: list[asyncio.Task[Counter[str]]] = []
        with pytest.raises(CoresLost):
            await live(backend)
        ends += await bombarding[0]
        assert backend.problems == []
    assert ends["Unavailable"] > 0
    assert ends["answered"] > 0
