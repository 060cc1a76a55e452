"""The contract of a back end: arrays in, arrays out, for one compiled bundle. It knows no task and no network."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from neuronpipe.bundles.buckets import Bucket, BucketPlan
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays

ResultT = TypeVar("ResultT")
# What is called around the computing of a batch, in its thread: see Backend.run.
Prepare: TypeAlias = Callable[[], Arrays]
Finish: TypeAlias = Callable[[Arrays], ResultT]


class BackendError(Exception):
    """A batch could not be computed. The scheduler runs its sequences one by one then, so that only the guilty one fails."""


class CoreLost(BackendError):
    """The core computes no more until the process is started again. What it was to compute has not been, and another core may.

    `has_begun`: whether the core was lost while it computed this batch, which may be the reason; else the batch only came too late.
    """

    def __init__(self, message: str, *, has_begun: bool = True) -> None:
        super().__init__(message)
        self.has_begun = has_begun


@dataclass(frozen=True, slots=True)
class BackendRequest:
    """What a back end is made from: the model, the artefact's verified files and properties, and the resources it may use.

    `cores` batches run at once (0: as many as is best) and share `threads` CPU threads (0: one for each available CPU) where the back
    end computes on CPUs.
    """

    spec: ModelSpec
    files: list[Path]
    properties: Mapping[str, str]
    cores: int
    threads: int
    in_flight: int = 1
    cores_per_replica: int = 1
    buckets: tuple[Bucket, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """A loaded model. The class itself is called with a BackendRequest, and raises SetupError for an artefact that it cannot take."""

    @property
    def cores(self) -> int:
        """How many cores there are, each of which computes one batch at a time."""

    @property
    def in_flight(self) -> int:
        """How many batches to hand to a core at once: the one that it computes and those made ready meanwhile."""

    @property
    def buckets(self) -> BucketPlan | None:
        """The only shapes that it computes, or None for any. Smaller batches are filled up and cut again by the back end."""

    def round_tokens(self, tokens: int) -> int:
        """The padded length to use for sequences of up to `tokens` tokens; the same few lengths let kernels be reused."""

    async def run(self, core: int, prepare: Prepare, finish: Finish[ResultT], *, is_alone: bool = False) -> ResultT:
        """Computes one batch without holding up the event loop; called at most `in_flight` times at once for the same core.

        `prepare` and `finish`, which take their time, are called where the batch is computed, in its thread, before and after. `is_alone`:
        no other core has anything to do, so this one may use what belongs to all of them.

        `prepare` makes the model's inputs by name, int64 [batch, tokens], padded; attention_mask is 1 on tokens and 0 on padding. Of a
        model of images uint8 [batch, 3, height, width].
        `finish` gets the model's outputs by name, [batch, *axes], float32, which are the back end's again when it returns; its result is
        returned. Raises BackendError, CoreLost for a core that is gone, and what the two raise.
        """

    def close(self) -> None:
        """Waits for batches that run though nobody waits for them any more, and frees the device. Called in a thread."""


async def compute(backend: Backend, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
    """Runs a batch that is made already, and keeps its outputs."""
    return await backend.run(
        core, lambda: inputs, lambda outputs: {name: array.copy() for name, array in outputs.items()}, is_alone=is_alone
    )
