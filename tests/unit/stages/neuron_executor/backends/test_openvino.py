"""backends/openvino.py: the streams and threads that it takes."""

from collections.abc import Mapping
from typing import Any

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.backends import openvino
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest
from tests.unit.model_specs import model_spec

# (threads, streams) by what was asked for, of four CPUs.
TAKEN: Mapping[tuple[int, int], tuple[int, int]] = {(0, 0): (4, 4), (2, 0): (2, 2), (0, 1): (4, 1), (4, 2): (4, 2)}


@pytest.fixture(autouse=True)
def four_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.stages.neuron_executor.runtimes.host.available_cpus", lambda: 4)


def _request(**resources: Any) -> BackendRequest:
    return BackendRequest(model_spec(), [], {}, **resources)


@pytest.mark.parametrize("asked", TAKEN)
def test_there_is_a_stream_for_each_thread_and_a_thread_for_each_cpu_unless_asked_otherwise(
    asked: tuple[int, int],
) -> None:
    threads, cores = asked
    assert openvino._resources(_request(threads=threads, cores=cores)) == TAKEN[asked]


def test_threads_beyond_the_machine_are_refused_with_what_it_has() -> None:
    with pytest.raises(SetupError, match="threads: 5, but this process may use 4 CPUs only"):
        openvino._resources(_request(threads=5, cores=0))


def test_streams_beyond_the_threads_are_refused() -> None:
    with pytest.raises(SetupError, match="cores: 3, but there are 2 threads only"):
        openvino._resources(_request(threads=2, cores=3))
