"""OpenVINO without its telemetry, the only engine of this process, and the graphs that it reads."""

import functools
import logging
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# OpenVINO reports imports and conversions over the network. Without its telemetry package it uses the stub in
# openvino/tools/ovc/telemetry_stub.py. The documented opt-out, `opt_in_out --opt_out`, writes to the user's home.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402
from openvino import opset13  # noqa: E402
from openvino._offline_transformations import (  # noqa: E402
    apply_make_stateful_transformation,
    paged_attention_transformation,
)

from neuronpipe.core.logs import log_warning  # noqa: E402
from neuronpipe.stages.neuron_executor.runtimes.host import available_cpus  # noqa: E402

__all__ = [
    "PRECISION",
    "STACKS_FILE",
    "apply_make_stateful_transformation",
    "compute",
    "engine",
    "has_bfloat16",
    "look_up_first",
    "openvino",
    "opset13",
    "paged_attention_transformation",
    "read",
    "traced",
    "warn_of_float32",
    "with_stacks",
]


# The property with the data type in which a graph computes.
PRECISION = "INFERENCE_PRECISION_HINT"


@functools.cache
def engine() -> openvino.Core:
    """Returns the only engine of this process, which is never freed.

    In OpenVINO 2026.4, each engine sets a signal stack for its CPU plugin, and later restores the stack that it found.
    So engines that are not freed in the reverse order of their creation leave the thread with a freed signal stack, and
    the next signal ends the process.
    """
    core = openvino.Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin before other engines do, such as NNCF's
    # In 2026.4, two threads deadlock if both use the table of dtypes for the first time: one thread holds the
    # interpreter's lock and waits for the table, the other builds the table and waits for the lock.
    openvino.Type.f32.to_dtype()
    return core


def read(path: Path) -> openvino.Model:
    """Reads the graph of a file, and changes it by `look_up_first`. Raises RuntimeError.

    The weights stay in the file, and all graphs that are compiled from it share them.
    """
    model = with_stacks(engine().read_model(path), path)
    look_up_first(model)
    return model


# The file beside a graph with its adapters, whose stacks the graph has as inputs (compiler/stacked_adapters.py).
STACKS_FILE = "adapters.npz"


def with_stacks(model: openvino.Model, path: Path) -> openvino.Model:
    """Replaces the inputs of a graph that are stacks of adapters by the stacks, which lie beside the graph's file."""
    if not (path.parent / STACKS_FILE).is_file():
        return model
    with np.load(path.parent / STACKS_FILE) as stacks:
        for parameter in model.get_parameters():
            if (name := parameter.output(0).any_name) in stacks:
                parameter.output(0).replace(opset13.constant(stacks[name]).output(0))
                model.remove_parameter(parameter)
    model.validate_nodes_and_infer_types()
    return model


def look_up_first(model: openvino.Model) -> None:
    """Looks up the rows of tables of 8 bits before they are dequantized. Each row stays the same to the bit.

    In a graph with quantized activations, OpenVINO 2026.4 dequantizes a table as a whole if each row has its own scale.
    Every compiled graph then takes another 768 MB, with 250,000 rows of 768 numbers. OpenVINO itself looks up rows of
    other tables first.
    """
    operations = model.get_ops()
    if not any(operation.get_type_name() == "FakeQuantize" for operation in operations):
        return
    for gather in operations:
        if gather.get_type_name() != "Gather" or not _is_dequantized_by_row(gather):
            continue
        # The limits change no number. Without them OpenVINO fuses the last product with a sum behind it if shapes are
        # fixed. A fused sum is rounded once instead of twice, and a quantizer behind it may take another step:
        # outputs of MiniLM then differed by up to 5e-3 (2026-11-28).
        largest = float(np.finfo(np.float32).max)
        rows = opset13.clamp(_looked_up(gather.input_value(0), gather), -largest, largest)
        rows.set_friendly_name(gather.get_friendly_name())
        gather.output(0).replace(rows.output(0))
    model.validate_nodes_and_infer_types()


def _is_dequantized_by_row(gather: openvino.Node) -> bool:
    """Returns whether an operation looks up rows of an 8-bit table that is dequantized by a scale for each row."""
    table, *scales = _constants(gather.input_value(0)) or [None]
    axis = gather.input_value(2).get_node()
    return (
        table is not None
        and table.get_output_element_type(0) in (openvino.Type.i8, openvino.Type.u8)
        and any(_is_by_row(scale, gather) for scale in scales)
        and axis.get_type_name() == "Constant"
        and not axis.data.any()
    )


def _constants(value: openvino.Output) -> list[openvino.Node]:
    """Finds the constants from which a value is dequantized, the quantized constant first; empty for other values."""
    node = value.get_node()
    if node.get_type_name() == "Constant":
        return [node]
    if node.get_type_name() not in ("Convert", "Subtract", "Multiply"):
        return []
    by_input = [_constants(value) for value in node.input_values()]
    return [constant for constants in by_input for constant in constants] if all(by_input) else []


def _is_by_row(constant: openvino.Node, gather: openvino.Node) -> bool:
    """Returns whether a constant has a row for each row of the table. OpenVINO handles a table of one row by itself."""
    shape, table = list(constant.shape), list(gather.get_input_shape(0))
    return len(shape) == len(table) and shape[0] == table[0] > 1


def _looked_up(value: openvino.Output, gather: openvino.Node) -> openvino.Output:
    """Looks up rows of a dequantized table, as `gather` does: takes the rows of its constants, and dequantizes them."""
    node = value.get_node()
    if node.get_type_name() == "Constant":
        indices, axis = gather.input_value(1), gather.input_value(2)
        return opset13.gather(value, indices, axis).output(0) if _is_by_row(node, gather) else value
    inputs = [_looked_up(value, gather) for value in node.input_values()]
    if node.get_type_name() == "Convert":
        return opset13.convert(*inputs, node.get_output_element_type(0)).output(0)
    return (opset13.subtract if node.get_type_name() == "Subtract" else opset13.multiply)(*inputs).output(0)


def traced(module: Any, example: Any, **options: Any) -> openvino.Model:
    """Traces a PyTorch module for the compiler, which compares the graph's outputs. `options`: for convert_model.

    PyTorch's own comparison is off: it would trace the module again, which took a fifth of the time to compile.
    """
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder  # imports torch

    decoder = TorchScriptPythonDecoder(module, example_input=example, trace_kwargs={"check_trace": False})
    return convert_model(decoder, **options)


def convert_model(source: Any, **options: Any) -> openvino.Model:
    """Calls openvino.convert_model, and keeps the root logger as it is.

    A conversion that fails leaves the root logger of OpenVINO 2026.4 at ERROR, and warnings of this process were lost.
    """
    logger = logging.getLogger()
    level, filters, handlers = logger.level, [*logger.filters], [*logger.handlers]
    try:
        return openvino.convert_model(source, **options)
    finally:
        logger.setLevel(level)
        logger.filters[:], logger.handlers[:] = filters, handlers


def compute(request: openvino.InferRequest, inputs: Mapping[str, NDArray[Any]]) -> None:
    """Computes a request, whose inputs must stay in their memory until it gets other inputs. Raises RuntimeError.

    Python's `infer` with a dictionary checks and copies, which took a tenth of the time of a step with one token.
    """
    for name, array in inputs.items():
        request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
    request.start_async()
    request.wait()


def has_bfloat16() -> bool:
    return "BF16" in engine().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def computable(properties: Mapping[str, str], models: Iterable[openvino.Model]) -> dict[str, str]:
    """Returns the properties with which this CPU can compute graphs that are compiled with `properties`.

    - Without bfloat16 instructions, graphs compute in float32. With AVX-512, OpenVINO 2026.4 would emulate bfloat16,
      which took 20 times as long as float32 (MiniLM, one text).
    - With AMX, OpenVINO 2026.4 divides a gated layer in bfloat16 between pairs of threads. With one thread it divides
      by zero, which ends the process. So a stream gets two threads; with one thread, graphs compute in float32.
    """
    made = dict(properties)
    if not has_bfloat16():
        return _in_float32(made)
    if made.get(PRECISION) == "bf16" and _has_amx() and any(map(_has_gated_layer, models)):
        threads = int(made.get("INFERENCE_NUM_THREADS", 0)) or available_cpus()
        if threads < 2:
            return _in_float32(made)
        if int(made.get("NUM_STREAMS", 1)) > threads // 2:
            made["NUM_STREAMS"] = str(threads // 2)
    return made


def warn_of_float32(model_name: str, asked: Mapping[str, str], used: Mapping[str, str]) -> None:
    """Logs why a model computes in float32 instead of bfloat16, if it does. `used`: see computable."""
    if asked.get(PRECISION) == "bf16" != used[PRECISION]:
        one_thread = "OpenVINO cannot compute gated layers in bfloat16 with one thread"
        reason = one_thread if has_bfloat16() else "this CPU has no bfloat16 instructions"
        log_warning(f"{reason}; the model computes in float32", model=model_name)


def _in_float32(properties: Mapping[str, str]) -> dict[str, str]:
    return {name: "f32" if value == "bf16" else value for name, value in properties.items()}


@functools.cache
def _has_amx() -> bool:
    try:
        return "amx_bf16" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux
        return False


def _has_gated_layer(model: openvino.Model) -> bool:
    """Returns whether an activation is multiplied with another output, as in SwiGLU and GeGLU."""
    activations = (node for node in model.get_ops() if node.get_type_name() in ("Swish", "Gelu"))
    users = (port.get_node() for node in activations for port in node.output(0).get_target_inputs())
    return any(user.get_type_name() == "Multiply" for user in users)
