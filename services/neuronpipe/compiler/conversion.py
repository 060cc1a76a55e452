"""The contract between the compiler and its back ends: what to convert, and the outputs of an artefact."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

from neuronpipe.bundles.buckets import Bucket
from neuronpipe.bundles.manifest import Artifact
from neuronpipe.compiler.modules import Outputs, SampleBatch, SourceModule
from neuronpipe.compiler.pipeline_parallel import PipelinedModel
from neuronpipe.compiler.source import ModelSource
from neuronpipe.core.errors import SetupError

# dtype → (the operations that are cast, the type). AWS's published figures for encoders are all in bfloat16.
CASTS = {"float32": ("none", ""), "bfloat16": ("matmult", "bf16")}


Reporter: TypeAlias = Callable[[str], None]


class Steps:
    """The numbered steps of a compilation, which are reported when they begin. An error names the `current` step."""

    def __init__(self, count: int, report: Reporter) -> None:
        self.current, self.report = "read the request", report
        self._began_s, self._number, self._count = time.monotonic(), 0, count

    def begin(self, line: str) -> None:
        self.current, self._number = line, self._number + 1
        self.report(f"[{self._number}/{self._count}] {time.monotonic() - self._began_s:5.1f} s  {line}")


@dataclass(frozen=True, slots=True)
class NeuronxOptions:
    """Options of the compilation for Neuron.

    Every flag is passed, because the compiler's defaults differ between releases. `workers`: processes that compile at
    once, each with memory for the model and the compiler. `cache`: the folder of kept artefacts.
    """

    target: str = "inf2"
    model_type: str = "transformer"
    optlevel: int = 2
    auto_cast: str = ""
    attention: str = "eager"
    workers: int = 1
    cache: Path = Path("~/.cache/neuronpipe/neuronx")

    def flags(self, dtype: str) -> tuple[str, ...]:
        """Returns the compiler's flags, all explicit. Raises SetupError if they contradict the dtype."""
        cast, cast_type = CASTS[dtype]
        if self.auto_cast and (self.auto_cast == "none") != (cast == "none"):
            casts = "nothing" if cast == "none" else f"to {cast_type}"
            raise SetupError(f"--auto-cast {self.auto_cast}: --dtype {dtype} casts {casts}")
        # The accumulation is on by default since SDK 2.27.
        flags = [f"--target={self.target}", f"--model-type={self.model_type}", f"--optlevel={self.optlevel}"]
        flags += ["--enable-mixed-precision-accumulation", f"--auto-cast={self.auto_cast or cast}"]
        if cast_type:
            flags.append(f"--auto-cast-type={cast_type}")
        return tuple(flags)


DEFAULT_OPTIONS = NeuronxOptions()


@dataclass(frozen=True, slots=True)
class Conversion:
    """The parameters of a conversion: the module, a batch for it, the bundle's folder, and its buckets, if any."""

    module: SourceModule
    source: ModelSource
    example: SampleBatch
    folder: Path
    dtype: str
    buckets: tuple[Bucket, ...]
    neuronx: NeuronxOptions
    pipeline: PipelinedModel | None = None
    adapters: tuple[str, ...] = ()

    @property
    def parts(self) -> int:
        return len(self.pipeline.firsts) if self.pipeline else 1

    def each_part(self) -> Iterator[tuple[SourceModule, Mapping[str, torch.Tensor]]]:
        """Yields the parts of the module, each with an example of its inputs, or the module itself if it is not cut."""
        if self.pipeline is None:
            yield self.module, {name: torch.from_numpy(self.example[name]) for name in self.module.inputs}
            return
        for number in range(self.parts):
            with self.pipeline.part(number) as part:
                yield part


@dataclass(frozen=True, slots=True)
class Ran:
    """An artefact's outputs for each batch, their dtype, and the program that ran instead of the artefact, if any."""

    outputs: Sequence[Outputs]
    computed_dtype: str
    emulator: str = ""


class ArtifactCompiler(Protocol):
    """The part of the compiler for a back end (a module)."""

    DTYPES: tuple[str, ...]
    BUCKETS: str
    """Whether the back end compiles for buckets: "none", "optional" or "required"."""

    def convert(self, conversion: Conversion) -> Artifact:
        """Writes the artefact into the bundle's folder and describes it. Raises SetupError."""

    def run(self, conversion: Conversion, artifact: Artifact, batches: Sequence[SampleBatch]) -> Ran | None:
        """Runs the artefact on every batch. Returns None if there is nothing to compare."""
