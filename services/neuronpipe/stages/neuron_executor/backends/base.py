"""The contract of a back end: arrays in, arrays out, for one compiled bundle. It knows no task and no network."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from neuronpipe.bundles.buckets import Bucket, BucketPlan
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays

ResultT = TypeVar("ResultT")
# Called before and after the computation of a batch, in its thread: see Backend.run.
Prepare: TypeAlias = Callable[[], Arrays]
Finish: TypeAlias = Callable[[Arrays], ResultT]


class BackendError(Exception):
    """A batch could not be computed. The scheduler then runs its sequences one by one, so only a bad sequence fails."""


class CoreLost(BackendError):
    """The core does not compute again until the process is restarted. Another core may run its batch.

    `has_begun`: whether the core was lost while it computed this batch, which may be the reason. Otherwise the batch
    was only queued on the core.
    """

    def __init__(self, message: str, *, has_begun: bool = True) -> None:
        super().__init__(message)
        self.has_begun = has_begun


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """The parameters of a back end: the model, the artefact's verified files and properties, and the resources to use.

    `cores` batches run at once (0: the back end's choice). On CPUs, they share `threads` CPU threads (0: one for each
    available CPU). `pipeline_cores` is the number of the model's parts. `files` may be gone once the back end is made.
    """

    spec: ModelSpec
    files: list[Path]
    properties: Mapping[str, str]
    cores: int
    threads: int
    in_flight: int = 1
    pipeline_cores: int = 1
    cores_per_replica: int = 1
    buckets: tuple[Bucket, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """A loaded model. The class is called with a BackendRequest. Raises SetupError for an unsuitable artefact."""

    @property
    def cores(self) -> int:
        """The number of cores. Each computes one batch at a time; of a model in parts, each has one on its way."""

    @property
    def in_flight(self) -> int:
        """The number of batches to give to a core at once: the one that it computes, and those prepared meanwhile."""

    @property
    def buckets(self) -> BucketPlan | None:
        """The only shapes that it computes, or None for any. The back end pads smaller batches and cuts the outputs."""

    @property
    def part_ns(self) -> Sequence[int]:
        """How long each part of the model has computed, in nanoseconds; empty for a model in one part."""

    def round_tokens(self, tokens: int) -> int:
        """The padded length for sequences of up to `tokens` tokens; a few lengths let kernels be reused."""

    async def run(self, core: int, prepare: Prepare, finish: Finish[ResultT], *, is_alone: bool = False) -> ResultT:
        """Computes one batch without blocking the event loop. At most `in_flight` calls run at once for the same core.

        `prepare` and `finish` may take long. They are called in the thread of the batch, before and after the
        computation. `is_alone`: no other core has work, so this one may use the resources of all.

        `prepare` returns the model's inputs by name, int64 [batch, tokens], padded; attention_mask is 1 on tokens and 0
        on padding. For an image model they are uint8 [batch, 3, height, width]. `finish` gets the model's outputs by
        name, [batch, *axes], float32. The back end may reuse them after `finish` returns. The result of `finish` is
        returned. Raises BackendError, CoreLost for a lost core, and what the two raise.
        """

    def close(self) -> None:
        """Waits for running batches, and frees the device. Called in a thread."""


async def compute(backend: Backend, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
    """Runs a batch that is already prepared, and returns its outputs."""
    return await backend.run(
        core, lambda: inputs, lambda outputs: {name: array.copy() for name, array in outputs.items()}, is_alone=is_alone
    )


def check_shapes(inputs: Arrays) -> None:
    """Raises BackendError for inputs of tokens that differ in shape.

    OpenVINO 2026.4 with one thread computes them, with what is behind the shorter one in memory.
    """
    shapes = {array.shape for array in inputs.values() if array.ndim == 2}
    if len(shapes) > 1:
        raise BackendError(f"inputs of different shapes: {[array.shape for array in inputs.values()]}")
