"""stages/neuron_executor/devices.py: shapes of the menu are computed once while the device is idle."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from neuronpipe.bulk.transform.whole_items import WholeItemModel
from neuronpipe.bundles.manifest import Artifact
from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.core.calls import Call
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import Instrument, Metrics
from neuronpipe.core.streams import Preparation
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor import devices
from neuronpipe.stages.neuron_executor.backends import BACKENDS, BackendEntry
from neuronpipe.stages.neuron_executor.backends.base import BackendError, BackendRequest
from neuronpipe.stages.neuron_executor.backends.fake import FakeBackend
from neuronpipe.stages.neuron_executor.devices import running_devices
from neuronpipe.stages.neuron_executor.shapes import BatchShape, ShapeMenu
from neuronpipe.stages.neuron_executor.stage import running_executor
from neuronpipe.stages.settings import EngineSettings
from tests.suite.waiting import happens
from tests.unit.bundles.written import write_bundle
from tests.unit.model_specs import image_text_spec, model_spec
from tests.unit.stages.neuron_executor.scheduling import sequence

_PATIENCE_S = 20.0
_CORES = 2
_MENU = ShapeMenu(model_spec(), 64)
# Up to 64 tokens on each core; a text alone has 8 or 16 tokens.
_PLANNED = {
    *(
        BatchShape(core, rows, tokens, is_alone=False)
        for core in range(_CORES)
        for tokens, most_rows in ((8, 8), (16, 4))
        for rows in range(1, most_rows + 1)
    ),
    *(BatchShape(0, 1, tokens, is_alone=True) for tokens in (8, 16)),
}
_SHAPES = (Metrics.MODEL_SHAPES, Metrics.MODEL_SHAPES_READY)


class _MenuBackend(FakeBackend):
    """Computes shapes of a menu. The shapes that the test names fail, or are held until it lets them run."""

    prepared: list[tuple[str, BatchShape]]
    running: Counter[int]
    overlaps: list[BatchShape]
    failing: set[BatchShape]
    held: set[BatchShape]
    may_run: asyncio.Event
    changed: asyncio.Event

    def __init__(self, request: BackendRequest) -> None:
        super().__init__(request)
        self.shapes = _MENU

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        rows, tokens = inputs["input_ids"].shape
        shape = BatchShape(core, rows, tokens, is_alone)
        is_request = (inputs["input_ids"] == 11).any()
        if self.running[core] or (is_alone and self.running.total()):
            self.overlaps.append(shape)
        self.running[core] += 1
        try:
            if not is_request:
                self.prepared.append((self._spec.name, shape))
                self.changed.set()
                if shape in self.held:
                    await self.may_run.wait()
                if shape in self.failing:
                    raise BackendError("a shape that the test chose")
            await asyncio.sleep(0.001)
            return await super().compute(core, inputs, is_alone=is_alone)
        finally:
            self.running[core] -= 1

    @classmethod
    async def until(cls, is_so: Callable[[], bool]) -> None:
        """Waits for a state that begins with a shape."""
        async with asyncio.timeout(_PATIENCE_S):
            while not is_so():
                cls.changed.clear()
                await cls.changed.wait()


@pytest.fixture(autouse=True)
def backend(monkeypatch: pytest.MonkeyPatch) -> type[_MenuBackend]:
    for name, value in {
        "prepared": [],
        "running": Counter(),
        "overlaps": [],
        "failing": set(),
        "held": set(),
        "may_run": asyncio.Event(),
        "changed": asyncio.Event(),
    }.items():
        monkeypatch.setattr(_MenuBackend, name, value, raising=False)
    monkeypatch.setitem(BACKENDS, "fake", BackendEntry(f"{__name__}:_MenuBackend", 0))
    monkeypatch.setattr(devices, "_IDLE_S", 0.002)
    monkeypatch.setattr(devices, "_FIRST_TOKENS", 0)
    return _MenuBackend


@pytest.fixture
def bundles(tmp_path: Path) -> dict[str, Bundle]:
    for name in ("m", "n"):
        artifact = Artifact(backend="fake", dtype="float32")
        write_bundle(tmp_path, name, model=model_spec(name=name), artifacts=(artifact,))
    return {bundle.spec.name: bundle for bundle in read_repository(tmp_path)}


def _gauges(telemetry: Telemetry, instruments: tuple[Instrument, ...] = _SHAPES) -> list[float]:
    """The values of a model's gauges; none after it has left."""
    return [
        family.number(series)
        for instrument in instruments
        for family in telemetry.meters.families()
        if family.instrument == instrument
        for series in family.series.values()
    ]


async def test_an_idle_device_computes_every_shape_on_every_core_once(
    bundles: dict[str, Bundle], backend: type[_MenuBackend]
) -> None:
    telemetry = Telemetry()
    async with running_devices(EngineSettings(cores=_CORES), telemetry) as devices:
        async with devices.open_batches(bundles["m"]) as model:
            model.is_used.set()
            warm_ups = len(backend.prepared)
            assert _gauges(telemetry) == [len(_PLANNED), 0]
            await backend.until(lambda: len(backend.prepared) == warm_ups + len(_PLANNED))
            while _gauges(telemetry)[1] < len(_PLANNED):
                await asyncio.sleep(0)
            assert {shape for _, shape in backend.prepared[warm_ups:]} == _PLANNED
            # And those that a request had meanwhile are no more.
            await model.run([sequence(11)], Call())
            assert _gauges(telemetry) == [len(_PLANNED), len(_PLANNED)]
        assert _gauges(telemetry, (*_SHAPES, Metrics.LONE_GRAPHS, Metrics.LONE_GRAPH_MEMORY)) == []


async def test_how_far_models_are_prepared_is_told_at_a_bounded_rate_and_no_more_when_they_have_left(
    bundles: dict[str, Bundle], backend: type[_MenuBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_REPORT_EVERY_S", 0.05)
    monkeypatch.setattr(backend, "lone_graphs", {8: 1000, 16: 2000})
    key, settings = ModelKey("m", 1), EngineSettings(cores=_CORES)
    async with running_executor([bundles["m"]], settings, Telemetry()) as stage:
        changes: list[float] = []
        stage.models.changes.watch(lambda: changes.append(asyncio.get_running_loop().time()))
        assert stage.models.preparation_of(ModelKey("n", 1)) == Preparation()
        await happens(lambda: stage.models.preparation_of(key) == Preparation(len(_PLANNED), 0, 2, 3000))
        with stage.models.table.find("m", "1") as model:
            model.is_used.set()  # type: ignore[union-attr]
        await happens(lambda: stage.models.preparation_of(key) == Preparation(len(_PLANNED), len(_PLANNED), 2, 3000))
        assert all(later - earlier > 0.04 for earlier, later in pairwise(changes))
        told = len(changes)
        await asyncio.sleep(0.2)  # nothing is told that has not changed
        assert len(changes) == told
        await stage.models.close(key)
        await happens(lambda: not stage.models.announced.prepared)


async def test_the_shape_of_a_request_is_computed_once(bundles: dict[str, Bundle], backend: type[_MenuBackend]) -> None:
    async with (
        running_devices(EngineSettings(cores=1), Telemetry()) as devices,
        devices.open_batches(bundles["m"]) as model,
    ):
        warm_ups = len(backend.prepared)
        await model.run([sequence(11)], Call())
        assert BatchShape(0, 1, 8, is_alone=True) in model.computed_shapes
        of_core = {shape for shape in _PLANNED if shape.core == 0}
        planned = of_core - model.computed_shapes
        await backend.until(lambda: len(backend.prepared) == warm_ups + len(planned))
        while len(model.computed_shapes) < len(of_core):
            await asyncio.sleep(0)
        assert {shape for _, shape in backend.prepared[warm_ups:]} == planned


async def test_a_busy_device_prepares_nothing(bundles: dict[str, Bundle], backend: type[_MenuBackend]) -> None:
    async with (
        running_devices(EngineSettings(cores=_CORES), Telemetry()) as devices,
        devices.open_batches(bundles["m"]) as model,
    ):
        warm_ups = len(backend.prepared)
        is_open = True

        async def call() -> None:
            while is_open:
                await model.run([sequence(11)], Call())

        caller = asyncio.create_task(call())
        await asyncio.sleep(0.1)  # fifty times as long as the device has to be idle
        assert len(backend.prepared) == warm_ups
        is_open = False
        await caller
        await backend.until(lambda: len(backend.prepared) > warm_ups)


async def test_a_request_that_comes_while_a_shape_is_prepared_runs_on_another_core_and_not_alone(
    bundles: dict[str, Bundle], backend: type[_MenuBackend]
) -> None:
    async with (
        running_devices(EngineSettings(cores=_CORES), Telemetry()) as devices,
        devices.open_batches(bundles["m"]) as model,
    ):
        model.is_used.set()
        backend.held.add(held := BatchShape(0, 2, 16, is_alone=False))
        await backend.until(lambda: backend.prepared[-1][1] == held)
        model.computed_shapes.clear()
        assert len(await model.run([sequence(11)], Call())) == 1
        assert model.computed_shapes == {BatchShape(1, 1, 8, is_alone=False)}
        backend.may_run.set()
    assert backend.overlaps == []


async def test_models_that_are_used_meanwhile_prepare_in_turns_and_nothing_runs_beside_a_batch_of_all_cores(
    bundles: dict[str, Bundle], backend: type[_MenuBackend]
) -> None:
    async with (
        running_devices(EngineSettings(cores=_CORES), Telemetry()) as devices,
        devices.open_batches(bundles["m"]) as model,
        devices.open_batches(bundles["n"]) as other,
    ):
        for pause in range(40):
            await asyncio.gather(model.run([sequence(11)], Call()), other.run([sequence(11)], Call()))
            await asyncio.sleep(0.002 + pause * 0.0002)
        ready = {(name, shape) for name in ("m", "n") for shape in _PLANNED}
        async with asyncio.timeout(_PATIENCE_S):
            while not ready <= {("m", one) for one in model.computed_shapes} | {
                ("n", one) for one in other.computed_shapes
            }:
                await asyncio.sleep(0.002)
    assert backend.overlaps == []


async def test_a_model_that_leaves_while_a_shape_is_prepared_does_not_wait_for_the_others(
    bundles: dict[str, Bundle], backend: type[_MenuBackend]
) -> None:
    telemetry = Telemetry()
    async with running_devices(EngineSettings(cores=_CORES), telemetry) as devices:
        async with asyncio.timeout(_PATIENCE_S), devices.open_batches(bundles["m"]) as model:
            model.is_used.set()
            backend.held.add(held := BatchShape(0, 2, 16, is_alone=False))
            await backend.until(lambda: backend.prepared[-1][1] == held)
        assert (backend.prepared[-1][1], _gauges(telemetry)) == (held, [])
        backend.held.clear()
        async with devices.open_batches(bundles["n"]) as model:
            assert len(await model.run([sequence(11)], Call())) == 1


async def test_a_shape_that_cannot_be_computed_is_told_once_and_requests_are_served(
    bundles: dict[str, Bundle], backend: type[_MenuBackend], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="neuronpipe")
    telemetry = Telemetry()
    backend.failing.add(failing := BatchShape(1, 3, 16, is_alone=False))
    async with (
        running_devices(EngineSettings(cores=_CORES), telemetry) as devices,
        devices.open_batches(bundles["m"]) as model,
    ):
        model.is_used.set()
        await backend.until(lambda: backend.prepared[-1][1] == failing)
        await happens(lambda: bool(caplog.records))
        count = len(backend.prepared)
        assert len(await model.run([sequence(11), sequence(11), sequence(11)], Call())) == 3
        await asyncio.sleep(0.02)  # ten times as long as the device has to be idle
        assert len(backend.prepared) == count
        planned, ready = _gauges(telemetry)
        assert (planned, ready < planned) == (len(_PLANNED), True)
    expected = ["the other shapes of a model are prepared when requests have them"]
    assert [record.message for record in caplog.records] == expected


async def test_items_that_are_kept_whole_have_shapes_of_their_own_and_none_is_prepared(
    bundles: dict[str, Bundle], backend: type[_MenuBackend]
) -> None:
    settings, telemetry = EngineSettings(cores=_CORES), Telemetry()
    async with running_devices(settings, telemetry, WholeItemModel) as devices, devices.open_batches(bundles["m"]):
        warm_ups = len(backend.prepared)
        await asyncio.sleep(0.02)  # ten times as long as the device has to be idle
        assert (len(backend.prepared), _gauges(telemetry)) == (warm_ups, [])


async def test_short_texts_are_prepared_before_the_model_is_ready_and_the_rest_once_it_is_used(
    bundles: dict[str, Bundle], backend: type[_MenuBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_FIRST_TOKENS", 8)
    first = BatchShape(0, 1, 8, is_alone=True)
    async with (
        running_devices(EngineSettings(cores=_CORES), Telemetry()) as running,
        running.open_batches(bundles["m"]) as model,
    ):
        assert model.computed_shapes == {first}
        prepared = len(backend.prepared)
        await asyncio.sleep(0.05)  # many times as long as the device has to be idle
        assert len(backend.prepared) == prepared
        await model.run([sequence(11)], Call())
        await backend.until(lambda: len(backend.prepared) > prepared)
        assert first not in {shape for _, shape in backend.prepared[prepared:]}


async def test_shapes_of_images_and_of_texts_of_one_model_are_prepared_with_images_and_with_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = image_text_spec(name="both")
    planned = ShapeMenu(spec, 64).planned(1, 32, 64)
    counts: Counter[tuple[int, int]] = Counter()

    async def note(self: FakeBackend, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        counts[len(inputs["input_ids"]), len(inputs["pixels"])] += 1
        _MenuBackend.changed.set()
        return {}

    monkeypatch.setattr(_MenuBackend, "compute", note)
    monkeypatch.setattr(f"{__name__}._MENU", ShapeMenu(spec, 64))
    write_bundle(tmp_path, "both", model=spec, artifacts=(Artifact(backend="fake", dtype="float32"),))
    (bundle,) = read_repository(tmp_path)
    async with running_devices(EngineSettings(cores=1), Telemetry()) as devices, devices.open_batches(bundle) as model:
        counts.clear()  # of the warm-up
        model.is_used.set()
        await _MenuBackend.until(lambda: counts.total() == len(planned))
    # Texts of 8 and of 16 tokens, with at most 64 tokens together; images, which count as 17. One of each alone also.
    texts = {(1, 0): 4, (2, 0): 2, (3, 0): 2, (4, 0): 2, (5, 0): 1, (6, 0): 1, (7, 0): 1, (8, 0): 1}
    assert counts == texts | {(0, 1): 2, (0, 2): 1, (0, 3): 1}
