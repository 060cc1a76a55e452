"""Compilation: a genuine torch.jit.trace, with everything refused that the compiler may refuse."""

import copy
import io
import os
import signal
import subprocess
import time
import warnings
from typing import Any

import torch

from torch_neuronx import _flags, _runtime
from torch_neuronx._model import Compiled, register
from torch_neuronx._versions import VERSION

_NO_TARGET = (
    "If you want to compile on CPU, please supply compiler argument target, with one of options trn1, inf2, trn1n, or "
    'trn2. Ex: "--target '
    'trn1"'
)


def trace(
    func: Any,
    example_inputs: Any,
    *_: Any,
    input_output_aliases: Any = {},  # noqa: B006 (the documented signature)
    compiler_workdir: Any = None,
    compiler_args: Any = None,
    cpu_backend: bool = False,
) -> Any:
    """See the documentation of torch_neuronx.trace. Stricter: what only draws a warning there is an error here."""
    if _:
        raise RuntimeError("arguments after example_inputs are keywords since SDK 2.15")
    inputs = _example(example_inputs)
    flags = _flags.parse(compiler_args)
    has_device = _runtime.devices() > 0
    if cpu_backend and "--target" not in flags:
        raise RuntimeError(_NO_TARGET)
    if not cpu_backend and not has_device:
        raise RuntimeError(_runtime._NO_DEVICE)
    if isinstance(func, torch.nn.Module) and func.training:
        raise RuntimeError("the module is in training mode; call eval() first")
    _compile(inputs)
    reference, program = _program(func, inputs, flags["--auto-cast"])
    aliases = _aliases(func, reference, input_output_aliases)
    stamp = {
        "version": VERSION,
        "inputs": [[list(tensor.shape), str(tensor.dtype)] for tensor in inputs],
        "flags": flags,
        "weight_bytes": sum(tensor.nbytes for tensor in program.parameters())
        + sum(tensor.nbytes for tensor in program.buffers()),
        "aliases": aliases,
    }
    keys = list(reference) if isinstance(reference, dict) else None
    module = _wrapped(Compiled(program, keys, isinstance(reference, torch.Tensor), stamp), inputs, aliases)
    model = register(module)
    if has_device and not cpu_backend:
        model.load(-1, -1)
    return module


def _aliases(func: Any, reference: Any, given: Any) -> dict[str, int]:
    """Returns the outputs that become states, by the names of the states."""
    if not isinstance(given, dict):
        raise TypeError(f"input_output_aliases: a dict, got {type(given).__name__}")
    if given and (not isinstance(func, torch.nn.Module) or not isinstance(reference, tuple)):
        raise TypeError("(made up) input_output_aliases: the states are a module's, and its outputs a tuple")
    named = {id(tensor): name for name, tensor in func.named_parameters()} if given else {}
    aliases: dict[str, int] = {}
    for state, index in given.items():
        if id(state) not in named:
            raise ValueError("(made up) input_output_aliases: a state is a parameter of the module")
        if not isinstance(index, int) or not 0 <= index < len(reference) or index in aliases.values():
            raise ValueError(f"(made up) input_output_aliases: output {index} is none, or of another state, too")
        output = reference[index]
        if output.shape != state.shape or output.dtype != state.dtype:
            raise RuntimeError(
                f"(made up) input_output_aliases: output {index} is {list(output.shape)} {output.dtype}, its state "
                f"{list(state.shape)} {state.dtype}"
            )
        aliases[named[id(state)]] = index
    return aliases


def _example(example_inputs: Any) -> tuple[torch.Tensor, ...]:
    inputs = (example_inputs,) if isinstance(example_inputs, torch.Tensor) else example_inputs
    if not isinstance(inputs, tuple) or not inputs or not all(isinstance(tensor, torch.Tensor) for tensor in inputs):
        raise TypeError(f"example_inputs: a tensor or a tuple of tensors, got {type(example_inputs).__name__}")
    if any(tensor.device.type != "cpu" for tensor in inputs):
        raise RuntimeError("example_inputs: tensors on the CPU")
    return inputs


def _compile(inputs: tuple[torch.Tensor, ...]) -> None:
    shape = "x".join(map(str, inputs[0].shape))
    _runtime.log(f"compile shape={shape}")
    os.write(1, b"....")  # the real one shows its progress there, without an end of the line
    time.sleep(float(os.environ.get("NEURON_DOUBLE_COMPILE_MS", "0")) / 1000)
    failure = _runtime.fault(f"compile-{shape}")
    if failure == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if failure == "hang":
        with subprocess.Popen(["sleep", "600"]) as compiler:
            _runtime.log(f"hang pid={compiler.pid}")
    if failure == "unsupported":
        raise NotImplementedError("the operator aten::nonzero is not supported")
    if failure:
        raise RuntimeError(f"neuronx-cc failed with {failure}")


def _program(func: Any, inputs: tuple[torch.Tensor, ...], auto_cast: str) -> tuple[Any, Any]:
    """Returns the outputs of the original, for their structure, and a trace that shares nothing with the original."""
    cast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=auto_cast != "none", cache_enabled=False)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference = func(*inputs)
        # Autocast computes only matrix multiplications in bfloat16; outputs keep their types.
        with cast:
            traced = torch.jit.trace(_Float(func) if auto_cast != "none" else func, inputs, strict=False)
    _warn_of_unused(traced, inputs)
    memory = io.BytesIO()
    torch.jit.save(traced, memory)
    memory.seek(0)
    program = _runtime._real_load(memory)
    for parameter in program.parameters():
        parameter.requires_grad_(False)
    return (dict(reference) if isinstance(reference, dict) else copy.copy(reference)), program


class _Float(torch.nn.Module):
    def __init__(self, func: Any) -> None:
        super().__init__()
        self.func = func

    def forward(self, *inputs: torch.Tensor) -> Any:
        outputs = self.func(*inputs)
        if isinstance(outputs, dict):
            return {name: _float(tensor) for name, tensor in outputs.items()}
        return _float(outputs) if isinstance(outputs, torch.Tensor) else tuple(map(_float, outputs))


def _float(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor


def _warn_of_unused(traced: Any, inputs: tuple[torch.Tensor, ...]) -> None:
    graph = traced.inlined_graph
    for index, value in enumerate(list(graph.inputs())[1:]):
        if not value.uses():
            tensor = inputs[index]
            text = f"(index={index}, shape={tensor.shape}, dtype={tensor.dtype})"
            warnings.warn(f"Received an input tensor that was unused. Tensor will be ignored. {text}", stacklevel=4)


def _wrapped(compiled: Compiled, inputs: tuple[torch.Tensor, ...], aliases: dict[str, int]) -> Any:
    """Wraps a module as a trace of its single operation. The trace must be able to run the operation once."""
    from torch_neuronx import _model

    class _Tracing(_model.Model):
        def execute(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            outputs = self.module.neuron_program(*tensors)
            arrays, states = _runtime.tensors_of(outputs), aliases.values()
            return [array.detach().clone() for index, array in enumerate(arrays) if index not in states]

    _model._models[-1] = _Tracing(compiled, {})
    compiled.neuron_handle.fill_(-1)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return torch.jit.trace(compiled, inputs, strict=False, check_trace=False)
    finally:
        del _model._models[-1]
