"""stages/neuron_executor/stage.py: items fail alone, bundles that cannot run are refused at start, and times are not
counted twice.
"""

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.bundles.buckets import Bucket
from neuronpipe.bundles.manifest import Artifact
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput, ModelNotFound, SetupError, Unavailable
from neuronpipe.core.items import ExecuteItem, ModelKey, Prediction
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import Metrics
from neuronpipe.core.packed import TensorSets
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends import BACKENDS, BackendEntry
from neuronpipe.stages.neuron_executor.backends.base import CoreLost
from neuronpipe.stages.neuron_executor.backends.fake import FakeBackend
from neuronpipe.stages.neuron_executor.cores import CoresLost
from neuronpipe.stages.neuron_executor.sequence_queue import ComputedSequence
from neuronpipe.stages.neuron_executor.stage import prediction_of, running_executor
from neuronpipe.stages.settings import EngineSettings
from tests.suite.waiting import happens
from tests.unit.bundles.written import write_bundle
from tests.unit.model_specs import model_spec
from tests.unit.stages.neuron_executor.fake_monitor import write_monitor

FAILING = 666


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model, m, on the fake back end."""
    _write(tmp_path, {"failing_token_id": str(FAILING)})
    return tmp_path


def _write(
    repository: Path, properties: dict[str, str], backend: str = "fake", buckets: tuple[Bucket, ...] = ()
) -> None:
    artifact = Artifact(backend=backend, dtype="float32", properties=properties, buckets=buckets)
    write_bundle(repository, model=model_spec("question_answering", name="m"), artifacts=(artifact,))


def _item(*sequences: list[int], model: str = "m", **call: Any) -> ExecuteItem:
    arrays = [{"input_ids": np.array(ids, np.int32)} for ids in sequences]
    return ExecuteItem(Call(**call), ModelKey(model, 1), TensorSets(arrays=arrays))


async def test_every_sequence_of_an_item_has_its_outputs_in_order(repository: Path) -> None:
    async with running_executor(read_repository(repository), EngineSettings(), Telemetry()) as stage:
        prediction = await stage.execute(_item([11, 12, 13], [21]))
    outputs = prediction.outputs.arrays
    # FakeBackend's formula, by hand; float32 has 7 digits.
    assert outputs[0]["start_logits"].tolist() == pytest.approx([np.sin(11), np.sin(24), np.sin(39)], abs=1e-6)
    assert outputs[1]["start_logits"].tolist() == pytest.approx([np.sin(21)], abs=1e-6)


async def test_a_prediction_tells_of_its_batch_and_its_times(tmp_path: Path) -> None:
    # Batches take so long that one more costs more than padding, and both sequences run together.
    _write(tmp_path, {"device_time_s": "0.02"})
    async with running_executor(read_repository(tmp_path), EngineSettings(), Telemetry()) as stage:
        prediction = await stage.execute(_item([11, 12, 13], [21]))
    # Three tokens, and the one more that FakeBackend asks for, for both.
    assert (prediction.batch_size, prediction.bucket_tokens, prediction.padded_tokens) == (2, 4, 8)
    assert prediction.compute_ns >= 0.02e9


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        (_item([11], model="none"), ModelNotFound),
        (_item([FAILING]), InternalError),
        (_item([5000]), InvalidInput),
        (_item(), InvalidInput),
        (_item([11], deadline_s=0.0), DeadlineExceeded),
        (ExecuteItem(Call(), ModelKey("m", 1), TensorSets(arrays=[{}])), InvalidInput),
    ],
    ids=["no such model", "cannot be computed", "outside of the vocabulary", "no sequence", "expired", "no tensor"],
)
async def test_a_bad_item_fails_alone(repository: Path, bad: ExecuteItem, kind: type[Exception]) -> None:
    async with running_executor(read_repository(repository), EngineSettings(), Telemetry()) as stage:
        good, failed, better = await asyncio.gather(
            *map(stage.execute, (_item([11]), bad, _item([21]))), return_exceptions=True
        )
    assert isinstance(failed, kind)
    assert isinstance(good, Prediction)
    assert isinstance(better, Prediction)


async def test_bulk_waits_for_interactive_work(tmp_path: Path) -> None:
    _write(tmp_path, {"device_time_s": "0.02"})
    ended: list[str] = []

    async def execute(name: str, item: ExecuteItem) -> None:
        await stage.execute(item)
        ended.append(name)

    async with (
        running_executor(read_repository(tmp_path), EngineSettings(), Telemetry()) as stage,
        asyncio.TaskGroup() as callers,
    ):
        callers.create_task(execute("running", _item([11])))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        callers.create_task(execute("bulk", _item([11], priority=Priority.PRIORITY_BULK)))
        callers.create_task(execute("interactive", _item([21])))
    assert ended == ["running", "interactive", "bulk"]


async def test_the_warm_up_tells_how_long_a_batch_takes(tmp_path: Path) -> None:
    _write(tmp_path, {"device_time_s": "0.2"})
    async with running_executor(read_repository(tmp_path), EngineSettings(), Telemetry()) as stage:
        # Nothing runs or waits, and still a tenth of a second is known to be too little.
        with pytest.raises(DeadlineExceeded, match="in the executor's queue"):
            await stage.execute(_item([11], deadline_s=time.monotonic() + 0.1))


async def test_the_warm_up_runs_on_every_core_and_leaves_batches_that_are_alone_to_the_first_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs: set[tuple[int, bool]] = set()
    compute = FakeBackend.compute

    async def noted(self: FakeBackend, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        runs.add((core, is_alone))
        return await compute(self, core, inputs, is_alone=is_alone)

    monkeypatch.setattr(FakeBackend, "compute", noted)
    _write(tmp_path, {})
    async with running_executor(read_repository(tmp_path), EngineSettings(cores=2), Telemetry()):
        assert runs == {(0, False), (1, False)}


async def test_the_warm_up_runs_every_bucket_on_every_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: set[tuple[int, tuple[int, ...]]] = set()
    compute = FakeBackend.compute

    async def noted(self: FakeBackend, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        runs.add((core, inputs["input_ids"].shape))
        return await compute(self, core, inputs, is_alone=is_alone)

    monkeypatch.setattr(FakeBackend, "compute", noted)
    buckets = (Bucket(batch=1, tokens=8), Bucket(batch=4, tokens=8), Bucket(batch=2, tokens=16))
    _write(tmp_path, {}, buckets=buckets)
    async with running_executor(read_repository(tmp_path), EngineSettings(cores=2), Telemetry()):
        assert runs == {(core, shape) for core in (0, 1) for shape in ((1, 8), (4, 8), (2, 16))}


async def test_a_bundle_without_an_artefact_for_the_back_end_asked_for_is_refused(repository: Path) -> None:
    with pytest.raises(SetupError, match="no artefact for the back end 'openvino'"):
        async with running_executor(read_repository(repository), EngineSettings(backend="openvino"), Telemetry()):
            pass


async def test_a_bundle_for_a_back_end_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, {}, backend="abacus")
    with pytest.raises(SetupError, match=r"^back end 'abacus' is not known; there are: openvino, fake"):
        async with running_executor(read_repository(tmp_path), EngineSettings(), Telemetry()):
            pass


async def test_a_model_that_cannot_run_its_warm_up_batch_is_refused(tmp_path: Path) -> None:
    _write(tmp_path, {"failing_token_id": "0"})  # the padding, of which the warm-up batch is made
    with pytest.raises(SetupError, match=rf"^{tmp_path}/m/1: the back end cannot run a warm-up batch: "):
        async with running_executor(read_repository(tmp_path), EngineSettings(), Telemetry()):
            pass


class _PartlyDead(FakeBackend):
    """Cores of which some are lost from the start."""

    dead: frozenset[int] = frozenset()

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        if core in self.dead:
            raise CoreLost(f"core {core} is dead")
        return await super().compute(core, inputs, is_alone=is_alone)


def _some_dead(monkeypatch: pytest.MonkeyPatch, *dead: int) -> None:
    monkeypatch.setattr(_PartlyDead, "dead", frozenset(dead))
    monkeypatch.setitem(BACKENDS, "fake", BackendEntry(f"{__name__}:_PartlyDead", 0))


@pytest.mark.parametrize(
    "buckets", [(), (Bucket(batch=1, tokens=8), Bucket(batch=4, tokens=8))], ids=["any shape", "buckets"]
)
async def test_cores_that_are_dead_at_the_start_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, buckets: tuple[Bucket, ...], caplog: pytest.LogCaptureFixture
) -> None:
    _some_dead(monkeypatch, 0, 2)
    _write(tmp_path, {}, buckets=buckets)
    telemetry = Telemetry()
    async with running_executor(read_repository(tmp_path), EngineSettings(cores=3), telemetry) as stage:
        for _ in range(5):
            await stage.execute(_item([11]))
        (family,) = (family for family in telemetry.meters.families() if family.instrument is Metrics.CORES)
        assert [family.number(series) for series in family.series.values()] == [1]
    assert caplog.text.count("core lost") == 2  # and not again with the first requests


async def test_an_executor_whose_cores_are_dead_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _some_dead(monkeypatch, 0, 1)
    _write(tmp_path, {})
    with pytest.raises(SetupError, match="cannot run a warm-up batch: core 1 is dead"):
        async with running_executor(read_repository(tmp_path), EngineSettings(cores=2), Telemetry()):
            pass


@pytest.mark.parametrize("in_flight", [1, 2])
async def test_with_the_last_core_whoever_waits_for_any_model_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_flight: int
) -> None:
    _some_dead(monkeypatch)
    artifact = Artifact(backend="fake", dtype="float32", properties={"device_time_s": "0.02"})
    for name in "m", "n", "o":
        write_bundle(tmp_path, name, model=model_spec("question_answering", name=name), artifacts=(artifact,))
    callers: list[asyncio.Task[Prediction]] = []

    async def lose_all() -> None:
        async with running_executor(
            read_repository(tmp_path), EngineSettings(in_flight=in_flight, max_batch_size=1), Telemetry()
        ) as stage:
            items = [_item([11], model=name) for name in ("m", "n", "o") for _ in range(10)]
            callers.extend(asyncio.create_task(stage.execute(item)) for item in items)
            await asyncio.wait(callers, return_when=asyncio.FIRST_COMPLETED)
            monkeypatch.setattr(_PartlyDead, "dead", frozenset([0]))
            await asyncio.sleep(20)  # it is cancelled

    with pytest.raises(CoresLost):
        await lose_all()
    outcomes = await asyncio.wait_for(asyncio.gather(*callers, return_exceptions=True), 5)
    failed = [outcome for outcome in outcomes if not isinstance(outcome, Prediction)]
    assert len(failed) > 10  # of each model four at most are computed before it is known
    assert {type(one) for one in failed} == {Unavailable}


@pytest.mark.parametrize("backend", ["neuronx", "fake"])
async def test_neuron_monitor_runs_beside_models_on_neuron_cores_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str
) -> None:
    write_monitor(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setitem(BACKENDS, "neuronx", BACKENDS["fake"])
    _write(tmp_path / "repository", {}, backend=backend)
    telemetry = Telemetry()

    def utilisation() -> list[float]:
        families = [family for family in telemetry.meters.families() if family.instrument is Metrics.NEURON_UTILIZATION]
        return [family.number(series) for family in families for series in family.series.values()]

    async with running_executor(read_repository(tmp_path / "repository"), EngineSettings(), telemetry) as stage:
        if backend == "neuronx":
            await happens(lambda: utilisation() == pytest.approx([0.4201, 0.975]))
        await stage.execute(_item([11]))
    assert bool(utilisation()) == (backend == "neuronx")


async def test_a_limit_below_the_memory_of_models_that_are_opened_later_is_told(
    repository: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("neuronpipe.stages.neuron_executor.stage.memory_limit", lambda: 1)
    async with running_executor([], EngineSettings(), Telemetry(), read_repository(repository)):
        assert "the container's memory may not be enough" in caplog.text


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(10, 30)], 20),
        ([(10, 30), (10, 30)], 20),  # two sequences of one batch
        ([(10, 30), (20, 50)], 40),  # two cores at once
        ([(10, 60), (20, 30)], 50),  # one within the other
        ([(40, 50), (10, 30)], 30),  # one after the other, in whatever order
        ([(10, 30), (30, 50)], 40),
    ],
    ids=str,
)
def test_time_in_which_sequences_were_computed_counts_once(intervals: list[tuple[int, int]], expected: int) -> None:
    computed = [ComputedSequence({}, *interval, batch_size=1, bucket_tokens=8) for interval in intervals]
    prediction = prediction_of(computed, arrived_ns=0)
    assert prediction.compute_ns == expected
    assert prediction.queue_ns == max(end for _, end in intervals) - expected
