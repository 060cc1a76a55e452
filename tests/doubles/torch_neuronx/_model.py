"""A compiled model: a genuine ScriptModule whose one operation runs in Python, where the contract is enforced.

The operation is this package's, so a file cannot be read without importing it; what a model is travels in the file as a
buffer.
"""

import itertools
import json
import os
import threading
import time
import warnings
from typing import Any

import torch

from torch_neuronx import _placement, _runtime
from torch_neuronx._versions import VERSION, ordered

_DTYPES = {
    str(dtype): dtype for dtype in (torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.float16, torch.bool)
}
_INT32 = torch.iinfo(torch.int32)
# What copying separated weights costs a call until they are moved to the device.
_COPY_S = 0.005

_models: dict[int, "Model"] = {}
_numbers = itertools.count(1)
_library = torch.library.Library("neuron_double", "DEF")
_library.define("execute(Tensor handle, Tensor[] inputs) -> Tensor[]")


class Model:
    """What the runtime knows of a loaded model."""

    def __init__(self, module: Any, stamp: dict[str, Any]) -> None:
        self.module = module
        self.stamp = stamp
        self.cores: list[_runtime.Core] = []
        self.is_moved = False
        # The program's parameters that are states are on the core once the model is moved there.
        self._has_states = False
        self._compiled: dict[str, torch.Tensor] | None = None
        self._turn = itertools.count()
        self._lock = threading.Lock()
        self._loading: threading.Thread | None = None
        self._pending: tuple[int, int, bool] | None = None

    def load(self, start: int, count: int, *, is_multicore: bool = False) -> None:
        """Puts the weights on cores."""
        runtime = _runtime.runtime()
        cores = runtime.cores if is_multicore else runtime.place(start, count)
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
        self._has_states = self.is_moved = True

    def _parameters(self) -> dict[str, torch.Tensor]:
        """Those of the program that are states."""
        named = {name.removeprefix("func."): one for name, one in self.module.neuron_program.named_parameters()}
        return {name: named[name] for name in self.stamp["aliases"]}

    def begin_load(self, start: int, count: int, is_multicore: bool) -> None:
        """Loads now, in a thread, or with the first call: as the file says."""
        if self.stamp["lazy"]:
            self._pending = (start, count, is_multicore)
        elif self.stamp["async"]:
            self._loading = threading.Thread(
                target=self.load, args=(start, count), kwargs={"is_multicore": is_multicore}
            )
            self._loading.start()
        else:
            self.load(start, count, is_multicore=is_multicore)

    def execute(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Checks the contract and runs on the next of its cores."""
        with self._lock:
            if self._loading:
                self._loading.join()
            if not self.cores:
                if self._pending is None:
                    raise RuntimeError(
                        "the model was compiled without a device and is on none; load it where there is one"
                    )
                start, count, is_multicore = self._pending
                self.load(start, count, is_multicore=is_multicore)
        _runtime.runtime()
        if self.stamp["aliases"] and not self._has_states:
            raise RuntimeError("(made up) the states are not on the core; call move_trace_to_device")
        if not self.stamp["inline"] and not self.is_moved:
            time.sleep(_COPY_S)
        if self.stamp["dynamic"]:
            return self._execute_chunks(inputs)
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

    def _execute_chunks(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        kind = {"ValueError": ValueError, "RuntimeError": RuntimeError}[
            os.environ.get("NEURON_DOUBLE_DYNAMIC_BATCH_ERROR", "ValueError")
        ]
        if len({tensor.shape[0] for tensor in inputs}) != 1:
            raise kind("Inconsistent batch sizes found on inputs")
        for tensor, (shape, _) in zip(inputs, self.stamp["inputs"], strict=True):
            if list(tensor.shape[1:]) != shape[1:]:
                raise kind(
                    f"incorrect shape found on an input: {list(tensor.shape)}, expected {shape} but for the batch"
                )
        rows, size = inputs[0].shape[0], self.stamp["inputs"][0][0][0]
        parts = []
        for first in range(0, rows, size):
            chunk = [tensor[first : first + size] for tensor in inputs]
            missing = size - chunk[0].shape[0]
            padded = [torch.cat([tensor, tensor.new_zeros((missing, *tensor.shape[1:]))]) for tensor in chunk]
            self._check(padded)
            parts.append([output[: size - missing] for output in self._execute(padded)])
        return [torch.cat(outputs) for outputs in zip(*parts, strict=True)]


def _execute(handle: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    model = _models.get(int(handle))
    if model is None:
        raise RuntimeError("the model was not loaded by this process's runtime")
    return model.execute(inputs)


_library.impl("execute", _execute, "CompositeExplicitAutograd")


class Compiled(torch.nn.Module):
    """What is traced and saved: the handle of the loaded model, what the model is, and the program."""

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
    """What a compiled model is."""
    stamp: dict[str, Any] = json.loads(bytes(module.neuron_stamp.tolist()))
    return stamp


def register(module: Any) -> Model:
    """Makes a compiled module known to the operation."""
    number = next(_numbers)
    model = _models[number] = Model(module, read_stamp(module))
    module.neuron_handle.fill_(number)
    return model


def model_of(module: Any) -> Model | None:
    """The loaded model behind a module; None for what was not compiled."""
    return _models.get(int(module.neuron_handle)) if hasattr(module, "neuron_handle") else None


def placed(module: Any) -> Any:
    """A module that was read from a file, on the cores that the context around its load says."""
    if ordered(read_stamp(module)["version"]) > ordered(VERSION):
        raise RuntimeError("Could not load the model status=2 message=Invalid")
    register(module).begin_load(*_placement.current())
    return module


def _rewrite(module: Any, **changes: Any) -> Any:
    model = model_of(module)
    if model is None:
        raise TypeError(f"{type(module).__name__} was not compiled")
    model.stamp = model.stamp | changes
    module.neuron_stamp = _to_buffer(model.stamp)
    return module


def dynamic_batch(neuron_script: Any) -> Any:
    """In place, and the same object."""
    model = model_of(neuron_script)
    if model is not None and model.stamp["aliases"]:
        raise RuntimeError("(made up) a model with states has one batch size")
    return _rewrite(neuron_script, dynamic=True)


def lazy_load(trace: Any, enable_lazy_load: bool = True) -> None:
    """From the next load of the saved model on."""
    _rewrite(trace, lazy=enable_lazy_load)


def async_load(trace: Any, enable_async_load: bool = True) -> None:
    """From the next load of the saved model on."""
    _rewrite(trace, **{"async": enable_async_load})


def move_trace_to_device(trace: Any, device_id: int) -> None:
    """Moves separated weights, and states."""
    model = model_of(trace)
    if model is not None:
        model.move(device_id)


def replace_weights(neuron_model: Any, weights: Any) -> None:
    """In place, and only where weights were separated."""
    model = model_of(neuron_model)
    if model is None or model.stamp["inline"]:
        warnings.warn(
            "the weights are inside the NEFF; trace with inline_weights_to_neff=False to replace them", stacklevel=2
        )
        return
    state = weights.state_dict() if isinstance(weights, torch.nn.Module) else weights
    model.module.neuron_program.load_state_dict(dict(state), strict=False)
