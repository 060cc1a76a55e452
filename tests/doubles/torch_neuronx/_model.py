"""A compiled model: a genuine ScriptModule whose one operation runs in Python, where the contract is enforced.

The operation is this package's, so a file cannot be read without importing it; what a model is travels in the file as a
buffer.
"""

import itertools
import json
import os
from typing import Any

import torch

from torch_neuronx import _placement, _runtime
from torch_neuronx._versions import VERSION, ordered

_DTYPES = {
    str(dtype): dtype for dtype in (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float16, torch.bool)
}
_INT32 = torch.iinfo(torch.int32)

_models: dict[int, "Model"] = {}
_numbers = itertools.count(1)
_library = torch.library.Library("neuron_double", "DEF")
_library.define("execute(Tensor handle, Tensor[] inputs) -> Tensor[]")


class Model:
    """A loaded model, as the runtime knows it."""

    def __init__(self, module: Any, stamp: dict[str, Any]) -> None:
        self.module = module
        self.stamp = stamp
        self.cores: list[_runtime.Core] = []
        # The program's parameters that are states are on the core once the model is moved there.
        self._has_states = False
        self._compiled: dict[str, torch.Tensor] | None = None
        self._turn = itertools.count()

    def load(self, start: int, count: int) -> None:
        """Puts the weights on cores."""
        runtime = _runtime.runtime()
        cores = runtime.place(start, count)
        if self.stamp["aliases"] and len(cores) > 1:
            raise RuntimeError("(made up) a model with states is on one core")
        is_shared = (
            os.environ.get("NEURON_RT_MULTI_INSTANCE_SHARED_WEIGHTS", "FALSE").upper() == "TRUE" and len(cores) > 1
        )
        size = self.stamp["weight_bytes"] // (len(cores) if is_shared else 1)
        if any(core.loaded_bytes + size > runtime.core_bytes for core in cores):
            raise RuntimeError("Could not load the model status=4 message=Allocation Failure")
        for core in cores:
            core.loaded_bytes += size
        self.cores = cores
        _runtime.log(f"load cores={','.join(str(core.index) for core in cores)}")

    def unload(self) -> None:
        """Takes the weights off again."""
        for core in self.cores:
            core.loaded_bytes -= self.stamp["weight_bytes"]
        self.cores, self._has_states = [], False

    def move(self, core: int) -> None:
        """Puts the model on one core, with its states as they were compiled."""
        self.unload()
        self.load(core, 1)
        states = self._parameters()
        if self._compiled is None:
            self._compiled = {name: state.clone() for name, state in states.items()}
        for name, state in states.items():
            state.copy_(self._compiled[name])
        self._has_states = True

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Returns the parameters of the program that are states."""
        named = {name.removeprefix("func."): weight for name, weight in self.module.neuron_program.named_parameters()}
        return {name: named[name] for name in self.stamp["aliases"]}

    def execute(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Checks the contract and runs on the next of its cores."""
        if not self.cores:
            raise RuntimeError("the model was compiled without a device and is on none; load it where there is one")
        _runtime.runtime()
        if self.stamp["aliases"] and not self._has_states:
            raise RuntimeError("(made up) the states are not on the core; call move_trace_to_device")
        self._check(inputs)
        return self._execute(inputs)

    def _execute(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        core, aliases = self.cores[next(self._turn) % len(self.cores)], self.stamp["aliases"]
        if not aliases:
            return core.execute(self.module.neuron_program, inputs)
        outputs = core.execute(self.module.neuron_program, inputs)
        for name, state in self._parameters().items():  # only where the program ends well
            state.copy_(outputs[aliases[name]])
        return [output for index, output in enumerate(outputs) if index not in aliases.values()]

    def _check(self, inputs: list[torch.Tensor]) -> None:
        expected = self.stamp["inputs"]
        if len(inputs) != len(expected):
            raise RuntimeError(f"(made up) {len(inputs)} inputs, expected {len(expected)}")
        for index, (tensor, (shape, dtype)) in enumerate(zip(inputs, expected, strict=True)):
            if tensor.device.type != "cpu":
                raise RuntimeError(f"(made up) input #{index} is on {tensor.device}, expected cpu")
            if list(tensor.shape) != shape:
                received, wanted = (" ".join(map(str, dims)) for dims in (tensor.shape, shape))
                raise RuntimeError(f"Incorrect tensor shape at input #{index}: received {received}, expected {wanted}")
            if tensor.dtype != _DTYPES[dtype]:
                raise RuntimeError(f"(made up) input #{index} is {tensor.dtype}, expected {dtype}")
            if (
                tensor.dtype == torch.int64
                and tensor.numel()
                and (tensor.max() > _INT32.max or tensor.min() < _INT32.min)
            ):
                raise RuntimeError(
                    f"(made up) input #{index} has values that int32 does not hold, which the device computes in"
                )


def _execute(handle: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    model = _models.get(int(handle))
    if model is None:
        raise RuntimeError("the model was not loaded by this process's runtime")
    return model.execute(inputs)


_library.impl("execute", _execute, "CompositeExplicitAutograd")


class Compiled(torch.nn.Module):
    """A traced and saved model: the handle of the loaded model, its description, and the program."""

    def __init__(self, program: Any, keys: list[str] | None, is_tensor: bool, stamp: dict[str, Any]) -> None:
        super().__init__()
        self.neuron_program = program
        self._keys, self._is_tensor = keys, is_tensor
        self.register_buffer("neuron_handle", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("neuron_stamp", _to_buffer(stamp))

    def forward(self, *inputs: torch.Tensor) -> Any:
        outputs = torch.ops.neuron_double.execute(self.neuron_handle, list(inputs))
        if self._is_tensor:
            return outputs[0]
        return tuple(outputs) if self._keys is None else dict(zip(self._keys, outputs, strict=True))


def _to_buffer(stamp: dict[str, Any]) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(stamp).encode()), dtype=torch.uint8).clone()


def read_stamp(module: Any) -> dict[str, Any]:
    """Reads the description of a compiled model."""
    stamp: dict[str, Any] = json.loads(bytes(module.neuron_stamp.tolist()))
    return stamp


def register(module: Any) -> Model:
    """Makes a compiled module known to the operation."""
    number = next(_numbers)
    model = _models[number] = Model(module, read_stamp(module))
    module.neuron_handle.fill_(number)
    return model


def model_of(module: Any) -> Model | None:
    """Returns the loaded model behind a module; None for a module that was not compiled."""
    return _models.get(int(module.neuron_handle)) if hasattr(module, "neuron_handle") else None


def placed(module: Any) -> Any:
    """Places a module that was read from a file on the cores that the context around its load names."""
    if ordered(read_stamp(module)["version"]) > ordered(VERSION):
        raise RuntimeError("Could not load the model status=2 message=Invalid")
    register(module).load(*_placement.current())
    return module


def move_trace_to_device(trace: Any, device_id: int) -> None:
    """Moves states."""
    model = model_of(trace)
    if model is not None:
        model.move(device_id)
