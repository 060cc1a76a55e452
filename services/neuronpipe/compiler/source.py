"""Gets a model from a local folder or from the Hugging Face Hub."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from neuronpipe.bundles.manifest import Source, file_sha256
from neuronpipe.compiler.sentence_transformers import read_json, transformer_folder
from neuronpipe.compiler.source_checks import ADAPTER_CONFIG, check_files, refuse_adapter
from neuronpipe.core.errors import SetupError

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# Configurations, tokenizers of every kind, and modules of sentence-transformers. Weights of other frameworks are not
# downloaded.
_DOWNLOADS = ("*.json", "*.txt", "*.model", "*.spm", "*.py", "README.md", "adapter_model.bin", *_WEIGHTS)
_NOT_DOWNLOADED = ("onnx/*", "openvino/*", "tf_*", "flax_*", "*.onnx*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files on this machine.

    `revision` is the Hub's commit. `base` is the model into which an adapter was merged.
    """

    location: str
    folder: Path
    revision: str | None
    base: str = ""

    def describe(self) -> Source:
        """The source for the manifest."""
        digest = hashlib.sha256()
        for path in sorted(path for pattern in _WEIGHTS for path in self.folder.rglob(pattern)):
            digest.update(f"{path.relative_to(self.folder)} {file_sha256(path)}\n".encode())
        return Source(location=self.location, revision=self.revision, base=self.base, weights_sha256=digest.hexdigest())


def find_source(source: str, revision: str | None, *, is_adapter: bool = False) -> ModelSource:
    """The files of a model or an adapter. They are downloaded if `source` is not a local folder. Raises SetupError."""
    folder = Path(source)
    if folder.is_dir():
        _check(folder, is_adapter)
        return ModelSource(str(folder.resolve()), folder, None)
    if source.startswith((".", "/", "~")) or source.count("/") > 1:
        raise SetupError(f"{source}: no such folder")
    try:
        snapshot = huggingface_hub.snapshot_download(
            source, revision=revision, allow_patterns=list(_DOWNLOADS), ignore_patterns=list(_NOT_DOWNLOADED)
        )
    except GatedRepoError as error:
        raise SetupError(
            f"{source}: the Hub gives it to accounts with access only; log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise SetupError(f"{source}: neither a local folder nor a model on the Hub") from error
    except RevisionNotFoundError as error:
        raise SetupError(f"{source}: on the Hub, but without a revision {revision!r}") from error
    # The Hub's library raises its own errors, and those of its HTTP library, which differs between versions.
    except Exception as error:
        raise SetupError(
            f"{source}: no local folder, and the Hub cannot be reached to download it: "
            f"{type(error).__name__}; where it can, run: hf download {source} --local-dir DIR, and compile "
            "the folder DIR"
        ) from error
    _check(Path(snapshot), is_adapter)
    return ModelSource(source, Path(snapshot), Path(snapshot).name)


def _first_module(folder: Path) -> str:
    """What a model of sentence-transformers without a transformer begins with, for the error message."""
    modules = read_json(folder / "modules.json") if (folder / "modules.json").is_file() else []
    kind = str(modules[0]["type"]).rpartition(".")[2] if modules else "Transformer"
    if kind == "Transformer":
        return ""
    return f"; modules.json begins with {kind}, and supported are models that begin with a Transformer"


def _check(folder: Path, is_adapter: bool) -> None:
    check_files(folder)
    if not is_adapter:
        refuse_adapter(folder)
    if not is_adapter and not (transformer_folder(folder) / "config.json").is_file():
        raise SetupError(f"{folder}: no model: it has no config.json{_first_module(folder)}")
    if is_adapter and not (folder / ADAPTER_CONFIG).is_file():
        raise SetupError(f"{folder}: no adapter: it has no {ADAPTER_CONFIG}; leave out --merge-adapter")
