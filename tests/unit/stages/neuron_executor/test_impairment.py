"""stages/neuron_executor/impairment.py: back ends that hang delay their own models only, and health tells of them."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import SetupError, Unavailable
from neuronpipe.core.items import ExecuteItem, ModelKey
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import TensorSets
from neuronpipe.stages.neuron_executor import devices
from neuronpipe.stages.neuron_executor.backends import fake
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest, CoreLost
from neuronpipe.stages.neuron_executor.cores import Cores
from neuronpipe.stages.neuron_executor.impairment import Impairment
from neuronpipe.stages.neuron_executor.stage import NeuronExecutorStage, running_executor
from neuronpipe.stages.settings import EngineSettings
from tests.suite.constants import with_constants
from tests.suite.waiting import happens
from tests.unit.bundles.written import write_bundle
from tests.unit.model_specs import model_spec

# The file of each model in these tests (written.py).
_BYTES = 256
_FILE = "artifacts/openvino/model.bin"


class _Hangs:
    """What hangs, each once: loading or closing a model by its name, and a batch of any. It goes on at the end."""

    def __init__(self) -> None:
        self.loading: set[str] = set()
        self.closing: set[str] = set()
        self.batch = False
        self.go_on = threading.Event()
        self.loaded: list[str] = []

    def load(self, name: str, request: BackendRequest) -> "_Threaded":
        self._hang(self.loading, request.spec.name)
        self.loaded.append(request.spec.name)
        return _Threaded(request, self)

    def _hang(self, names: set[str], name: str) -> None:
        if name in names:
            names.remove(name)
            self.go_on.wait(60)

    def close(self, name: str) -> None:
        self._hang(self.closing, name)

    def run(self) -> None:
        if self.batch:
            self.batch = False
            self.go_on.wait(60)


class _Threaded(fake.FakeBackend):
    """Computes in threads and waits for them when it is closed, as those for GPUs and NeuronCores do."""

    def __init__(self, request: BackendRequest, hangs: _Hangs) -> None:
        super().__init__(request)
        self._hangs = hangs
        self._name = request.spec.name
        self._threads = ThreadPoolExecutor(self.cores)

    async def run(self, core: int, prepare: Any, finish: Any, *, is_alone: bool = False) -> Any:
        await asyncio.get_running_loop().run_in_executor(self._threads, self._hangs.run)
        return await super().run(core, prepare, finish, is_alone=is_alone)

    def close(self) -> None:
        self._hangs.close(self._name)
        self._threads.shutdown(wait=True, cancel_futures=True)
        super().close()


@pytest.fixture
def hangs(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Hangs]:
    hangs = _Hangs()
    monkeypatch.setattr(devices, "load_backend", hangs.load)
    yield hangs
    hangs.go_on.set()


def _repository(folder: Path, **sizes: int) -> list[Bundle]:
    """Models by their names, and how many times each has the file."""
    for name, files in sizes.items():
        artifact = Artifact(backend="fake", dtype="float32", files=(_FILE,) * files)
        write_bundle(folder, name, model=model_spec("question_answering", name=name), artifacts=(artifact,))
    return read_repository(folder)


def _settings(models: float = 0, **changes: Any) -> EngineSettings:
    """Room for a number of models."""
    given = {"models_on_demand": True, "max_model_memory_bytes": int(models * _BYTES), "cores": 2, "batch_limit_s": 1}
    return with_constants(EngineSettings, **{**given, **changes})


async def _ask(stage: NeuronExecutorStage, model: str, limit_s: float = 20) -> None:
    arrays = [{"input_ids": np.array([11, 12], np.int32)}]
    async with asyncio.timeout(limit_s):
        await stage.execute(ExecuteItem(Call(), ModelKey(model, 1), TensorSets(arrays=arrays)))


async def test_a_back_end_whose_batch_hangs_makes_room_for_others(tmp_path: Path, hangs: _Hangs) -> None:
    async with running_executor(_repository(tmp_path, a=1, b=1, c=1), _settings(1.5), Telemetry()) as stage:
        await _ask(stage, "a")
        hangs.batch = True
        await _ask(stage, "a")  # on the other core
        for name in ("b", "c", "a", "b"):
            await _ask(stage, name, 10)


@pytest.mark.parametrize("ending", ["a batch hangs", "closing hangs"])
async def test_a_version_whose_back_end_hangs_is_unloaded_and_can_be_loaded_again(
    tmp_path: Path, hangs: _Hangs, ending: str
) -> None:
    (bundle,) = _repository(tmp_path, a=1)
    async with running_executor([bundle], _settings(models_on_demand=False), Telemetry()) as stage:
        hangs.batch = ending == "a batch hangs"
        hangs.closing = {"a"} if ending == "closing hangs" else set()
        await _ask(stage, "a")
        async with asyncio.timeout(10):
            await stage.models.close(ModelKey("a", 1))
            await stage.models.open(bundle)
        await _ask(stage, "a")


async def test_a_model_whose_loading_hangs_delays_others_at_most_by_a_batch(tmp_path: Path, hangs: _Hangs) -> None:
    hangs.loading = {"a"}
    async with running_executor(_repository(tmp_path, a=1, b=1), _settings(2), Telemetry()) as stage:
        waiting = asyncio.create_task(_ask(stage, "a"))
        await happens(lambda: not hangs.loading)
        await _ask(stage, "b", 10)
        assert not waiting.done()
        hangs.go_on.set()
        await waiting
        assert hangs.loaded == ["b", "a"]


async def test_a_model_whose_loading_hangs_is_given_up_and_leaves_its_room(tmp_path: Path, hangs: _Hangs) -> None:
    hangs.loading = {"a"}
    settings = _settings(1.5, impaired_limit_s=2)
    async with running_executor(_repository(tmp_path, a=1, b=1), settings, Telemetry()) as stage:
        waiting, other = asyncio.create_task(_ask(stage, "a")), asyncio.create_task(_ask(stage, "b"))
        problem = r"loading model 'a' version 1 has not ended after 2 s, the limit \(--imp"
        with pytest.raises(Unavailable, match=problem):
            await waiting
        await other
        await asyncio.sleep(1)
        await _ask(stage, "a")
        assert hangs.loaded == ["b", "a"]


async def test_a_model_that_leaves_while_its_loading_hangs_is_not_waited_for(tmp_path: Path, hangs: _Hangs) -> None:
    hangs.loading = {"a"}
    async with running_executor(_repository(tmp_path, a=1, b=1), _settings(1), Telemetry()) as stage:
        waiting = asyncio.create_task(_ask(stage, "a"))
        await happens(lambda: not hangs.loading)
        waiting.cancel()
        async with asyncio.timeout(10):
            await stage.models.close(ModelKey("a", 1))
        await _ask(stage, "b")  # which has its room


async def test_without_on_demand_a_model_whose_loading_hangs_fails_by_name(tmp_path: Path, hangs: _Hangs) -> None:
    hangs.loading = {"a"}
    settings = _settings(models_on_demand=False, impaired_limit_s=0.2)
    with pytest.raises(SetupError, match=r"^loading model 'a' version 1 has not ended after 0\.2 s"):
        async with running_executor(_repository(tmp_path, a=1), settings, Telemetry()):
            raise AssertionError


async def test_a_model_that_waits_for_room_does_not_hold_up_smaller_ones_and_comes_first_when_there_is_room(
    tmp_path: Path, hangs: _Hangs
) -> None:
    used, may_end = asyncio.Event(), asyncio.Event()
    async with running_executor(_repository(tmp_path, a=2, large=3, b=1, c=1), _settings(3), Telemetry()) as stage:
        await _ask(stage, "a")
        with stage.models.table.find("a", "1") as model:

            async def use() -> None:
                async with model.use():  # type: ignore[union-attr]
                    used.set()
                    await may_end.wait()

            using = asyncio.create_task(use())
            await used.wait()
            large = asyncio.create_task(_ask(stage, "large"))
            await happens(lambda: stage.models.announced.unloaded.get(ModelKey("large", 1)) is True)
            for name in ("b", "c", "b"):  # in the room that is left
                await _ask(stage, name, 10)
            assert not large.done()
            small = asyncio.create_task(_ask(stage, "c"))
            may_end.set()
            await using
        await large
        await small
        assert hangs.loaded == ["a", "b", "c", "b", "large", "c"]


async def test_a_process_with_a_lost_core_is_well_until_the_limit(tmp_path: Path, hangs: _Hangs) -> None:
    reports: list[bool] = []
    settings = _settings(impaired_limit_s=1.5)
    async with running_executor(_repository(tmp_path, a=1), settings, Telemetry(), report=reports.append) as stage:
        await _ask(stage, "a")
        hangs.batch = True
        await _ask(stage, "a")  # after a second
        assert reports == []
        await happens(lambda: reports == [False])
        await _ask(stage, "a")  # it still answers


async def test_a_process_whose_loader_hangs_is_not_well_until_it_goes_on(tmp_path: Path, hangs: _Hangs) -> None:
    reports: list[bool] = []
    hangs.loading = {"a"}
    settings = _settings(impaired_limit_s=0.2)
    async with running_executor(_repository(tmp_path, a=1), settings, Telemetry(), report=reports.append) as stage:
        with pytest.raises(Unavailable):
            await _ask(stage, "a")
        await happens(lambda: reports == [False])
        hangs.go_on.set()
        await happens(lambda: reports == [False, True])


async def test_a_process_that_cannot_close_a_back_end_is_not_well(tmp_path: Path, hangs: _Hangs) -> None:
    reports: list[bool] = []
    hangs.closing = {"a"}
    (bundle,) = _repository(tmp_path, a=1)
    settings = _settings(models_on_demand=False, impaired_limit_s=0.2)
    async with running_executor([bundle], settings, Telemetry(), report=reports.append) as stage:
        await stage.models.close(ModelKey("a", 1))
        await happens(lambda: reports == [False])


@pytest.mark.parametrize("limit_s", [0.0, 0.01])
async def test_nothing_is_told_without_a_limit(limit_s: float) -> None:
    impairment, cores, reports = Impairment(limit_s), Cores(2), list[bool]()
    impairment.watch(cores)
    cores.lose(1)
    await asyncio.sleep(0.05)
    assert impairment.problem == "1 of 2 cores are lost"
    telling = asyncio.create_task(impairment.report_changes(reports.append))
    await asyncio.sleep(0.05)
    assert reports == ([False] if limit_s else [])
    telling.cancel()


async def test_what_a_back_end_raises_is_raised() -> None:
    def fail() -> None:
        raise CoreLost("the fault")

    with pytest.raises(CoreLost, match="the fault"):
        await Impairment(1).call("loading model 'a'", fail)
