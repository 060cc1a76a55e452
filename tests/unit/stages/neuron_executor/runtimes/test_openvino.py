"""stages/neuron_executor/runtimes/openvino.py: the one engine of a process, and the graphs that it reads."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import openvino
import pytest
import torch
from openvino import opset13 as opset

from neuronpipe.core.tensors import Array
from neuronpipe.stages.neuron_executor.runtimes import openvino as module
from neuronpipe.stages.neuron_executor.runtimes.openvino import (
    computable,
    engine,
    look_up_first,
    read,
    traced,
    warn_of_float32,
)

_THREADS_BEGIN = """
import sys, threading
from neuronpipe.stages.neuron_executor.runtimes.openvino import engine, openvino

engine()
sys.setswitchinterval(1e-6)
together = threading.Barrier(6)

def begin():
    together.wait()
    openvino.Type.f32.to_dtype()

threads = [threading.Thread(target=begin) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


def test_threads_whose_first_batches_come_at_once_do_not_wait_for_each_other_for_ever() -> None:
    # Without the engine's care six in ten processes hang.
    for _ in range(4):
        subprocess.run([sys.executable, "-c", _THREADS_BEGIN], check=True, timeout=60)


class _Layer(torch.nn.Module):
    """A layer as in decoders and ModernBERT, whose activation is a gate, or the usual layer of two matrices."""

    def __init__(self, *, is_gated: bool) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(256)
        self.gate, self.up, self.down = (
            torch.nn.Linear(*sizes, bias=False) for sizes in ((256, 512),) * 2 + ((512, 256),)
        )
        self.is_gated = is_gated

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        inner = self.norm(tokens)
        active = torch.nn.functional.silu(self.gate(inner))
        made: torch.Tensor = self.down(active * self.up(inner) if self.is_gated else active)
        return tokens + made


def _layer(*, is_gated: bool) -> openvino.Model:
    torch.manual_seed(50)
    return traced(_Layer(is_gated=is_gated).eval(), torch.zeros(1, 3, 256))


_BFLOAT16 = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}


@pytest.mark.parametrize(
    ("is_gated", "has_amx", "streams", "threads", "expected"),
    [
        (True, True, "2", "2", {"NUM_STREAMS": "1"}),
        (True, True, "3", "4", {"NUM_STREAMS": "2"}),
        (True, True, "1", "2", {}),
        (True, True, "1", "1", {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}),
        (True, False, "2", "2", {}),
        (False, True, "2", "2", {}),
    ],
)
def test_a_stream_of_gated_layers_in_bfloat16_has_two_threads(
    is_gated: bool, has_amx: bool, streams: str, threads: str, expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_bfloat16", lambda: True)
    monkeypatch.setattr(module, "_has_amx", lambda: has_amx)
    given = {**_BFLOAT16, "NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": threads}
    assert computable(given, [_layer(is_gated=is_gated)]) == given | expected


@pytest.mark.parametrize(("has_bfloat16", "reason"), [(True, "one thread"), (False, "no bfloat16 instructions")])
def test_a_model_that_computes_in_float32_is_named_with_the_reason(
    has_bfloat16: bool, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(module, "_has_amx", lambda: True)
    used = computable({**_BFLOAT16, "INFERENCE_NUM_THREADS": "1"}, [_layer(is_gated=True)])
    warn_of_float32("gated", _BFLOAT16, used)
    warn_of_float32("plain", _BFLOAT16, _BFLOAT16)
    (warning,) = caplog.records
    assert reason in warning.getMessage()
    assert warning.__dict__["fields"] == {"model": "gated"}


@pytest.mark.parametrize("streams", ["1", "2"])
def test_gated_layers_are_computed_with_any_threads(streams: str) -> None:
    # With AMX and one thread, OpenVINO would end the process.
    model = _layer(is_gated=True)
    tokens = np.random.default_rng(2).standard_normal((1, 3, 256), np.float32)
    for threads in ("1", "2"):
        if int(streams) > int(threads):
            continue
        given = {**_BFLOAT16, "NUM_STREAMS": streams, "INFERENCE_NUM_THREADS": threads}
        found = engine().compile_model(model, "CPU", computable(given, [model]))(tokens)[0]
        exact = engine().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(tokens)[0]
        np.testing.assert_allclose(found, exact, rtol=0, atol=0.05 * float(np.abs(exact).max()))


_ROWS, _WIDTH, _SHAPE = 600, 64, (3, 9)
_TYPES: dict[type, str] = {np.int8: "i8", np.uint8: "u8"}
_BY_ROW, _FOR_ALL = (_ROWS, 1), (1, 1)


def _quantized(parameter: openvino.Node) -> openvino.Node:
    return opset.fake_quantize(parameter, *(opset.constant(np.float32(limit)) for limit in (-3, 3, -3, 3)), 256)


def _graph(
    dtype: type,
    scale_shape: tuple[int, int],
    zero_shape: tuple[int, int] | None = None,
    *,
    is_tied: bool = False,
    has_quantizers: bool = True,
) -> openvino.Model:
    """An encoder's begin: adds rows of a table and given vectors up, and multiplies the sums by a matrix.

    If the table is tied, the result is also multiplied by the table. The sums are an output, too.
    """
    generator, limits = np.random.default_rng(20261128), np.iinfo(dtype)

    def quantized(shape: tuple[int, int]) -> openvino.Node:
        values: Array = generator.integers(limits.min, limits.max, shape, endpoint=True).astype(dtype)
        return opset.convert(opset.constant(values), "f32")

    table = quantized((_ROWS, _WIDTH))
    if zero_shape:
        table = opset.subtract(table, quantized(zero_shape))
    table = opset.multiply(table, opset.constant(generator.uniform(0.01, 0.02, scale_shape).astype(np.float32)))
    ids, vectors = opset.parameter([-1, -1], np.int64), opset.parameter([-1, -1, _WIDTH], np.float32)
    sums = opset.add(opset.gather(table, opset.convert(ids, "i32"), opset.constant(np.int32(0))), vectors)
    found = opset.mvn(sums, opset.constant(np.array([2])), True, 1e-12, "inside_sqrt")
    weights = opset.multiply(quantized((_WIDTH, _WIDTH)), opset.constant(np.full((_WIDTH, 1), 1e-3, np.float32)))
    for matrix in (weights, table) if is_tied else (weights,):
        found = opset.matmul(_quantized(found) if has_quantizers else found, matrix, False, True)
    graph = openvino.Model([opset.result(sums), opset.result(found)], [ids, vectors])
    for port, name in zip([*graph.inputs, *graph.outputs], ("ids", "vectors", "sums", "scores"), strict=True):
        port.get_tensor().set_names({name})
    return graph


def _computed(graph: openvino.Model, *, has_fixed_shape: bool) -> tuple[Array, Array, set[str]]:
    """The sums and the scores, and the types in which the compiled graph holds tables."""
    generator, graph = np.random.default_rng(7), graph.clone()
    if has_fixed_shape:
        graph.reshape({"ids": list(_SHAPE), "vectors": [*_SHAPE, _WIDTH]})
    compiled = engine().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    vectors = generator.standard_normal((*_SHAPE, _WIDTH)).astype(np.float32)
    outputs = compiled({"ids": generator.integers(0, _ROWS, _SHAPE), "vectors": vectors})
    nodes = compiled.get_runtime_model().get_ops()
    constants = (node.output(0) for node in nodes if node.get_rt_info()["layerType"].astype(str) == "Const")
    tables = (constant for constant in constants if list(constant.get_shape()) == [_ROWS, _WIDTH])
    held = {table.get_element_type().get_type_name() for table in tables}
    return outputs["sums"].copy(), outputs["scores"].copy(), held


@pytest.mark.parametrize("has_fixed_shape", [False, True], ids=["any shape", "fixed shape"])
@pytest.mark.parametrize("is_tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("zero_shape", [None, _FOR_ALL, _BY_ROW], ids=["", "zero point", "zero points by row"])
@pytest.mark.parametrize("dtype", _TYPES, ids=_TYPES.values())
def test_rows_of_a_table_with_a_scale_for_each_row_are_looked_up_and_then_dequantized(
    dtype: type, zero_shape: tuple[int, int] | None, is_tied: bool, has_fixed_shape: bool
) -> None:
    graph = _graph(dtype, _BY_ROW, zero_shape, is_tied=is_tied)
    expected_sums, expected, held = _computed(graph, has_fixed_shape=has_fixed_shape)
    assert "f32" in held, "OpenVINO looks rows up first by itself, so look_up_first is not needed any more"
    look_up_first(graph)
    sums, scores, held = _computed(graph, has_fixed_shape=has_fixed_shape)
    assert held == {_TYPES[dtype]}
    np.testing.assert_array_equal(sums, expected_sums)
    # OpenVINO 2026.4 multiplies by weights with such zero points in another way unless it dequantizes them as a whole:
    # it quantizes the vectors to 8 bits in groups, which changes scores by up to 1 % of the largest one.
    is_multiplied_otherwise = is_tied and dtype == np.uint8 and zero_shape == _BY_ROW
    tolerance = 0.02 * np.abs(expected).max() if is_multiplied_otherwise else 0
    np.testing.assert_allclose(scores, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize(
    ("scale_shape", "has_quantizers"),
    [(_FOR_ALL, True), (_BY_ROW, False), (_FOR_ALL, False)],
    ids=["a scale for all rows", "no quantized activations", "neither"],
)
@pytest.mark.parametrize("dtype", _TYPES, ids=_TYPES.values())
def test_a_graph_stays_as_it_is_if_openvino_looks_up_rows_first_by_itself(
    dtype: type, scale_shape: tuple[int, int], has_quantizers: bool
) -> None:
    graph = _graph(dtype, scale_shape, _FOR_ALL, has_quantizers=has_quantizers)
    operations = [one.get_name() for one in graph.get_ops()]
    look_up_first(graph)
    assert [one.get_name() for one in graph.get_ops()] == operations
    for has_fixed_shape in (False, True):
        *_, held = _computed(graph, has_fixed_shape=has_fixed_shape)
        assert held == {_TYPES[dtype]}


def test_a_file_with_a_table_that_is_dequantized_as_a_whole_is_changed_as_it_is_read(tmp_path: Path) -> None:
    """As the files of bundles of earlier versions are."""
    graph, file = _graph(np.int8, _BY_ROW), tmp_path / "model.xml"
    openvino.save_model(graph, file, compress_to_fp16=False)
    *expected, _ = _computed(graph, has_fixed_shape=False)
    *outputs, held = _computed(read(file), has_fixed_shape=False)
    assert held == {"i8"}
    np.testing.assert_array_equal(outputs, expected)


def test_a_table_that_is_looked_up_and_multiplied_is_in_the_file_once(tmp_path: Path) -> None:
    graph = _graph(np.int8, _BY_ROW, is_tied=True)
    look_up_first(graph)
    openvino.save_model(graph, tmp_path / "model.xml", compress_to_fp16=False)
    assert (tmp_path / "model.bin").stat().st_size < 1.5 * _ROWS * _WIDTH


def test_an_output_that_is_looked_up_keeps_its_name() -> None:
    graph = _graph(np.int8, _BY_ROW)
    (gather,) = (one for one in graph.get_ops() if one.get_type_name() == "Gather")
    gather.output(0).get_tensor().set_names({"rows"})
    graph.add_outputs(gather.output(0))
    look_up_first(graph)
    assert [port.any_name for port in graph.outputs] == ["sums", "scores", "rows"]
