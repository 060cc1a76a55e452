"""stages/neuron_executor/runtimes/neuron.py: cores as people write them, and the environment of Neuron's runtime."""

from pathlib import Path

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes import neuron
from neuronpipe.stages.neuron_executor.runtimes.neuron import core_count, device_count, runtime_environment, sdk_release
from neuronpipe.stages.settings import parse_cores


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3", (0, 1, 2, 3)), ("2", (2,)), ("0,2-3", (0, 2, 3)), ("3,3,1", (1, 3))]
)
def test_cores_are_read_as_they_are_written(text: str, cores: tuple[int, ...]) -> None:
    assert parse_cores(text) == cores


@pytest.mark.parametrize("text", ["", "-1", "3-1", "0-", "a", "0-256", "0 1", "0--1"])
def test_what_names_no_cores_is_refused(text: str) -> None:
    with pytest.raises(SetupError, match=f"^cores {text!r}: "):
        parse_cores(text)


@pytest.mark.parametrize(
    ("cores", "expected"),
    [(0, {}), (2, {"NEURON_RT_NUM_CORES": "2"}), ("2-3", {"NEURON_RT_VISIBLE_CORES": "2-3"})],
    ids=str,
)
def test_the_runtime_is_told_which_cores_it_has_and_how_long_an_execution_may_take(
    cores: int | str, expected: dict[str, str]
) -> None:
    assert runtime_environment(cores, {}) == {"NEURON_RT_EXEC_TIMEOUT": "30", **expected}


def test_a_time_limit_that_is_set_already_stays() -> None:
    assert runtime_environment(0, {"NEURON_RT_EXEC_TIMEOUT": "5"}) == {}


@pytest.mark.parametrize(
    ("environment", "cores", "added", "count"),
    [
        ({"NEURON_RT_VISIBLE_CORES": "4-6"}, 0, {}, 3),
        ({"NEURON_RT_VISIBLE_CORES": "4-6"}, 3, {}, 3),
        ({"NEURON_RT_VISIBLE_CORES": "4,5,6"}, "4-6", {"NEURON_RT_VISIBLE_CORES": "4-6"}, 3),
        (
            {"NEURON_RT_VISIBLE_CORES": "4-6", "NEURON_RT_NUM_CORES": "1"},
            0,
            {},
            3,
        ),  # of the two, the runtime goes by the first
        ({"NEURON_RT_NUM_CORES": "2"}, 0, {}, 2),
        ({"NEURON_RT_NUM_CORES": "2"}, 2, {}, 2),
        ({"NEURON_RT_NUM_CORES": "2"}, "0-1", {"NEURON_RT_VISIBLE_CORES": "0-1"}, 2),
        ({"NEURON_RT_VISIBLE_CORES": "", "NEURON_RT_NUM_CORES": "0"}, 2, {"NEURON_RT_NUM_CORES": "2"}, 2),
    ],
)
def test_cores_that_the_environment_names_are_those_of_the_process(
    environment: dict[str, str], cores: int | str, added: dict[str, str], count: int
) -> None:
    environment = {**environment, "NEURON_RT_EXEC_TIMEOUT": "30"}
    assert runtime_environment(cores, environment) == added
    assert core_count(0, environment | added) == count


@pytest.mark.parametrize(
    ("environment", "cores", "message"),
    [
        (
            {"NEURON_RT_VISIBLE_CORES": "4-5"},
            "0-1",
            "cores 0-1: contradicts NEURON_RT_VISIBLE_CORES=4-5 in the environment",
        ),
        ({"NEURON_RT_VISIBLE_CORES": "4-5"}, 1, "cores 1: contradicts NEURON_RT_VISIBLE_CORES=4-5 in the environment"),
        ({"NEURON_RT_NUM_CORES": "2"}, 1, "cores 1: contradicts NEURON_RT_NUM_CORES=2 in the environment"),
        ({"NEURON_RT_NUM_CORES": "2"}, "0", "cores 0: contradicts NEURON_RT_NUM_CORES=2 in the environment"),
        ({"NEURON_RT_VISIBLE_CORES": "all"}, 0, "NEURON_RT_VISIBLE_CORES: cores 'all': must be"),
        ({"NEURON_RT_NUM_CORES": "two"}, 0, "NEURON_RT_NUM_CORES=two: must be a number of cores, at most 256"),
    ],
)
def test_cores_that_contradict_the_environment_are_refused_with_the_variable(
    environment: dict[str, str], cores: int | str, message: str
) -> None:
    with pytest.raises(SetupError, match=f"^{message}"):
        runtime_environment(cores, environment)


def test_all_cores_are_two_for_each_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron, "DEVICE_FOLDER", tmp_path)
    for name in ("neuron0", "neuron1", "neuron_log", "null"):
        (tmp_path / name).touch()
    assert device_count() == 2
    assert core_count(0) == 4


def test_all_cores_of_a_machine_without_a_device_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neuron, "DEVICE_FOLDER", tmp_path)
    with pytest.raises(SetupError, match="no Neuron device on this machine"):
        core_count(0)
    assert core_count(2) == 2


@pytest.mark.parametrize(
    ("version", "release"),
    [("2.9.0.2.15.32035", "2.31"), ("2.8.0.2.10.13553+double", "2.26"), ("1.13.1.1.12.0", "unknown"), ("", "unknown")],
)
def test_the_release_of_the_sdk_is_known_by_the_version_of_torch_neuronx(version: str, release: str) -> None:
    assert sdk_release(version) == release
