"""A back end without a model, for tests and for measurements without a model. It is deterministic and hostile.

The outputs of a row depend only on its own tokens, so tests detect rows that are mixed up or cut wrongly. All outputs
on padding are NaN, so tests detect padding that is not cut off. Inputs that break the contract of Backend raise, and so
do tokens that a test chose.
"""

import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType

import numpy as np

from neuronpipe.bundles.buckets import BucketPlan
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends.base import BackendError, BackendRequest, Finish, Prepare, ResultT
from neuronpipe.stages.neuron_executor.shapes import BatchShape, ShapeMenu
from neuronpipe.tasks.inputs.kind import input_kind


class EveryShape(ShapeMenu):
    """Any shape. Lengths are one token longer than requested, so that there is always padding to cut."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._image_length = 0

    def round_tokens(self, tokens: int) -> int:
        return min(tokens + 1, self._max_tokens)

    def most_rows(self, tokens: int) -> int:
        return sys.maxsize

    def rows_within(self, rows: int, tokens: int) -> int:
        return rows

    def rows_for(self, rows: int, tokens: int) -> int:
        return rows

    def planned(self, cores: int, max_rows: int, max_batch_tokens: int) -> list[BatchShape]:
        return []


class FakeBackend:
    """See Backend.

    Properties: `device_time_s` is the time of a batch. `device_times_ms` are the times of batches in each bucket, such
    as 1x128:1.0,8x128:6.0; a core computes its batches one after the other. A batch with a `failing_token_id` raises, a
    batch with an `endless_token_id` never ends, and a row with a `nan_token_id` is NaN.
    """

    part_ns: Sequence[int] = ()
    lone_graphs: Mapping[int, int] = MappingProxyType({})

    def __init__(self, request: BackendRequest) -> None:
        self._spec = request.spec
        self.cores = request.cores or 1
        self.in_flight = request.in_flight
        self.shapes: BucketPlan | ShapeMenu = (
            BucketPlan(request.buckets) if request.buckets else EveryShape(request.spec.max_tokens)
        )
        self._device_time_s = float(request.properties.get("device_time_s", "0"))
        self._failing_token_id = int(request.properties.get("failing_token_id", "-1"))
        self._endless_token_id = int(request.properties.get("endless_token_id", "-1"))
        self._nan_token_id = int(request.properties.get("nan_token_id", "-1"))
        table = (entry.split(":") for entry in request.properties.get("device_times_ms", "").split(",") if entry)
        self._device_times_s = {bucket: float(time_ms) / 1000 for bucket, time_ms in table}
        # A thread for each core: event loops have timers in milliseconds, and a device is precise to microseconds.
        self._devices = [ThreadPoolExecutor(max_workers=1) for _ in range(self.cores if self._device_times_s else 0)]
        self._kind = input_kind(request.spec)

    async def run(self, core: int, prepare: Prepare, finish: Finish[ResultT], *, is_alone: bool = False) -> ResultT:
        """See Backend. Needs no thread, because its batches are small."""
        return finish(await self.compute(core, prepare(), is_alone=is_alone))

    async def compute(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        self._check(core, inputs)
        token_ids, mask = self._numbers(inputs)
        if self._device_time_s:
            await asyncio.sleep(self._device_time_s)
        if self._devices and isinstance(self.shapes, BucketPlan):
            seconds = self._device_times_s[str(self.shapes.find(*self._kind.shape_of(inputs)))]
            await asyncio.get_running_loop().run_in_executor(self._devices[core], time.sleep, seconds)
        if self._failing_token_id >= 0 and (token_ids == self._failing_token_id).any():
            raise BackendError("a token that the test chose")
        if self._endless_token_id >= 0 and (token_ids == self._endless_token_id).any():
            await asyncio.get_running_loop().create_future()
        outputs = {
            output.name: self._output(index, output.axes, token_ids, mask)
            for index, output in enumerate(self._spec.outputs)
        }
        if self._nan_token_id >= 0:
            poisoned = (token_ids == self._nan_token_id).any(axis=1)
            for output in outputs.values():
                output[poisoned] = np.nan
        return outputs

    def close(self) -> None:
        for device in self._devices:
            device.shutdown(wait=True, cancel_futures=True)

    def _numbers(self, inputs: Arrays) -> tuple[Array, Array]:
        """Returns the token ids and the mask. An image has its levels, without padding."""
        if "input_ids" in inputs:
            return inputs["input_ids"], inputs["attention_mask"].astype(bool)
        (pixels,) = inputs.values()
        levels = pixels.reshape(len(pixels), -1).astype(np.int64)
        return levels, np.ones(levels.shape, bool)

    def _check(self, core: int, inputs: Arrays) -> None:
        problems = []
        if not 0 <= core < self.cores:
            problems.append(f"core {core} of {self.cores}")
        if tuple(inputs) != self._spec.inputs:
            problems.append(f"inputs {tuple(inputs)}, expected {self._spec.inputs}")
        else:
            problems += self._problems_of_tokens(inputs) if "input_ids" in inputs else self._problems_of_pixels(inputs)
        if problems:
            raise BackendError("; ".join(problems))

    def _problems_of_pixels(self, inputs: Arrays) -> list[str]:
        (expected,), (array,) = self._kind.shortest().values(), inputs.values()
        is_right = (array.dtype, array.shape[1:]) == (expected.dtype, expected.shape)
        return [] if is_right else [f"{array.dtype}{array.shape}"]

    def _problems_of_tokens(self, inputs: Arrays) -> list[str]:
        problems = []
        shape, mask = inputs["input_ids"].shape, inputs["attention_mask"]
        if (
            any(array.dtype != np.int64 or array.shape != shape for array in inputs.values())
            or shape[1] > self._spec.max_tokens
        ):
            problems.append(
                f"shapes {[array.shape for array in inputs.values()]}, dtypes "
                f"{[array.dtype for array in inputs.values()]}"
            )
        elif isinstance(self.shapes, BucketPlan) and (
            self.shapes.find(*shape) is None or self.shapes.round_tokens(shape[1]) != shape[1]
        ):
            problems.append(f"shape {shape}, the buckets are {', '.join(map(str, self.shapes.buckets))}")
        elif not mask[:, 0].all():
            problems.append("a row without a first token")
        elif ((inputs["input_ids"] != self._spec.pad_token_id) & (mask == 0)).any():
            problems.append("padding with another id than the pad token's")
        return problems

    def _output(self, index: int, axes: tuple[int | str, ...], token_ids: Array, mask: Array) -> Array:
        placed = token_ids * mask * np.arange(1, token_ids.shape[1] + 1)
        if axes == ("tokens",):
            return np.where(mask, np.sin(placed + index), np.nan).astype(np.float32)
        (width,) = (axis for axis in axes if isinstance(axis, int))
        if axes[0] == "tokens":
            angles = (placed + index)[..., np.newaxis] * (np.arange(1, width + 1) / width)
            per_token: Array = np.where(mask[..., np.newaxis], np.sin(angles), np.nan).astype(np.float32)
            return per_token
        # A row's fingerprint: its tokens weighted by their positions, as angles of different frequencies.
        fingerprint = placed.sum(axis=1, keepdims=True)
        outputs: Array = np.sin(fingerprint * (np.arange(1, width + 1) / width)).astype(np.float32)
        return outputs
