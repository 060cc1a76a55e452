"""stages/neuron_executor/forecast.py: what is learned of a machine from its batches.

The machine of most tests takes 3 s a batch and 0.5 s a token: 5 s for 4 tokens, 35 s for 64. The forecasts are
simulated: the queue takes as long as callers are told, however many batches a core is handed.
"""

import asyncio
import math

import numpy as np
import pytest

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Overloaded
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest
from neuronpipe.stages.neuron_executor.backends.fake import FakeBackend
from neuronpipe.stages.neuron_executor.batching import Limits
from neuronpipe.stages.neuron_executor.cores import Cores
from neuronpipe.stages.neuron_executor.forecast import BatchTime, BatchTimes, Forecast
from neuronpipe.stages.neuron_executor.sequence_queue import ComputedSequence, SequenceQueue
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.conftest import Push
from tests.unit.stages.neuron_executor.jumping_time import JumpingLoop
from tests.unit.stages.neuron_executor.scheduling import running_model, tell_time

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
    queue: SequenceQueue, push: Push, batch_time: BatchTime
) -> None:
    cores, on_device = Cores(1), list[Forecast]()
    on_device.append(Forecast(queue, cores, BatchTimes(batch_time, batch_time), on_device))
    push()
    cores.lose(0)
    assert on_device[0].queue_wait_s(is_bulk=False) == on_device[0].backlog_s() == pytest.approx(2)  # four tokens


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
def test_the_queue_takes_what_callers_are_told(monkeypatch: pytest.MonkeyPatch, cores: int, in_flight: int) -> None:
    loop = JumpingLoop()
    tell_time(monkeypatch, loop)

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
            began_s, backlog_s = loop.time(), scheduler.forecast.backlog_s()
            await asyncio.gather(*callers)
            return refused.value.retry_after_s, backlog_s, loop.time() - began_s

    try:
        told_s, backlog_s, took_s = loop.run_until_complete(simulate())
    finally:
        loop.close()
    # Besides the queue it took what had begun, up to three batches of 52 ms on each core, of at least 1280 ms; and the
    # overhead of 2 %.
    assert told_s == pytest.approx(took_s, rel=0.2)
    assert backlog_s == pytest.approx(took_s, rel=0.2)  # what autoscaling is told
