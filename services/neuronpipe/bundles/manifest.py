"""The manifest of a bundle, which lists every other file with its digest, and the files, verified by their digests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import file_digest, sha256
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator

from neuronpipe.bundles.buckets import Bucket
from neuronpipe.core.errors import RefusedBundle, SetupError
from neuronpipe.core.files import reporting_os_errors
from neuronpipe.core.model import Frozen, ModelSpec, TaskFacts, problems_of
from neuronpipe.tasks import TASKS

MANIFEST_FILE = "manifest.json"
# The signature file, beside the manifest of a signed bundle (signing.py).
SIGNATURE_FILE = "signature.json"
SCHEMA_VERSION = 4


class Source(Frozen):
    """The source of the model: its commit on the Hub, and the digest over the files with weights."""

    location: str
    revision: str | None = None
    base: str = Field("", description="the model that it was merged into, where it is an adapter")
    weights_sha256: str


class Accuracy(Frozen):
    """The comparison of the artefact with PyTorch float32 on sample texts.

    `largest_difference`: absolute, over all outputs. It is from a run of this artefact on the compiling machine, which
    computed in `computed_dtype`. If `computed_dtype` is not the artefact's dtype (a CPU without bfloat16 instructions),
    `emulated_difference` and `emulated_agreement` compare PyTorch in the artefact's dtype, which any machine can
    compute.
    """

    samples: int
    sample_texts: str = Field(
        "", description="source of the samples: built-in sample text and its languages, images, or a file"
    )
    sample_shapes: tuple[tuple[int, int], ...] = Field(description="batch x tokens of each batch of samples")
    largest_output: float
    largest_difference: float
    computed_dtype: str
    emulator: str = Field(
        "", description="program that computed instead of the artefact, if the compiling machine could not run it"
    )
    emulated_difference: float | None = None
    agreement: float | None = Field(
        None,
        description="text-classification: share of texts with the same best label (none for a model with one label); "
        "question-answering: share of texts with the same best start and end; sentence-embedding: smallest cosine "
        "similarity of a text's embeddings; feature-extraction: smallest cosine similarity of a token's vectors; "
        "image-classification: as text-classification",
    )
    emulated_agreement: float | None = None


class Calibration(Frozen):
    """The texts that calibrated an int8 artefact."""

    texts: int
    source: str = Field(description="the file that they are from, or built-in sample text and its languages")
    source_sha256: str | None = None


class Artifact(Frozen):
    """The compiled model for one back end, which gets `properties` when it loads the model."""

    backend: str
    dtype: str
    files: tuple[str, ...] = ()
    properties: dict[str, str] = Field({})
    versions: dict[str, str] = Field({}, description="versions of the compiler and the libraries")
    buckets: tuple[Bucket, ...] = Field((), description="the only shapes that the artefact computes; empty: any")
    pipeline_cores: int = Field(
        1, ge=1, description="the parts into which the model is cut, each for a core of its own"
    )
    accuracy: Accuracy | None = None
    calibration: Calibration | None = None
    float_parts: tuple[str, ...] = Field(
        (), description="parts of an int8 model that compute in float32, on weights of 8 bits"
    )


class Manifest(Frozen):
    schema_version: int
    model: ModelSpec
    source: Source
    tokenizer_file: str = Field("", description="empty for a model of images, which has no tokenizer")
    tokens_file: str = Field("", description="each token as text, a JSON list, for fill-mask")
    query_weights_file: str = Field(
        "", description="weight of each token in queries, a JSON list, for sparse models that compute documents alone"
    )
    artifacts: tuple[Artifact, ...] = Field(min_length=1)
    cache_results: bool = Field(False, description="whether a gateway caches this model's results")
    files: dict[str, str] = Field(
        description="sha256 of every file of the bundle except the manifest and its signature"
    )

    @field_validator("model", mode="before")
    @classmethod
    def _type_facts(cls, model: Any) -> Any:
        """Reads the facts of each task by the class that the task declares."""
        facts = model.get("facts", {}) if isinstance(model, dict) else None
        if not isinstance(facts, dict):
            return model
        tasks = [task for task in (*facts, *_tasks(model)) if task in TASKS]
        return {**model, "facts": facts | {task: _typed(task, facts.get(task, {})) for task in tasks}}

    @field_validator("model")
    @classmethod
    def _check_vocabulary(cls, model: ModelSpec) -> ModelSpec:
        if model.takes_texts and not model.vocabulary_size:
            raise ValueError("vocabulary_size: is missing, and a model of texts has one; compile the model again")
        return model

    @classmethod
    def read(cls, path: Path) -> "Manifest":
        """Reads a manifest. Raises SetupError for an invalid manifest, and for a manifest of another schema version."""
        return cls.parse(path.read_bytes(), path)

    @classmethod
    def parse(cls, written: bytes, path: Path | str) -> "Manifest":
        """Parses the bytes of a manifest. Raises SetupError as `read` does, with the path."""
        try:
            version = _SchemaVersion.model_validate_json(written).schema_version
            if version != SCHEMA_VERSION:
                advice = "update it, or " if version > SCHEMA_VERSION else ""
                raise SetupError(
                    f"{path}: schema version {version}, this neuronpipe reads {SCHEMA_VERSION}; {advice}compile the "
                    "model again with this one"
                )
            return cls.model_validate_json(written)
        except ValidationError as error:
            raise SetupError(f"{path}: not a valid manifest: {problems_of(error)}") from error


def _tasks(model: Mapping[str, Any]) -> list[str]:
    others = model.get("also_answers")
    return [
        task for task in (model.get("task"), *(others if isinstance(others, list) else ())) if isinstance(task, str)
    ]


def _typed(task: str, facts: Any) -> TaskFacts:
    kind = TASKS[task].facts
    try:
        return kind.model_validate(facts)
    except ValidationError as error:
        problems = "; ".join(f"{task}.{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        raise ValueError(f"facts.{problems}") from error


class _SchemaVersion(BaseModel):
    schema_version: int


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


ParsedT = TypeVar("ParsedT")

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BundleFiles:
    """The files in a folder, verified by their digests. Methods raise RefusedBundle for a missing or changed file."""

    folder: Path
    digests: Mapping[str, str]

    def read(self, name: str) -> bytes:
        """Reads the content of a file and verifies it."""
        with self._open(name) as file:
            content = file.read()
        self._compare(name, sha256(content).hexdigest())
        return content

    def parse(self, name: str, parse: Callable[[bytes], ParsedT]) -> ParsedT:
        """Verifies a file, and returns the result of `parse`. Raises RefusedBundle also for any error of `parse`."""
        content = self.read(name)
        try:
            return parse(content)
        except (SetupError, ModuleNotFoundError):
            raise
        except Exception as error:  # libraries raise errors of many kinds for a file that was exchanged or cut
            raise RefusedBundle(
                f"{self.folder / name}: cannot be read ({type(error).__name__}), though it is as the manifest says; "
                "compile the model again"
            ) from error

    def verify(self, name: str) -> Path:
        with self._open(name) as file:
            self._compare(name, file_digest(file, "sha256").hexdigest())
        return self.folder / name

    def copy(self, name: str, private: Path) -> Path:
        """Copies a file to the same name in another folder, verified. Raises SetupError if it has no room."""
        digest, target = sha256(), private / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise RefusedBundle(f"{self.folder}: its manifest names {name!r}, which is outside of the bundle")
        source = self._open(name)
        problem = (
            f"{self.folder / name}: cannot be copied to {private.parent}, from where files of signed bundles are loaded"
        )
        with reporting_os_errors(problem, "; TMPDIR may name another folder"):
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, target.open("xb") as copied:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    copied.write(chunk)
        self._compare(name, digest.hexdigest())
        return target

    def check_names(self, *, is_whole: bool = True) -> None:
        """Raises RefusedBundle also for a file that the manifest does not name. `is_whole`: no file may be missing."""
        # A link to a folder would hide the files in it.
        files = (path for path in self.folder.rglob("*") if path.is_symlink() or not path.is_dir())
        names = {str(path.relative_to(self.folder)) for path in files}
        if added := sorted(names - {MANIFEST_FILE, SIGNATURE_FILE, *self.digests}):
            raise RefusedBundle(
                f"{self.folder}: {added[0]!r} was added: the manifest does not name it; move it elsewhere"
            )
        if is_whole and (missing := sorted(self.digests.keys() - names)):
            raise self._missing(missing[0])

    def check(self) -> None:
        """Verifies every file. Raises RefusedBundle also for a file that the manifest does not name."""
        self.check_names()
        for name in self.digests:
            self.verify(name)

    def _open(self, name: str) -> BufferedReader:
        path = self.folder / name
        if not path.is_file():  # a device or a pipe would have no end
            raise self._missing(name)
        with reporting_os_errors(f"{path}: cannot be read"):
            return path.open("rb")

    def _compare(self, name: str, digest: str) -> None:
        if digest != self.digests.get(name):
            raise RefusedBundle(
                f"{self.folder / name}: changed since it was compiled (its sha256 is not the manifest's); compile the "
                "model again"
            )

    def _missing(self, name: str) -> RefusedBundle:
        return RefusedBundle(f"{self.folder / name}: missing, though the manifest names it; compile the model again")
