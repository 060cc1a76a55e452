"""stages/neuron_executor/on_demand.py: models come when they are asked for, and go where memory is short."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Overloaded, SetupError, Unavailable
from neuronpipe.core.items import ExecuteItem, ModelKey
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import Metrics
from neuronpipe.core.packed import TensorSets
from neuronpipe.stages.neuron_executor import on_demand
from neuronpipe.stages.neuron_executor.stage import NeuronExecutorStage, running_executor
from neuronpipe.stages.settings import EngineSettings
from tests.suite.constants import with_constants
from tests.suite.waiting import happens
from tests.unit.bundles.written import write_bundle
from tests.unit.model_specs import model_spec

# The file of each model in these tests (written.py).
_BYTES = 256
_FILE = "artifacts/openvino/model.bin"


def _repository(folder: Path, *names: str, device_time_s: float = 0.0) -> Path:
    artifact = Artifact(
        backend="fake", dtype="float32", files=(_FILE,), properties={"device_time_s": str(device_time_s)}
    )
    for name in names:
        write_bundle(folder, name, model=model_spec("question_answering", name=name), artifacts=(artifact,))
    return folder


def _settings(models: float) -> EngineSettings:
    """Room for so many models."""
    return EngineSettings(models_on_demand=True, max_model_memory_bytes=int(models * _BYTES))


async def _ask(stage: NeuronExecutorStage, *models: str) -> None:
    for model in models:
        arrays = [{"input_ids": np.array([11, 12], np.int32)}]
        await stage.execute(ExecuteItem(Call(), ModelKey(model, 1), TensorSets(arrays=arrays)))


def _unloaded(stage: NeuronExecutorStage) -> Mapping[str, bool]:
    return {key.name: is_loading for key, is_loading in stage.models.announced.unloaded.items()}


def _count(telemetry: Telemetry, model: str, outcome: str) -> float:
    return telemetry.meters.counter(Metrics.MODEL_LOADS, model, "1", outcome).value


async def test_nothing_is_loaded_before_it_is_asked_for(tmp_path: Path) -> None:
    async with running_executor(read_repository(_repository(tmp_path, "a", "b")), _settings(2), Telemetry()) as stage:
        assert stage.models.keys == {ModelKey("a", 1), ModelKey("b", 1)}
        assert _unloaded(stage) == {"a": False, "b": False}
        await _ask(stage, "a")
        assert _unloaded(stage) == {"b": False}


async def test_the_model_that_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    telemetry = Telemetry()
    bundles = read_repository(_repository(tmp_path, "a", "b", "c"))
    async with running_executor(bundles, _settings(2.5), telemetry) as stage:
        await _ask(stage, "a", "b", "a", "c")
        assert _unloaded(stage) == {"b": False}
        await _ask(stage, "b")
        assert _unloaded(stage) == {"a": False}
        assert [_count(telemetry, model, "loaded") for model in "abc"] == [1, 2, 1]
        assert [_count(telemetry, model, "unloaded") for model in "abc"] == [1, 1, 0]
        assert sum(telemetry.meters.histogram(Metrics.MODEL_WAIT, "b", "1").counts) == 2


async def test_a_model_in_use_is_not_unloaded(tmp_path: Path) -> None:
    telemetry = Telemetry()
    bundles = read_repository(_repository(tmp_path, "a", "b", device_time_s=0.2))
    async with running_executor(bundles, _settings(1), telemetry) as stage, asyncio.TaskGroup() as group:
        await _ask(stage, "a")
        used = group.create_task(_ask(stage, "a"))
        await asyncio.sleep(0)
        other = group.create_task(_ask(stage, "b"))
        await used
        assert not other.done()
        await other
        assert [_count(telemetry, model, "loaded") for model in "ab"] == [1, 1]
        assert _unloaded(stage) == {"a": False}


async def test_what_nobody_waits_for_any_more_takes_no_room(tmp_path: Path) -> None:
    bundles = read_repository(_repository(tmp_path, "a", "b", device_time_s=0.2))
    async with running_executor(bundles, _settings(1), Telemetry()) as stage, asyncio.TaskGroup() as group:
        await _ask(stage, "a")
        used = group.create_task(_ask(stage, "a"))
        await asyncio.sleep(0)
        left = group.create_task(_ask(stage, "b"))
        await happens(lambda: _unloaded(stage) == {"b": True})
        left.cancel()
        await used
        await happens(lambda: _unloaded(stage) == {"b": False})


async def test_callers_that_come_while_a_model_is_loaded_share_one_load(tmp_path: Path) -> None:
    telemetry = Telemetry()
    async with running_executor(read_repository(_repository(tmp_path, "a")), _settings(1), telemetry) as stage:
        await asyncio.gather(*(_ask(stage, "a") for _ in range(20)))
        assert _count(telemetry, "a", "loaded") == 1


async def test_so_many_items_wait_for_a_model_and_more_are_refused(tmp_path: Path) -> None:
    settings = with_constants(EngineSettings, models_on_demand=True, max_queue_sequences=2)
    async with running_executor(read_repository(_repository(tmp_path, "a")), settings, Telemetry()) as stage:
        outcomes = await asyncio.gather(*(_ask(stage, "a") for _ in range(3)), return_exceptions=True)
        (refused,) = [outcome for outcome in outcomes if outcome]
        assert isinstance(refused, Overloaded)
        expected = "2 items wait until model 'a' version 1 is loaded, the limit"
        assert refused.message == expected


async def test_a_model_that_can_never_fit_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"model 'a' version 1: takes 256 bytes, the limit for all models is 128 "):
        async with running_executor(read_repository(_repository(tmp_path, "a")), _settings(0.5), Telemetry()):
            raise AssertionError


async def test_without_on_demand_a_model_that_does_not_fit_beside_the_others_is_refused_by_name(tmp_path: Path) -> None:
    bundles = read_repository(_repository(tmp_path, "a", "b"))
    with pytest.raises(SetupError, match=r"model 'b' version 1: takes 256 bytes beside 256 of other models"):
        async with running_executor(bundles, EngineSettings(max_model_memory_bytes=2 * _BYTES - 1), Telemetry()):
            raise AssertionError


async def test_a_model_that_cannot_be_loaded_fails_by_name_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_PAUSE_S", 0.05)
    telemetry = Telemetry()
    repository = _repository(tmp_path, "a", "b")
    async with running_executor(read_repository(repository), _settings(1), telemetry) as stage:
        file = repository / "a" / "1" / _FILE
        written = file.read_bytes()
        file.unlink()  # it is the other's, too
        file.write_bytes(b"x" * _BYTES)
        for _ in range(2):  # the second one does not read it again
            with pytest.raises(Unavailable, match=r"model 'a' version 1 cannot be loaded: .*model\.bin"):
                await _ask(stage, "a")
        assert _count(telemetry, "a", "failed") == 1
        await _ask(stage, "b")  # and what it would have taken is free
        file.write_bytes(written)
        await asyncio.sleep(0.05)
        await _ask(stage, "a")


async def test_a_hundred_models_share_the_room_of_ten(tmp_path: Path) -> None:
    names = [f"m{number:03}" for number in range(100)]
    telemetry = Telemetry()
    async with running_executor(read_repository(_repository(tmp_path, *names)), _settings(10), telemetry) as stage:
        await asyncio.gather(*(_ask(stage, name) for name in names))
        assert len(_unloaded(stage)) == 90
        assert sum(_count(telemetry, name, "loaded") for name in names) == 100
        await _ask(stage, *names[:3])
    assert not stage.models.announced.unloaded
