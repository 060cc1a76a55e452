"""stages/neuron_executor/forecast.py: the queue, and what is learned of a machine from its batches.

The machine of most tests takes 3 s a batch and 0.5 s a token: 5 s for 4 tokens, 35 s for 64. The forecasts are
simulated: the queue takes as long as callers are told, however many batches a core is handed.
"""

import asyncio
import math
import random
from collections.abc import Callable

import numpy as np
import pytest

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, Overloaded
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest
from neuronpipe.stages.neuron_executor.backends.fake import FakeBackend
from neuronpipe.stages.neuron_executor.batching import Limits
from neuronpipe.stages.neuron_executor.cores import Cores
from neuronpipe.stages.neuron_executor.forecast import (
    BatchTime,
    BatchTimes,
    ComputedSequence,
    Forecast,
    QueuedSequence,
    SequenceQueue,
)
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.jumping_time import JumpingLoop
from tests.unit.stages.neuron_executor.scheduling import running_model

_Push = Callable[..., QueuedSequence]


@pytest.fixture
def queue() -> SequenceQueue:
    return SequenceQueue()


@pytest.fixture
async def push(queue: SequenceQueue) -> _Push:
    """Adds a sequence, of three tokens padded to four; numbers count up as they do in the scheduler."""

    def push(
        arrived_s: float = 0,
        *,
        padded_tokens: int = 4,
        deadline_s: float = math.inf,
        is_bulk: bool = False,
        is_beyond_share: bool = False,
    ) -> QueuedSequence:
        future: asyncio.Future[ComputedSequence] = asyncio.get_running_loop().create_future()
        arrays = {"input_ids": np.ones(3, np.int32)}
        key = is_beyond_share, arrived_s, deadline_s, len(queue), is_bulk
        one = QueuedSequence(*key, arrays, 3, padded_tokens, future)
        queue.push(one)
        return one

    return push


def _drain(queue: SequenceQueue) -> list[QueuedSequence]:
    drained = []
    while one := queue.oldest():
        queue.remove(one)
        drained.append(one)
    return drained


async def test_the_oldest_goes_first_whatever_its_length_and_deadline(queue: SequenceQueue, push: _Push) -> None:
    last, first, middle = push(3, deadline_s=10), push(1, padded_tokens=9), push(2, padded_tokens=1, deadline_s=20)
    assert _drain(queue) == [first, middle, last]


async def test_of_the_same_age_the_earliest_deadline_goes_first(queue: SequenceQueue, push: _Push) -> None:
    none, late, early = push(), push(deadline_s=20, padded_tokens=9), push(deadline_s=10)
    assert _drain(queue) == [early, late, none]


async def test_of_the_same_age_and_deadline_the_first_to_come_goes_first(queue: SequenceQueue, push: _Push) -> None:
    pushed = [push(padded_tokens=tokens) for tokens in (4, 9, 1, 4)]
    assert _drain(queue) == pushed


async def test_interactive_sequences_go_before_older_bulk(queue: SequenceQueue, push: _Push) -> None:
    bulk, interactive = push(1, is_bulk=True), push(2)
    assert _drain(queue) == [interactive, bulk]


async def test_tenants_beyond_their_share_wait_for_others_of_the_same_priority(
    queue: SequenceQueue, push: _Push
) -> None:
    bulk, beyond, within = push(1, is_bulk=True), push(2, is_beyond_share=True), push(3)
    assert _drain(queue) == [within, beyond, bulk]


async def test_a_batch_is_filled_with_what_is_beyond_a_share(queue: SequenceQueue, push: _Push) -> None:
    push(1, is_beyond_share=True)
    push(2)
    assert queue.count(4, is_bulk=False) == 2


async def test_the_oldest_of_a_length_and_priority_is_its_first(queue: SequenceQueue, push: _Push) -> None:
    push(1, padded_tokens=9)
    push(1, is_bulk=True)
    younger, older = push(3), push(2)
    assert queue.first(4, is_bulk=False) is older
    assert younger is not older


async def test_a_length_of_which_none_waits_has_no_first(queue: SequenceQueue, push: _Push) -> None:
    push(padded_tokens=9)
    push(padded_tokens=4, is_bulk=True)
    assert queue.first(4, is_bulk=False) is None


async def test_near_lengths_come_nearest_first_and_of_the_same_distance_the_shorter(
    queue: SequenceQueue, push: _Push
) -> None:
    for tokens in (16, 2, 12, 8, 9, 4):
        push(padded_tokens=tokens)
    assert queue.near(8, is_bulk=False) == [8, 9, 4, 12, 2, 16]


async def test_near_lengths_are_those_of_one_priority_that_still_wait(queue: SequenceQueue, push: _Push) -> None:
    gone = push(padded_tokens=4)
    push(padded_tokens=6)
    push(padded_tokens=5, is_bulk=True)
    queue.remove(gone)
    assert queue.near(4, is_bulk=False) == [6]


async def test_what_goes_before_bulk_is_all_and_before_interactive_work_only_its_own_kind(
    queue: SequenceQueue, push: _Push
) -> None:
    push(padded_tokens=4)
    push(padded_tokens=16, is_bulk=True)
    assert [queue.tokens_before(is_bulk=is_bulk) for is_bulk in (False, True)] == [4, 20]


async def test_length_and_tokens_follow_what_is_pushed_and_popped(queue: SequenceQueue, push: _Push) -> None:
    for tokens, is_bulk in (4, False), (9, False), (16, True):
        push(padded_tokens=tokens, is_bulk=is_bulk)
    seen = []
    while one := queue.oldest():
        seen.append((len(queue), queue.tokens_before(is_bulk=False), queue.tokens_before(is_bulk=True)))
        queue.remove(one)
    assert seen == [(3, 13, 29), (2, 9, 25), (1, 0, 16)]
    assert (len(queue), queue.tokens_before(is_bulk=True)) == (0, 0)


async def test_what_nobody_waits_for_is_dropped_and_no_longer_counted(queue: SequenceQueue, push: _Push) -> None:
    kept = [push(padded_tokens=5), push(padded_tokens=9), push(padded_tokens=7, is_bulk=True)]
    for left in push(padded_tokens=5), push(padded_tokens=7, is_bulk=True):
        left.future.cancel()
        queue.forget(left)
    push(padded_tokens=9, deadline_s=0)
    queue.forget_late()
    assert (len(queue), queue.tokens_before(is_bulk=False), queue.tokens_before(is_bulk=True)) == (3, 14, 21)
    assert _drain(queue) == kept


async def test_who_is_dropped_for_its_deadline_is_told_so(queue: SequenceQueue, push: _Push) -> None:
    late = push(deadline_s=0)
    queue.forget_late()
    assert isinstance(late.future.exception(), DeadlineExceeded)


async def test_a_caller_who_got_an_answer_is_told_nothing_more(push: _Push) -> None:
    answered = push(deadline_s=0)
    answer = ComputedSequence({}, 0, 1, 1, 4)
    answered.future.set_result(answer)
    assert not answered.keep_if_in_time(0)
    assert answered.future.result() is answer


async def test_what_is_forgotten_keeps_nothing_alive_and_is_forgotten_once(queue: SequenceQueue, push: _Push) -> None:
    forgotten, kept = push(1), push(2)
    for _ in range(2):
        queue.forget(forgotten)
    assert forgotten.arrays == {}
    assert (len(queue), queue.tokens_before(is_bulk=False), queue.count(4, is_bulk=False)) == (1, 4, 1)
    assert (queue.oldest(), queue.first(4, is_bulk=False), list(queue)) == (kept, kept, [kept])


async def test_what_runs_already_keeps_its_arrays_where_its_caller_leaves(queue: SequenceQueue, push: _Push) -> None:
    running = push()
    queue.remove(running)
    queue.forget(running)
    assert list(running.arrays) == ["input_ids"]


async def test_however_many_come_and_leave_a_bounded_number_of_entries_stays(queue: SequenceQueue, push: _Push) -> None:
    push(0)  # what is in front of them stays
    staying = [push(number) for number in range(1, 11)]
    for number in range(11, 10_000):
        queue.forget(push(number))
    (heap,) = queue._heaps[False].values()
    assert len(heap.entries) <= 2 * 16 + 2
    assert _drain(queue)[1:] == staying


async def test_a_random_order_of_coming_and_leaving_keeps_the_order_and_the_counts(
    queue: SequenceQueue, push: _Push
) -> None:
    seed = 20261122
    generator, waiting = random.Random(seed), list[QueuedSequence]()
    for _ in range(3000):
        if not waiting or generator.random() < 0.55:
            waiting.append(
                push(generator.random(), padded_tokens=generator.choice((4, 8)), is_bulk=generator.random() < 0.3)
            )
        else:
            queue.forget(waiting.pop(generator.randrange(len(waiting))))
        assert len(queue) == len(waiting)
    assert queue.tokens_before(is_bulk=True) == sum(one.padded_tokens for one in waiting), f"seed {seed}"
    assert _drain(queue) == sorted(waiting, key=lambda one: (one.is_bulk, one.arrived_s)), f"seed {seed}"


_SEED = 20261121


@pytest.fixture
def batch_time() -> BatchTime:
    """What the warm-up leaves: two measurements."""
    batch_time = BatchTime()
    batch_time.anchor(4, 5)
    batch_time.anchor(64, 35)
    return batch_time


def test_the_warm_up_tells_overhead_and_token_time(batch_time: BatchTime) -> None:
    assert batch_time.token_s == pytest.approx(0.5)
    assert batch_time.overhead_tokens == pytest.approx(6)  # 3 s of 0.5 s


def test_batches_tell_overhead_and_token_time_without_a_warm_up() -> None:
    batch_time = BatchTime()
    for tokens, seconds in (8, 7), (32, 19), (128, 67), (16, 11):
        batch_time.observe(tokens, seconds)
    assert batch_time.token_s == pytest.approx(0.5)
    assert batch_time.overhead_tokens == pytest.approx(6)


def test_noise_is_averaged() -> None:
    generator = np.random.default_rng(_SEED)
    batch_time = BatchTime()
    for tokens in generator.integers(8, 256, 500):
        batch_time.observe(int(tokens), (3 + 0.5 * tokens) * generator.uniform(0.9, 1.1))
    # Some fifty batches count, each off by up to a tenth (standard deviation 6 % of 69 s): the slope's own is 4 s / (71
    # x sqrt(50)).
    assert batch_time.token_s == pytest.approx(0.5, abs=4 * 0.008), f"seed {_SEED}"


def test_nothing_is_known_at_first() -> None:
    batch_time = BatchTime()
    assert (batch_time.seconds(1000), batch_time.token_s, batch_time.overhead_tokens) == (0, 0, math.inf)


def test_batches_of_one_length_cost_only_overhead_as_far_as_anyone_can_tell() -> None:
    batch_time = BatchTime()
    for _ in range(10):
        batch_time.observe(16, 11)
    assert (batch_time.token_s, batch_time.overhead_tokens) == (0, math.inf)


def test_batches_of_one_length_leave_the_warm_ups_token_time_as_it_is(batch_time: BatchTime) -> None:
    for _ in range(1000):
        batch_time.observe(16, 11)  # on the line of the warm-up
    assert batch_time.token_s == pytest.approx(0.5)


def test_batches_of_one_length_that_take_longer_move_the_estimate_for_that_length(batch_time: BatchTime) -> None:
    for _ in range(1000):
        batch_time.observe(
            34, 40
        )  # 20 s by the warm-up, whose lengths have this one for their mean: the slope cannot change
    assert batch_time.token_s == pytest.approx(0.5)
    # The last fifty batches, which have the weight 50, against the warm-up's, which has faded to 0.02: all but 40.
    assert batch_time.overhead_tokens * 0.5 + 34 * 0.5 == pytest.approx(40, abs=0.02)


def test_a_warm_up_that_was_taken_in_a_bad_moment_is_outweighed() -> None:
    batch_time = BatchTime()
    batch_time.anchor(4, 5 + 100)
    batch_time.anchor(64, 35)
    for _ in range(500):
        for tokens in (16, 32, 48):
            batch_time.observe(tokens, 3 + 0.5 * tokens)
    assert batch_time.token_s == pytest.approx(0.5, rel=0.05)
    assert batch_time.overhead_tokens == pytest.approx(6, rel=0.15)


@pytest.mark.parametrize(
    "batches",
    [
        [(4, 35.0), (64, 5.0)],  # longer batches take less
        [(4, 0.1), (64, 1000.0)],  # a batch without tokens would take less than nothing
        [(1, 0.0), (2, 0.0)],
    ],
    ids=["falling", "steep", "no time at all"],
)
def test_neither_overhead_nor_token_time_is_ever_negative(batches: list[tuple[int, float]]) -> None:
    batch_time = BatchTime()
    for tokens, seconds in batches * 20:
        batch_time.observe(tokens, seconds)
        assert batch_time.token_s >= 0
        assert batch_time.overhead_tokens > 0
        assert min(batch_time.seconds(0), batch_time.seconds(1), batch_time.seconds(1000)) >= 0


def test_whatever_noise_says_no_estimate_is_negative() -> None:
    generator = np.random.default_rng(_SEED)
    batch_time = BatchTime()
    for tokens, seconds in zip(generator.integers(1, 8192, 2000), generator.exponential(1.0, 2000), strict=True):
        batch_time.observe(int(tokens), float(seconds))
        assert min(batch_time.token_s, batch_time.seconds(0), batch_time.seconds(1)) >= 0, f"seed {_SEED}"


def test_a_machine_that_becomes_twice_as_slow_is_followed_within_a_hundred_batches(batch_time: BatchTime) -> None:
    for _ in range(500):
        batch_time.observe(4, 5)
        batch_time.observe(64, 35)
    for _ in range(50):
        batch_time.observe(4, 10)
        batch_time.observe(64, 70)
    # After a hundred batches the older ones have 0.98^100 = 13 % of the weight. Twice the time for the rest makes 1.87
    # times the estimate.
    assert batch_time.token_s == pytest.approx(1.87 * 0.5, rel=0.02)
    assert batch_time.overhead_tokens == pytest.approx(6, rel=0.05)


def test_seconds_allow_for_twice_the_usual_error(batch_time: BatchTime) -> None:
    for _ in range(2000):
        batch_time.observe(16, 11)  # just as expected: the least error that is thought possible, 5 %, stays
    assert batch_time.seconds(16) == pytest.approx(11 * 1.1)


def test_seconds_widen_where_batches_take_now_longer_now_shorter(batch_time: BatchTime) -> None:
    for _ in range(1000):
        batch_time.observe(34, 15)
        batch_time.observe(34, 25)  # 20 s at the mean, and a quarter off
    assert batch_time.seconds(34) == pytest.approx(20 * 1.5, rel=0.03)


def test_one_batch_that_took_for_ever_is_soon_forgotten(batch_time: BatchTime) -> None:
    for _ in range(2000):
        batch_time.observe(16, 11)
    batch_time.observe(16, 1e6)
    # It counts as 33 s, three times what was expected, and weighs one in 50: 11 x (49 + 3) / 50. The error, 200 %,
    # counts as 100 %, which adds a fiftieth to the usual one, here no more than a few percent.
    assert batch_time.seconds(16) < 11 * 52 / 50 * (1 + 2 * 0.08)


def test_a_machine_that_becomes_ten_times_as_slow_is_followed_all_the_same(batch_time: BatchTime) -> None:
    for _ in range(300):
        batch_time.observe(4, 50)
        batch_time.observe(64, 350)
    assert batch_time.token_s == pytest.approx(5, rel=0.02)


def test_an_overhead_that_noise_has_hidden_does_not_keep_sequences_apart() -> None:
    batch_time = BatchTime()
    batch_time.anchor(4, 2)
    batch_time.anchor(64, 32)
    assert batch_time.overhead_tokens == 4  # the least


async def test_until_a_device_that_lost_all_cores_has_ended_its_queue_takes_as_long_as_on_one(
    queue: SequenceQueue, push: _Push, batch_time: BatchTime
) -> None:
    cores, on_device = Cores(1), list[Forecast]()
    on_device.append(Forecast(queue, cores, BatchTimes(batch_time, batch_time), on_device))
    push()
    cores.lose(0)
    assert on_device[0].queue_s(is_bulk=False) == on_device[0].work_s() == pytest.approx(2)  # four tokens


_SPEC = model_spec(max_tokens=64)
_LIMITS = Limits(max_batch_size=32, max_batch_tokens=8192, max_queue_sequences=3200)
_TOKENS = 15  # FakeBackend makes them 16
# A full batch takes 51.2 + 1 ms.
_TOKEN_S, _OVERHEAD_S = 0.0001, 0.001


class _OneAtATime(FakeBackend):
    """A device: each core computes one batch, and what it is handed besides waits."""

    def __init__(self, cores: int, in_flight: int) -> None:
        super().__init__(BackendRequest(_SPEC, [], {}, cores=cores, threads=0, in_flight=in_flight))
        self._turns = [asyncio.Lock() for _ in range(cores)]

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        async with self._turns[core]:
            await asyncio.sleep(_OVERHEAD_S + _TOKEN_S * inputs["input_ids"].size)
        return await super().compute(core, inputs)


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("cores", [1, 4])
def test_the_queue_takes_as_long_as_callers_are_told(
    monkeypatch: pytest.MonkeyPatch, cores: int, in_flight: int
) -> None:
    loop = JumpingLoop.installed(monkeypatch)

    async def simulate() -> tuple[float, float, float]:
        batch_time = BatchTime()
        for tokens in (16, 64):
            batch_time.anchor(tokens, _OVERHEAD_S + _TOKEN_S * tokens)
        async with running_model(_OneAtATime(cores, in_flight), _SPEC, _LIMITS, batch_time) as scheduler:

            def call() -> asyncio.Task[list[ComputedSequence]]:
                return loop.create_task(scheduler.run([{"input_ids": np.ones(_TOKENS, np.int32)}], Call()))

            callers = [call() for _ in range(_LIMITS.max_queue_sequences)]
            await asyncio.sleep(0.3)  # all cores are at work, and batches have been timed
            callers += [call() for _ in range(_LIMITS.max_queue_sequences - scheduler.queued[0])]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded) as refused:
                await call()
            began_s, work_s = loop.time(), scheduler.forecast.work_s()
            await asyncio.gather(*callers)
            return refused.value.retry_after_s, work_s, loop.time() - began_s

    try:
        told_s, work_s, took_s = loop.run_until_complete(simulate())
    finally:
        loop.close()
    # Besides the queue it took what had begun, up to three batches of 52 ms on each core, of at least 1280 ms; and the
    # overhead of 2 %.
    assert told_s == pytest.approx(took_s, rel=0.2)
    assert work_s == pytest.approx(took_s, rel=0.2)  # what autoscaling is told
