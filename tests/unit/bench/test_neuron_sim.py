"""tests/bench/neuron_sim.py: the times of simulated cores."""

from tests.bench.neuron_sim import DEVICE_TIMES


def test_the_simulated_times_are_those_of_one_of_the_two_cores_that_the_published_throughput_is_of() -> None:
    # 2 x 1 / 1998.21 and 2 x 8 / 2674.19 seconds; 2 x 1 / 3401.97 and 2 x 16 / 5307.88.
    assert DEVICE_TIMES == {
        "inf2-bert-base": {"1x128": 1.001, "8x128": 5.983},
        "inf2-distilbert": {"1x128": 0.588, "16x128": 6.029},
    }
