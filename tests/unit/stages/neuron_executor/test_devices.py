"""stages/neuron_executor/devices.py: models come and go one by one."""

import asyncio
from pathlib import Path

import pytest

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import SetupError, Unavailable
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import Metrics
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends import BACKENDS, BackendEntry
from neuronpipe.stages.neuron_executor.backends.fake import FakeBackend
from neuronpipe.stages.neuron_executor.devices import running_devices
from neuronpipe.stages.settings import EngineSettings
from tests.unit.bundles.written import write_bundle
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.scheduling import sequence


class _OneDevice(FakeBackend):
    """Notes the cores that compute for several models at once, and those that were closed, or closed while they
    computed.
    """

    running: list[int]
    overlaps: list[int]
    closed: list[str]

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        if core in self.running or (is_alone and self.running):
            self.overlaps.append(core)
        self.running.append(core)
        try:
            await asyncio.sleep(0.001)
            return await super().compute(core, inputs, is_alone=is_alone)
        finally:
            self.running.remove(core)

    def close(self) -> None:
        self.closed.append(self._spec.name)
        super().close()


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> type[_OneDevice]:
    for name in "running", "overlaps", "closed":
        monkeypatch.setattr(_OneDevice, name, [], raising=False)
    monkeypatch.setitem(BACKENDS, "fake", BackendEntry(f"{__name__}:_OneDevice", 0))
    return _OneDevice


@pytest.fixture
def bundles(tmp_path: Path) -> dict[str, Bundle]:
    for name, properties in (("m", {}), ("n", {}), ("broken", {"failing_token_id": "0"})):
        artifact = Artifact(backend="fake", dtype="float32", properties=properties)
        write_bundle(tmp_path, name, model=model_spec(name=name), artifacts=(artifact,))
    return {bundle.spec.name: bundle for bundle in read_repository(tmp_path)}


async def test_a_model_that_opens_warms_up_between_the_batches_of_others(
    bundles: dict[str, Bundle], device: type[_OneDevice]
) -> None:
    async with (
        running_devices(EngineSettings(cores=2), Telemetry()) as devices,
        devices.open_batches(bundles["m"]) as model,
    ):

        async def call() -> None:
            while not is_open:
                await model.run([sequence(11)], Call())

        is_open = False
        callers = [asyncio.create_task(call()) for _ in range(8)]
        async with devices.open_batches(bundles["n"]) as other:
            assert len(await other.run([sequence(11)], Call())) == 1
            is_open = True
            await asyncio.gather(*callers)
    assert device.overlaps == []


async def test_a_model_is_closed_while_others_are_served(bundles: dict[str, Bundle], device: type[_OneDevice]) -> None:
    telemetry = Telemetry()

    def gauges() -> set[str]:
        return {
            labels[0]
            for family in telemetry.meters.families()
            for labels in family.series
            if family.instrument in (Metrics.CORES, Metrics.QUEUE_SEQUENCES, Metrics.QUEUE_TOKENS, Metrics.QUEUE_WORK)
        }

    async with running_devices(EngineSettings(), telemetry) as devices, devices.open_batches(bundles["m"]) as staying:
        async with devices.open_batches(bundles["n"]) as leaving:
            assert gauges() == {"m", "n"}
            running = asyncio.create_task(leaving.run([sequence(11)], Call()))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert (device.closed, gauges()) == (["n"], {"m"})
        assert len(await running) == 1
        with pytest.raises(Unavailable):
            await leaving.run([sequence(11)], Call())
        assert len(await staying.run([sequence(11)], Call())) == 1
    assert device.closed == ["n", "m"]


async def test_a_model_that_cannot_be_opened_is_unloaded_and_leaves_the_others_alone(
    bundles: dict[str, Bundle], device: type[_OneDevice]
) -> None:
    async with running_devices(EngineSettings(), Telemetry()) as devices, devices.open_batches(bundles["m"]) as model:
        with pytest.raises(SetupError, match="cannot run a warm-up batch"):
            async with devices.open_batches(bundles["broken"]):
                pass
        assert device.closed == ["broken"]
        assert len(await model.run([sequence(11)], Call())) == 1


async def test_a_model_can_be_opened_again(bundles: dict[str, Bundle]) -> None:
    async with running_devices(EngineSettings(), Telemetry()) as devices:
        for _ in range(2):
            async with devices.open_batches(bundles["m"]) as model:
                assert len(await model.run([sequence(11)], Call())) == 1


async def test_cores_end_with_the_block(bundles: dict[str, Bundle]) -> None:
    before = len(asyncio.all_tasks())
    async with running_devices(EngineSettings(cores=3), Telemetry()) as devices, devices.open_batches(bundles["m"]):
        assert len(asyncio.all_tasks()) == before + 3
    assert len(asyncio.all_tasks()) == before
