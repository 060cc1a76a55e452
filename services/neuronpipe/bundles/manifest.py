"""The manifest of a bundle: manifest.json, which names every other file of the bundle with its digest."""

import hashlib
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from neuronpipe.core.buckets import Bucket
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ModelSpec

MANIFEST_FILE = "manifest.json"
SCHEMA_VERSION = 3


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(_Frozen):
    """Where the model came from. `revision` is the Hub's commit, `weights_sha256` the digest over the files with weights."""

    location: str
    revision: str | None = None
    weights_sha256: str


class Accuracy(_Frozen):
    """The artefact against PyTorch float32 on sample texts.

    `largest_difference` is absolute, over all outputs, as this artefact ran on the compiling machine, which computed in
    `computed_dtype`. Where that is not the artefact's dtype (a CPU without bfloat16 instructions), `emulated_difference` and
    `emulated_agreement` are those of PyTorch computing in the artefact's dtype, which any machine can do.
    """

    samples: int
    sample_shapes: tuple[tuple[int, int], ...] = Field(description="batch x tokens of each batch of samples")
    largest_output: float
    largest_difference: float
    computed_dtype: str
    emulator: str = Field("", description="what computed in the artefact's place where the compiling machine could not run it")
    emulated_difference: float | None = None
    agreement: float | None = Field(
        None,
        description="text-classification: share of texts with the same best label (none for a model with one label); question-answering: "
        "share of texts with the same best start and end; sentence-embedding: smallest cosine similarity of a text's embeddings; "
        "feature-extraction: smallest cosine similarity of a token's vectors; image-classification: as text-classification",
    )
    emulated_agreement: float | None = None


class Calibration(_Frozen):
    """The texts on which the ranges of an int8 artefact were found."""

    texts: int
    source: str = Field(description="the file that they are from, or 'built-in sample text'")
    source_sha256: str | None = None


class Artifact(_Frozen):
    """The compiled model for one back end. `files` are relative to the bundle; `properties` are handed to the back end at load."""

    backend: str
    dtype: str
    files: tuple[str, ...] = ()
    properties: dict[str, str] = {}
    versions: dict[str, str] = Field({}, description="versions of the compiler and the libraries")
    buckets: tuple[Bucket, ...] = Field((), description="the only shapes that the artefact computes; empty: any")
    accuracy: Accuracy | None = None
    calibration: Calibration | None = None


class Manifest(_Frozen):
    """A bundle's manifest."""

    schema_version: int
    model: ModelSpec
    source: Source
    tokenizer_file: str = Field("", description="empty for a model of images, which has no tokenizer (since schema version 3)")
    tokens_file: str = Field("", description="each token as text, a JSON list, for fill-mask (since schema version 3)")
    artifacts: tuple[Artifact, ...] = Field(min_length=1)
    cache_results: bool = Field(False, description="whether a gateway caches this model's results (since schema version 2)")
    files: dict[str, str] = Field(description="sha256 of every file of the bundle but this one")

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Reads a manifest. Raises SetupError for one of a newer schema, and for what is no manifest."""
        try:
            versioned = _SchemaVersion.model_validate_json(path.read_bytes())
            if versioned.schema_version > SCHEMA_VERSION:
                raise SetupError(
                    f"{path}: schema version {versioned.schema_version}, this neuronpipe reads up to {SCHEMA_VERSION}; update it, or "
                    "compile the model again with this one"
                )
            return cls.model_validate_json(path.read_bytes())
        except ValidationError as error:
            problems = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors()[:3])
            raise SetupError(f"{path}: not a valid manifest: {problems}") from error


class _SchemaVersion(BaseModel):
    schema_version: int


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
