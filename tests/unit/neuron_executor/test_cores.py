"""neuron_executor/cores.py: who may take a batch, and who is counted as idle."""

from neuronpipe.neuron_executor.cores import Cores


def test_a_core_that_works_takes_no_more_while_another_is_idle() -> None:
    cores = Cores(2)
    cores.begin(0)
    assert (cores.may_take(0), cores.may_take(1), cores.idle) == (False, True, 1)
    cores.begin(1)
    assert (cores.may_take(0), cores.may_take(1), cores.idle) == (True, True, 0)


def test_a_core_is_idle_once_all_of_its_batches_have_ended() -> None:
    cores = Cores(1)
    cores.begin(0)
    cores.begin(0)
    cores.end(0)
    assert (cores.idle, cores.running) == (0, 1)
    cores.end(0)
    assert (cores.idle, cores.running) == (1, 0)


def test_a_lost_core_is_not_idle_and_keeps_none_from_working_ahead() -> None:
    cores = Cores(2)
    cores.begin(0)
    assert cores.lose(1)
    assert not cores.lose(1)
    assert (cores.left, cores.idle, cores.is_lost(1), cores.may_take(0)) == (1, 0, True, True)
