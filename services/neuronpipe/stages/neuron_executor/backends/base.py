"""The contract of a back end: arrays in, arrays out, for one compiled bundle. It knows no task and no network."""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from neuronpipe.bundles.buckets import Bucket, BucketPlan
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.shapes import ShapeMenu

ResultT = TypeVar("ResultT")
# Functions that run before and after the computation of a batch, in its thread: see Backend.run.
Prepare: TypeAlias = Callable[[], Arrays]
Finish: TypeAlias = Callable[[Arrays], ResultT]


class BackendError(Exception):
    """A batch could not be computed. The scheduler then runs its sequences separately, so only a bad sequence fails."""


class CoreLost(BackendError):
    """The core does not compute again until the process is restarted. Another core may run its batch.

    `has_begun`: whether the core was lost while it computed this batch, which may be the reason. Otherwise the batch
    was only queued on the core.
    """

    def __init__(self, message: str, *, has_begun: bool = True) -> None:
        super().__init__(message)
        self.has_begun = has_begun


class ByteBudget:
    """Memory that the back ends of a process share. Threads may use it."""

    def __init__(self, limit_bytes: int) -> None:
        self._free_bytes = limit_bytes
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        """Takes a number of bytes if they are free, and returns whether it did."""
        with self._lock:
            if size_bytes > self._free_bytes:
                return False
            self._free_bytes -= size_bytes
            return True

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self._free_bytes += size_bytes


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """The parameters of a back end: the model, the artefact's verified files and properties, and the resources to use.

    - `cores`: number of batches that run at once (0: the back end's choice). On CPUs they share the threads.
    - `threads`: number of CPU threads (0: one for each available CPU).
    - `max_batch_tokens`: limit of a batch of several sequences.
    - `pipeline_cores`: number of the model's parts.
    - `lone_graphs`: the process's budget for graphs of single texts.
    - `files`: may be gone once the back end exists.
    """

    spec: ModelSpec
    files: list[Path]
    properties: Mapping[str, str]
    cores: int
    threads: int
    in_flight: int = 1
    max_batch_tokens: int = 8192
    lone_graphs: ByteBudget = field(default_factory=lambda: ByteBudget(0))
    pipeline_cores: int = 1
    buckets: tuple[Bucket, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """A loaded model, made from a BackendRequest. The constructor raises SetupError for an unsuitable artefact."""

    @property
    def cores(self) -> int:
        """The number of cores. Each computes one batch at a time, or a part of one for a model in parts."""

    @property
    def in_flight(self) -> int:
        """The number of batches to give to a core at once: the computed batch, and the batches prepared meanwhile."""

    @property
    def shapes(self) -> BucketPlan | ShapeMenu:
        """The shapes of batches: the compiled shapes and no others, or a menu.

        The back end pads a batch that fills no bucket, and cuts the outputs.
        """

    @property
    def lone_graphs(self) -> Mapping[int, int]:
        """The bytes of each graph for single texts, by its length in tokens."""

    @property
    def part_ns(self) -> Sequence[int]:
        """The nanoseconds that each part of the model has computed; empty for a model in one part."""

    async def run(self, core: int, prepare: Prepare, finish: Finish[ResultT], *, is_alone: bool = False) -> ResultT:
        """Computes one batch without blocking the event loop. At most `in_flight` calls run at once for the same core.

        `prepare` and `finish` may take long. They run in the thread of the batch, before and after the computation.
        `is_alone`: no other core has work, so the batch may use the resources of all cores.

        `prepare` returns the model's inputs by name, int64 [batch, tokens], padded; attention_mask is 1 on tokens and 0
        on padding. For an image model they are uint8 [batch, 3, height, width]. `finish` gets the model's outputs by
        name, [batch, *axes], float32, which the back end may reuse after `finish` returns. Returns the result of
        `finish`. Raises BackendError, CoreLost for a lost core, and the errors of `prepare` and `finish`.
        """

    def close(self) -> None:
        """Waits for running batches, and frees the device. Called in a thread."""


async def compute(backend: Backend, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
    """Runs a batch that is already prepared, and returns its outputs."""
    return await backend.run(
        core, lambda: inputs, lambda outputs: {name: array.copy() for name, array in outputs.items()}, is_alone=is_alone
    )


def check_shapes(inputs: Arrays) -> None:
    """Raises BackendError if inputs of tokens differ in shape.

    OpenVINO 2026.4 with one thread computes them, with the memory behind the shorter input.
    """
    shapes = {array.shape for array in inputs.values() if array.ndim == 2}
    if len(shapes) > 1:
        raise BackendError(f"inputs of different shapes: {[array.shape for array in inputs.values()]}")
