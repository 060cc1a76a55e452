"""OpenVINO without its telemetry, and the one engine of this process."""

import functools
import sys
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

# OpenVINO reports imports and conversions over the network unless its package for that is missing; then it uses the
# stub in openvino/tools/ovc/telemetry_stub.py. The documented opt-out, `opt_in_out --opt_out`, writes to the user's
# home.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402
from openvino import opset13  # noqa: E402
from openvino._offline_transformations import (  # noqa: E402
    apply_make_stateful_transformation,
    paged_attention_transformation,
)

__all__ = [
    "apply_make_stateful_transformation",
    "compute",
    "engine",
    "has_bfloat16",
    "openvino",
    "opset13",
    "paged_attention_transformation",
    "traced",
]


@functools.cache
def engine() -> openvino.Core:
    """The one engine of this process, which is never freed.

    In OpenVINO 2026.4, engines that are not freed in the reverse order of their creation leave the thread with a signal
    stack that is already freed, and the next signal ends the process. (Each sets a signal stack for its CPU plugin, and
    later restores the one that it found.)
    """
    core = openvino.Core()
    core.get_property("CPU", "FULL_DEVICE_NAME")  # loads the plugin before other engines do, such as NNCF's
    # In 2026.4, two threads that first use its table of dtypes at the same time deadlock: one holds the interpreter's
    # lock and waits for the table, the other builds the table and waits for the lock.
    openvino.Type.f32.to_dtype()
    return core


def traced(module: Any, example: Any, **options: Any) -> openvino.Model:
    """The graph of a PyTorch module, for the compiler, which compares what it computes. `options`: of convert_model.

    PyTorch need not compare it, too: it would trace the module again, which took a fifth of the time to compile.
    """
    from openvino.frontend.pytorch.ts_decoder import TorchScriptPythonDecoder  # imports torch

    decoder = TorchScriptPythonDecoder(module, example_input=example, trace_kwargs={"check_trace": False})
    return openvino.convert_model(decoder, **options)


def compute(request: openvino.InferRequest, inputs: Mapping[str, NDArray[Any]]) -> None:
    """Computes a request, whose inputs must stay where they are until it gets others. Raises RuntimeError.

    Python's `infer` with a dictionary checks and copies: of a step with one token, it took a tenth of the time.
    """
    for name, array in inputs.items():
        request.set_tensor(name, openvino.Tensor(array, shared_memory=True))
    request.start_async()
    request.wait()


def has_bfloat16() -> bool:
    """Whether this CPU computes in bfloat16."""
    return "BF16" in engine().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def computable(properties: Mapping[str, str]) -> dict[str, str]:
    """The properties of a model, with float32 where this CPU does not compute in bfloat16.

    With AVX-512, OpenVINO 2026.4 would emulate bfloat16, which took 20 times as long as float32 (MiniLM, one text).
    """
    if has_bfloat16():
        return dict(properties)
    return {name: "f32" if value == "bf16" else value for name, value in properties.items()}
