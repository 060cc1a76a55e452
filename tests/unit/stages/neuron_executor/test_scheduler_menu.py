"""stages/neuron_executor/scheduler.py with a menu of shapes: what runs has a shape of the menu, and nothing is lost."""

import asyncio
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from neuronpipe.core.errors import InternalError, InvalidInput, Overloaded
from neuronpipe.stages.neuron_executor.batching import Batch, Limits, PlannedShapes
from neuronpipe.stages.neuron_executor.cores import Cores
from neuronpipe.stages.neuron_executor.forecast import BatchTimes, Forecast
from neuronpipe.stages.neuron_executor.sequence_queue import ComputedSequence, QueuedSequence, QueueRank, SequenceQueue
from neuronpipe.stages.neuron_executor.shapes import ShapeMenu
from tests.suite.fixed_clock import FixedClock
from tests.unit.model_specs import image_text_spec, model_spec
from tests.unit.stages.neuron_executor.held_backend import NAN
from tests.unit.stages.neuron_executor.scheduling import (
    KnownTime,
    held_scheduler,
    occupied_scheduler,
    queued,
)

_SPEC = model_spec("question_answering", max_tokens=128)
_LIMITS = Limits(max_batch_size=32, max_batch_tokens=8192, max_queue_sequences=1000)
_MENU = ShapeMenu(_SPEC, 512)
_STATIC = model_spec("sentence_embedding", max_tokens=128, architecture="StaticEmbeddingModel")
# Of 48 tokens each, 1, 2, 4 and 8 sequences have a number of tokens on the menu.
_LENGTH = 48


def _texts(count: int, first: int = 1) -> list[list[int]]:
    return [[number] * _LENGTH for number in range(first, first + count)]


def _firsts(batches: Sequence[Sequence[Sequence[int]]]) -> list[list[int]]:
    return [[row[0] for row in batch] for batch in batches]


@pytest.mark.parametrize("cores", [1, 3])
async def test_random_traffic_runs_in_shapes_of_the_menu_and_every_caller_gets_its_own_result(cores: int) -> None:
    seed = 20261128
    generator = random.Random(seed)
    limits = Limits(max_batch_size=11, max_batch_tokens=400, max_queue_sequences=1000)
    planned = {
        (shape.is_alone, shape.rows, shape.tokens)
        for shape in _MENU.planned(1, limits.max_batch_size, limits.max_batch_tokens)
    }
    times = KnownTime(overhead_s=20.0, token_s=1.0)  # worth some padding, and no deadline looks at it
    async with held_scheduler(
        cores=cores, limits=limits, spec=_SPEC, menu=_MENU, is_held=False, batch_time=times
    ) as system:

        async def call() -> None:
            for _ in range(40):
                item = [
                    [generator.randrange(1, 500)] * generator.randint(1, 128)
                    for _ in range(generator.choice((1, 1, 4)))
                ]
                computed = await system.submit(*item, is_bulk=generator.random() < 0.3)
                for ids, one in zip(item, computed, strict=True):
                    angles = ids[0] * np.arange(1, len(ids) + 1)
                    np.testing.assert_allclose(one.outputs["start_logits"], np.sin(angles), atol=1e-6)
                for _ in range(generator.randrange(5)):
                    await asyncio.sleep(0)

        await asyncio.gather(*(call() for _ in range(25)))
        ran = list(zip(system.backend.ran_alone, system.backend.computed_shapes, strict=True))
    assert max(len(batch) for batch in system.backend.batches) > 2, f"seed {seed}"
    for is_alone, (rows, tokens) in ran:
        # Several rows that run alone are those of a batch; only one row has lengths of its own.
        assert (is_alone and rows == 1, rows, tokens) in planned, f"seed {seed}"


async def test_sequences_that_fill_no_number_of_rows_run_next_in_their_order() -> None:
    async with occupied_scheduler(limits=_LIMITS, spec=_SPEC, menu=_MENU) as system:
        callers = [system.submit(ids) for ids in _texts(7)]
        await system.finish(*callers)
        assert _firsts(system.backend.batches[1:]) == [[1, 2, 3, 4], [5, 6], [7]]
        assert system.backend.computed_shapes[1:] == [(4, 48), (2, 48), (1, 48)]


async def test_sequences_that_went_back_go_before_those_that_come_later() -> None:
    async with occupied_scheduler(limits=_LIMITS, spec=_SPEC, menu=_MENU) as system:
        early = [system.submit(ids) for ids in _texts(7)]
        await queued()
        system.backend.let_run(1)
        assert len(await system.backend.begun()) == 4
        late = [system.submit(ids) for ids in _texts(2, first=8)]
        await system.finish(*early, *late)
        assert _firsts(system.backend.batches[1:]) == [[1, 2, 3, 4], [5, 6, 7, 8], [9]]


@pytest.mark.parametrize(
    ("lengths", "batches", "shapes"),
    # Of 80 tokens, as of 48, a batch has 1, 2 or 4 sequences: the fifth goes back, or the longest, which was the third.
    [
        ((48, 48, 40, 80, 80), [[1, 2, 3, 4], [5]], [(4, 80), (1, 80)]),
        ((48, 48, 80), [[1, 2], [3]], [(2, 48), (1, 80)]),
    ],
)
async def test_a_batch_of_several_lengths_gives_back_what_it_took_last(
    lengths: Sequence[int], batches: list[list[int]], shapes: list[tuple[int, int]]
) -> None:
    async with occupied_scheduler(limits=_LIMITS, spec=_SPEC, menu=_MENU) as system:
        callers = [system.submit([number] * tokens) for number, tokens in enumerate(lengths, 1)]
        await system.finish(*callers)
        assert _firsts(system.backend.batches[1:]) == batches
        assert system.backend.computed_shapes[1:] == shapes


async def test_a_sequence_alone_has_the_length_that_it_has_beside_others() -> None:
    async with held_scheduler(cores=2, limits=_LIMITS, spec=_SPEC, menu=_MENU) as system:
        first = system.submit([1] * 20)
        assert len(await system.backend.begun()) == 1
        second = system.submit([2] * 20)
        assert len(await system.backend.begun()) == 1
        system.backend.let_run()
        told = [one.bucket_tokens for caller in (first, second) for one in await caller]
        assert system.backend.computed_shapes == [(1, 24), (1, 24)]
        assert system.backend.ran_alone == [True, False]
        assert told == [24, 24]


@pytest.mark.parametrize(
    ("limits", "rows"),
    # Five sequences are no number of rows of the menu; four of them have 192 tokens, two 96.
    [((5, 8192), 4), ((3, 8192), 2), ((1, 8192), 1), ((32, 300), 4), ((32, 191), 2), ((32, 10), 1)],
)
async def test_the_limits_of_a_batch_apply_to_all_of_its_rows(limits: tuple[int, int], rows: int) -> None:
    limits_of_batch = Limits(*limits, max_queue_sequences=100)
    async with occupied_scheduler(limits=limits_of_batch, spec=_SPEC, menu=_MENU) as system:
        callers = [system.submit(ids) for ids in _texts(7)]
        await system.finish(*callers)
        assert max(system.backend.computed_shapes[1:]) == (rows, 48)


async def test_a_longer_sequence_that_leaves_no_room_for_the_batch_does_not_keep_shorter_ones_out() -> None:
    # A batch of 256 tokens holds four of 64, and two of 80.
    menu = ShapeMenu(_SPEC, 256)
    async with occupied_scheduler(limits=_LIMITS, spec=_SPEC, menu=menu) as system:
        callers = [system.submit([number] * tokens) for number, tokens in enumerate((64, 48, 80, 32, 32), 1)]
        await system.finish(*callers)
        assert _firsts(system.backend.batches[1:]) == [[1, 2, 4, 5], [3]]


class _Policy:
    """The policy of a menu with a queue of its own, so that a test sees single batches."""

    def __init__(self, menu: ShapeMenu, limits: Limits, time: KnownTime) -> None:
        self.queue = SequenceQueue()
        self.time = time
        self._menu = menu
        forecast = Forecast(self.queue, Cores(1), BatchTimes(time, time), [])
        self._policy = PlannedShapes(self.queue, forecast, menu, limits)
        self._pushed = 0

    def push(self, tokens: int, deadline_s: float) -> None:
        self._pushed += 1
        future: asyncio.Future[list[ComputedSequence]] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda future: future.exception())  # as a caller would look at it
        padded = self._menu.round_tokens(tokens)
        rank = QueueRank(False, 0, deadline_s, self._pushed)
        self.queue.push(
            QueuedSequence(rank=rank, is_bulk=True, inputs=[{}], tokens=tokens, padded_tokens=padded, future=future)
        )

    def next_batch(self, limit_s: float) -> Batch | None:
        """The next batch of those that wait; None once all have left."""
        while oldest := self.queue.oldest():
            self.queue.remove(oldest)
            if not self._policy.deadlines.expire_if_late(oldest, 0):
                return self._policy.fill(oldest, 0, 1, limit_s)
        return None


@pytest.mark.parametrize("seed", range(20261128, 20261148))
async def test_no_batch_of_several_is_larger_than_its_limits_or_later_than_a_deadline_of_its_members(
    seed: int, clock: FixedClock
) -> None:
    generator = random.Random(seed)
    limits = Limits(generator.randint(1, 40), generator.randint(16, 600), 1000)
    # An overhead as of some dozens of tokens, so that lengths share batches.
    system = _Policy(_MENU, limits, KnownTime(overhead_s=generator.uniform(0, 0.1), token_s=0.001))
    for _ in range(100):
        system.push(generator.randint(1, 128), clock.now_s + generator.choice([1e9, generator.uniform(0.01, 2)]))
    limit_s, sizes = generator.choice([0.1, 0.3, 1e9]), list[int]()
    while batch := system.next_batch(limit_s):
        rows, tokens = batch.rows, batch.padded_tokens
        sizes.append(len(batch.members))
        assert batch.computed_tokens == rows * tokens
        assert rows == len(batch.members) == _MENU.rows_within(rows, tokens)
        assert tokens == max(member.padded_tokens for member in batch.members)
        assert rows <= limits.max_batch_size
        finish_s = clock.now_s + system.time.seconds(rows * tokens)
        if rows > 1:  # a sequence alone is computed to measure the time of a batch again
            assert all(finish_s < member.deadline_s for member in batch.members)
            assert rows * tokens <= limits.max_batch_tokens
            assert system.time.seconds(rows * tokens) <= limit_s
        clock.now_s += generator.choice([0.0, finish_s - clock.now_s])
    assert len(system.queue) == 0
    assert sum(sizes) <= 100


@pytest.mark.parametrize("seed", range(20261128, 20261133))
async def test_images_and_texts_of_one_model_run_in_own_batches(seed: int, clock: FixedClock) -> None:
    generator, spec = random.Random(seed), image_text_spec()
    menu = ShapeMenu(spec, 512)
    system = _Policy(menu, _LIMITS, KnownTime(overhead_s=10, token_s=0.001))  # where padding costs nothing
    lengths = [generator.choice([spec.image_length, generator.randint(1, spec.max_tokens)]) for _ in range(100)]
    for length in lengths:
        system.push(length, 1e9)
    planned = {(shape.rows, shape.tokens) for shape in menu.planned(1, _LIMITS.max_batch_size, 512)}
    found = []
    while batch := system.next_batch(1e9):
        assert len({member.tokens > spec.max_tokens for member in batch.members}) == 1
        assert (batch.rows, batch.padded_tokens) in planned
        found += [member.tokens for member in batch.members]
    assert sorted(found) == sorted(lengths)


def _vector(ids: Sequence[int]) -> list[float]:
    """The vector of a text, as FakeBackend makes it."""
    return [math.sin(sum(ids[0] * place for place in range(1, len(ids) + 1)) * number / 4) for number in range(1, 5)]


async def test_texts_of_static_embeddings_share_batches_and_each_gets_its_own_vector() -> None:
    seed = 20261130
    generator = random.Random(seed)
    shapes = {(shape.rows, shape.tokens) for shape in _MENU.planned(1, 512, 512)}
    limits = Limits(max_batch_size=8, max_batch_tokens=8192, max_queue_sequences=1000)
    async with held_scheduler(cores=2, limits=limits, spec=_STATIC, menu=_MENU, is_held=False) as system:

        async def call() -> None:
            for _ in range(10):
                count = generator.choice((1, 2, 60))
                item = [[generator.randrange(1, 500)] * generator.randint(1, 40) for _ in range(count)]
                computed = await system.submit(*item, is_bulk=generator.random() < 0.3)
                vectors = [one.outputs["sentence_embedding"] for one in computed]
                np.testing.assert_allclose(vectors, [_vector(ids) for ids in item], atol=1e-3, err_msg=f"seed {seed}")
                await asyncio.sleep(0)

        await asyncio.gather(*(call() for _ in range(8)))
        assert system.scheduler.queued == (0, 0)
        assert set(system.backend.computed_shapes) <= shapes, f"seed {seed}"
    # More rows than max_batch_size, which counts sequences that wait on their own.
    assert max(map(len, system.backend.batches)) > limits.max_batch_size, f"seed {seed}"


async def test_each_text_of_a_list_counts_in_the_queue_and_in_its_batch() -> None:
    limits = Limits(max_batch_size=32, max_batch_tokens=8192, max_queue_sequences=8)
    async with occupied_scheduler(limits=limits, spec=_STATIC, menu=_MENU) as system:
        with pytest.raises(InvalidInput, match="9 sequences, the limit is 8"):
            await system.submit(*_texts(9))
        caller = system.submit(*_texts(6))
        await queued()
        assert system.scheduler.queued == (6, 6 * 48)
        with pytest.raises(Overloaded, match="6 sequences wait"):
            await system.submit(*_texts(3))
        system.backend.let_run()
        computed = await caller
        assert _firsts(system.backend.batches[1:]) == [[1, 2, 3, 4, 5, 6, 1, 1]]  # 6 rows are not on the menu, 8 are
        assert {(one.batch_size, one.bucket_tokens) for one in computed} == {(6, 48)}


async def test_a_list_whose_caller_left_does_not_run() -> None:
    async with occupied_scheduler(limits=_LIMITS, spec=_STATIC, menu=_MENU) as system:
        caller = system.submit(*_texts(6))
        await queued()
        caller.cancel()
        await queued()
        assert system.scheduler.queued == (0, 0)


async def test_a_text_that_is_not_finite_fails_only_its_list() -> None:
    async with occupied_scheduler(limits=_LIMITS, spec=_STATIC, menu=_MENU) as system:
        bad, good = system.submit([3] * 48, [NAN] * 48), system.submit(*_texts(2))
        await queued()
        system.backend.let_run()
        with pytest.raises(InternalError, match="not finite"):
            await bad
        assert len(await good) == 2
        assert len(system.backend.batches[1:]) == 1  # both lists were in one batch
