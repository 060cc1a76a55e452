"""stages/neuron_executor/cores.py: who may take a batch, who is counted as idle, and what a batch's time is."""

from neuronpipe.stages.neuron_executor.cores import Cores
from tests.suite.fixed_clock import FixedClock


def test_a_core_that_works_takes_no_more_while_another_is_idle() -> None:
    cores = Cores(2)
    cores.begin_batch(0, 1)
    assert (cores.may_take(0), cores.may_take(1), cores.idle) == (False, True, 1)
    cores.begin_batch(1, 1)
    assert (cores.may_take(0), cores.may_take(1), cores.idle) == (True, True, 0)


def test_a_core_is_idle_once_all_of_its_batches_have_ended() -> None:
    cores = Cores(1)
    cores.begin_batch(0, 1)
    cores.begin_batch(0, 1)
    cores.end_batch(0)
    assert (cores.idle, cores.running) == (0, 1)
    cores.end_batch(0)
    assert (cores.idle, cores.running) == (1, 0)


def test_a_lost_core_is_not_idle_and_keeps_none_from_working_ahead() -> None:
    cores = Cores(3)
    cores.lose(2)
    cores.begin_batch(0, 1)
    assert cores.lose(1)
    assert not cores.lose(1)
    assert (cores.left, cores.idle, cores.is_lost(1), cores.is_lost(2), cores.may_take(0)) == (1, 0, True, True, True)


def test_a_core_takes_nothing_beside_a_batch_that_is_kept_apart() -> None:
    cores = Cores(1)
    cores.begin_batch(0, 1, is_kept_apart=True)
    assert not cores.may_take(0)
    cores.end_batch(0)
    cores.begin_batch(0, 1)
    assert cores.may_take(0)


def test_a_batchs_time_begins_when_the_core_is_free_for_it(clock: FixedClock) -> None:
    cores, clock.now_s = Cores(1), 100
    cores.begin_batch(0, 3)  # at 100
    clock.now_s = 101
    cores.begin_batch(0, 3)  # handed over at 101, computed from 104 on
    clock.now_s = 104
    assert cores.end_batch(0) == (100 * 10**9, 104 * 10**9)
    clock.now_s = 107
    assert cores.end_batch(0) == (104 * 10**9, 107 * 10**9)
    clock.now_s = 120
    cores.begin_batch(0, 3)
    clock.now_s = 123
    assert cores.end_batch(0) == (120 * 10**9, 123 * 10**9)


def test_a_core_is_busy_for_as_long_as_its_batches_are_expected_to_take(clock: FixedClock) -> None:
    cores, clock.now_s = Cores(1), 100
    assert cores.busy_s(0) == 0
    cores.begin_batch(0, 3)
    clock.now_s = 101
    cores.begin_batch(0, 5)
    assert cores.busy_s(0) == 7
    clock.now_s = 104
    assert cores.busy_s(0) == 4
    cores.end_batch(0)  # later than expected
    assert cores.busy_s(0) == 5
    clock.now_s = 200
    assert cores.busy_s(0) == 0
