"""stages/neuron_executor/memory.py: the formula of an executor's memory, from the files of bundles alone."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from neuronpipe.bundles.manifest import Artifact
from neuronpipe.bundles.repository import Bundle, read_bundle
from neuronpipe.stages.neuron_executor.memory import MemoryPlan, memory_shortage, plan_memory
from neuronpipe.stages.neuron_executor.runtimes import host
from neuronpipe.stages.settings import EngineSettings
from tests.unit.bundles.written import write_bundle
from tests.unit.model_specs import model_spec

_MIB = 1 << 20
_VOCABULARY, _WIDTH = 1000, 64
_TABLE_BYTES, _OTHER_BYTES = 4 * _VOCABULARY * _WIDTH, 3 * _MIB
_PRODUCTS = 5
_FILES = ("artifacts/openvino/model.xml", "artifacts/openvino/model.bin")
# Two of its layers are no matrix products; the second constant is no table of words.
_GRAPH = (
    f'<data element_type="f32" shape="{_VOCABULARY}, {_WIDTH}" offset="0" size="{_TABLE_BYTES}" />'
    f'<data element_type="f32" shape="64, {_WIDTH}" offset="{_TABLE_BYTES}" size="16384" />'
    + '<layer type="MatMul"/>' * _PRODUCTS
    + '<layer type="MatMulOfAnother"/><layer type="Add"/>'
)


@pytest.fixture(autouse=True)
def cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "available_cpus", lambda: 16)


def _bundles(folder: Path, *names: str, dtype: str = "float32", backend: str = "openvino") -> list[Bundle]:
    for name in names:
        spec = model_spec(name=name, max_tokens=512, vocabulary_size=_VOCABULARY)
        artifact = Artifact(backend=backend, dtype=dtype, files=_FILES)
        bundle = write_bundle(folder, name, model=spec, artifacts=(artifact,))
        for file, content in zip(_FILES, (_GRAPH.encode(), bytes(_TABLE_BYTES + _OTHER_BYTES)), strict=True):
            (bundle / file).write_bytes(content)
    return [read_bundle(folder / name / "1") for name in names]


def _plan(bundles: Sequence[Bundle], **settings: object) -> MemoryPlan:
    return plan_memory(bundles, EngineSettings.model_validate({"cores": 2, **settings}))


def test_weights_are_the_files_and_a_graph_has_no_copy_of_the_table_of_words(tmp_path: Path) -> None:
    plan = _plan(_bundles(tmp_path, "a"))
    assert plan.weights == _TABLE_BYTES + _OTHER_BYTES + len(_GRAPH)
    # Two graphs of 12 MiB and 1.6 times what is no table.
    assert plan.graphs == 2 * (12 * _MIB + int(1.6 * (_OTHER_BYTES + len(_GRAPH))))


def test_shapes_count_matrix_products_and_numbers_of_tokens(tmp_path: Path) -> None:
    # 16 to 512 in steps of an eighth of the next power of two are 16 numbers; 8, 24, 40 and 56 are those of lone texts.
    first, bundles = _PRODUCTS * 20 * 340_000, _bundles(tmp_path, "a", dtype="int8")
    assert _plan(bundles, cores=1).shapes == first
    assert _plan(bundles, cores=3).shapes == first + 2 * _PRODUCTS * (430_000 + 20 * 40_000)


def test_batches_count_cores_and_the_width_of_the_model(tmp_path: Path) -> None:
    assert _plan(_bundles(tmp_path, "a"), cores=4).batches == 4 * 512 * _WIDTH * 80


def test_models_share_process_batches_and_lone_graphs(tmp_path: Path) -> None:
    one = _plan(_bundles(tmp_path / "one", "a"))
    two = _plan(_bundles(tmp_path / "two", "a", "b"))
    assert (two.process, two.batches, two.lone_graphs) == (one.process, one.batches, one.lone_graphs)
    assert (two.weights, two.graphs, two.shapes) == (2 * one.weights, 2 * one.graphs, 2 * one.shapes)


def test_lone_graphs_take_what_the_setting_says(tmp_path: Path) -> None:
    bundles = _bundles(tmp_path, "a")
    assert _plan(bundles).lone_graphs == 128 * _MIB
    assert _plan(bundles, lone_graph_bytes=0).lone_graphs == 0


def test_models_that_make_room_for_others_count_as_many_as_there_is_room_for(tmp_path: Path) -> None:
    bundles = _bundles(tmp_path, "a", "b", "c")
    one = _plan(bundles[:1])
    on_demand = _plan(bundles, models_on_demand=True, max_model_memory_bytes=2 * one.weights)
    assert (on_demand.weights, on_demand.graphs) == (2 * one.weights, 2 * one.graphs)


def test_weights_for_a_device_pass_through_the_host_one_model_after_the_other(tmp_path: Path) -> None:
    bundles = _bundles(tmp_path, "a", "b", backend="neuronx")
    assert _plan(bundles).weights == _plan(bundles[:1]).weights
    assert _plan(bundles).graphs == 0


def test_a_limit_below_the_formula_is_told_with_its_parts(tmp_path: Path) -> None:
    bundles = _bundles(tmp_path, "a")
    settings = EngineSettings(cores=2)
    total = plan_memory(bundles, settings).total
    assert memory_shortage(bundles, settings, None) == memory_shortage(bundles, settings, total) == ""
    shortage = memory_shortage(bundles, settings, total - 1)
    assert f"may take {-(-total // _MIB)} MiB (process 160, lone graphs 128, graphs 3" in shortage
    assert "lower lone_graph_bytes" in shortage
