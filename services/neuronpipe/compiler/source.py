"""Gets a model from a local folder or from the Hugging Face Hub, and names the faults of its files."""

import contextlib
import fnmatch
import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
import transformers
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from transformers.models.auto import modeling_auto

from neuronpipe.bundles.manifest import Source, file_sha256
from neuronpipe.bundles.writing import check_is_there
from neuronpipe.compiler.foreign_forms import foreign_form
from neuronpipe.compiler.images import IMAGE_TEXT_KINDS
from neuronpipe.compiler.saved_files import read_object
from neuronpipe.compiler.sentence_transformers import read_modules, transformer_folder
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.base import Reads

ADAPTER_CONFIG = "adapter_config.json"

_LFS = b"version https://git-lfs"
_SHOWN = 4
# Modules of sentence-transformers that read texts with a config.json of their own.
_WITHOUT_TRANSFORMER = ("BoW", "WordEmbeddings")


def check_files(folder: Path) -> None:
    """Raises SetupError if a file cannot be read, or is only a Git LFS pointer."""
    for path in _files(folder):
        if not path.is_file():
            advice = "get the file itself, or compile a copy without it"
            raise SetupError(f"{path}: is no file, or a link to none; {advice}")
        try:
            with path.open("rb") as file:
                head = file.read(len(_LFS))
        except PermissionError as error:
            raise _unreadable(path, folder) from error
        if head == _LFS:
            raise SetupError(f"{path}: a pointer of Git LFS, not the file itself; run: git -C {folder} lfs pull")


def walk_files(folder: Path) -> Iterator[Path]:
    """Yields the files of a folder, also behind links to folders."""
    return (Path(parent, name) for parent, names in _walk(folder) for name in names)


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields each folder within a folder, also behind links, with the names of its files. Enters each folder once."""
    entered = set[str]()
    for parent, folders, names in os.walk(folder, onerror=_raise, followlinks=True):
        entered.add(os.path.realpath(parent))
        folders[:] = [name for name in sorted(folders) if os.path.realpath(Path(parent, name)) not in entered]
        yield parent, names


def _named(paths: Iterable[Path], patterns: Iterable[str]) -> set[Path]:
    """Returns the paths whose names match a pattern."""
    return {path for path in paths if any(fnmatch.fnmatch(path.name, pattern) for pattern in patterns)}


def _shards(folder: Path) -> Iterator[Path]:
    """Yields the files that indexes of weights name, also missing files.

    Raises SetupError for a name outside of the folder, and for what is no file: reading a device never ends.
    """
    for index in sorted(_named(walk_files(folder), ("*.index.json",))):
        file_of_weight = read_object(index).get("weight_map")
        for name in sorted({str(name) for name in file_of_weight.values()} if isinstance(file_of_weight, dict) else ()):
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts:
                raise SetupError(f"{index}: names {name!r:.100}, which is outside of the model")
            if (shard := index.parent / name).exists() and not shard.is_file():
                raise SetupError(f"{index}: names {name!r:.100}, which is no file")
            yield shard


def refuse_adapter(folder: Path) -> None:
    """Raises SetupError if the folder contains an adapter, which is not a whole model."""
    if (folder / ADAPTER_CONFIG).is_file():
        base = read_object(folder / ADAPTER_CONFIG).get("base_model_name_or_path")
        is_whole = (folder / "config.json").is_file()
        kind = "an adapter (LoRA) beside its weights" if is_whole else "an adapter (LoRA), not a whole model"
        raise SetupError(
            f"{folder}: holds {kind}, made for {base}; --merge-adapter compiles the two as one (pip install "
            "'neuronpipe[compile-adapters]'); to compile the folder without it, move the adapter's files away"
        )


def _files(folder: Path) -> Iterator[Path]:
    """Yields the files to read. Weights in PyTorch's format are read only if there are none in safetensors."""
    try:
        for parent, names in _walk(folder):
            has_safetensors = any(name.endswith(".safetensors") for name in names)
            kinds = (".json", ".txt", ".model", ".spm", ".safetensors" if has_safetensors else ".bin")
            yield from (Path(parent) / name for name in names if name.endswith(kinds))
    except PermissionError as error:
        raise _unreadable(Path(error.filename), folder) from error


def _unreadable(path: Path, folder: Path) -> SetupError:
    return SetupError(f"{path}: not readable for user {os.geteuid()}; its owner can run: chmod -R a+rX {folder}")


def _raise(error: OSError) -> None:
    raise error


def _own_classes(content: Mapping[str, Any]) -> list[str]:
    classes_by_kind = content.get("auto_map") or {}
    classes = [str(name).rpartition(".")[2] for kind, name in classes_by_kind.items() if kind.startswith("AutoModel")]
    return [name for name in classes if not hasattr(transformers, name)]


def _quantization(content: Mapping[str, Any]) -> str:
    settings = content.get("quantization_config") or {}
    if content.get("quantization"):
        return "MLX"
    prefixes = ("load_in_", "_load_in_", "bnb_")
    is_bitsandbytes = any(key.startswith(prefixes) and value for key, value in settings.items())
    unnamed = "bitsandbytes" if is_bitsandbytes else "a method that is not named"
    return str(settings.get("quant_method") or unnamed) if settings else ""


_IMAGE_KINDS = (modeling_auto.MODEL_FOR_IMAGE_MAPPING_NAMES, modeling_auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES)
# The inputs of a model, and the tasks to choose from.
_TASKS_OF: Mapping[Reads, tuple[str, str]] = {
    "texts": ("texts", "a task of texts"),
    "images": ("images", "--task image-classification or image-embedding"),
    "both": (
        "images and texts",
        "--task zero-shot-image-classification, whose bundle also answers image-embedding and sentence-embedding",
    ),
}

# Class of published code that is not run → the port of its models to transformers, or a model of the same task.
_PORTS = {
    "XLMRobertaLoRA": "compile jinaai/jina-embeddings-v3-hf, the same model for transformers",
    "NVEmbedConfig": "no port to transformers is published; compile Qwen/Qwen3-Embedding-8B for sentence-embedding",
}


def port_of(content: Mapping[str, Any]) -> str:
    """Returns advice on a model with published code of its own, by its config.json; mostly empty."""
    classes = {str(name).rpartition(".")[2] for name in (content.get("auto_map") or {}).values()}
    return next((advice for name, advice in _PORTS.items() if name in classes), "")


# A test of config.json → the error message for its result.
_CONFIGURATIONS: tuple[tuple[Callable[[Mapping[str, Any]], object], str], ...] = (
    (
        _quantization,
        "its weights are quantized by {}; compile the original in its place, with --dtype int8 to have it "
        "quantized here",
    ),
    (port_of, "config.json names code of its own (auto_map), which is not run; {}"),
    (
        lambda content: ", ".join(_own_classes(content)),
        "config.json names code of its own (auto_map: {}), which is not run, and what transformers has for its model "
        "type may compute something else; take auto_map out of config.json to compile that",
    ),
)


# Fields of config.json, and their types if they are not null.
_TYPES: Mapping[str, type] = {
    "model_type": str,
    "architectures": list,
    "auto_map": dict,
    "id2label": dict,
    "label2id": dict,
    "quantization_config": dict,
    "sentence_transformers": dict,
    "task_specific_params": dict,
}
# Names under which configurations store their sizes. Each value must be above 0 and below _TOO_LARGE.
_SIZES = (
    *("hidden_size", "num_hidden_layers", "vocab_size", "d_model", "n_embd", "n_layer", "n_head", "num_layers"),
    *("num_attention_heads", "num_key_value_heads", "intermediate_size", "num_labels"),
)
_TOO_LARGE = 1 << 31
# The end of a count's name → a number above the count of any model. PyTorch makes objects of each layer and a vector
# for each token, and transformers a name for each label: a million layers would fill the memory.
_MOST = {
    **dict.fromkeys(("layer", "layers", "depths", "blocks"), 1000),
    "experts": 10_000,
    "labels": 1_000_000,
    "vocab_size": 2_000_000,
}
_WORDS: Mapping[type, str] = {str: "text", list: "list", dict: "object of names and values"}
# Files beside weights that only their own programs read → their description.
_FOREIGN = {
    "quantize_config.json": "weights that GPTQ quantized",
    "quant_config.json": "weights that AWQ quantized",
    "*.gguf": "GGUF files of llama.cpp",
    "*.ggml": "files of llama.cpp",
    "*.nemo": "a model of NeMo",
    "params.json": "a checkpoint in its author's own format",
    "model_index.json": "a pipeline of diffusers",
    "*.onnx": "an ONNX graph",
    "onnx/*.onnx": "an ONNX graph",
    "openvino_model.xml": "a graph of OpenVINO",
    "*.h5": "weights of TensorFlow",
    "*.msgpack": "weights of Flax",
}


def foreign_files(folder: Path, *, with_weights: bool = False) -> str:
    """Describes files that are no model of transformers; `with_weights`: only quantizations of safetensors."""
    kinds = dict(list(_FOREIGN.items())[:2]) if with_weights else _FOREIGN
    kind_found = next((kind for pattern, kind in kinds.items() if next(folder.glob(pattern), None)), "")
    return f"it holds {kind_found}; compile the original model, as transformers saves it" if kind_found else ""


def _check_types(folder: Path) -> None:
    content = read_object(folder / "config.json")
    for name, kind in _TYPES.items():
        if (value := content.get(name)) is not None and not isinstance(value, kind):
            raise SetupError(f"{folder}: config.json has {name} {value!r:.60}, which is no {_WORDS[kind]}; correct it")
    for name in _SIZES:
        if isinstance(value := content.get(name), int) and not 0 < value < _TOO_LARGE:
            raise SetupError(f"{folder}: config.json has {name} {value!r:.20}, which no model has; correct it")
    _check_counts(folder, content)
    if not all(isinstance(name, str) for name in content.get("architectures") or ()):
        raise SetupError(f"{folder}: config.json has architectures that are no names; correct them")


def _check_counts(folder: Path, content: Mapping[str, Any]) -> None:
    """Raises SetupError if config.json, or a config nested in it, contains a count above its limit."""
    for name, value in content.items():
        if isinstance(value, dict) and name.endswith("config"):  # label2id may have a label "layer"
            _check_counts(folder, value)
        max_count = next((max_count for end, max_count in _MOST.items() if f"_{name}".endswith(f"_{end}")), math.inf)
        for count in value if isinstance(value, list) else [value]:
            if isinstance(count, int) and count > max_count:
                raise SetupError(
                    f"{folder}: config.json has {name} {count!r:.20}, and a model has at most {max_count:,}; correct it"
                )


def check_configuration(folder: Path, content: Mapping[str, Any]) -> None:
    """Raises SetupError if config.json describes a model that is not supported, or that would give wrong results."""
    for find, sentence in _CONFIGURATIONS:
        if fault := find(content):
            raise SetupError(f"{folder}: {sentence.format(fault)}")


def reads_of(config: Any, architecture: str) -> Reads | None:
    """Returns the inputs of a model, or None if its kind does not determine them."""
    kind = config.model_type
    if kind in IMAGE_TEXT_KINDS and not architecture.endswith("ForImageClassification"):
        return "both"
    takes_pixels = getattr(getattr(transformers, architecture or "", None), "main_input_name", "") == "pixel_values"
    if takes_pixels or kind.endswith("_vision_model"):
        return "images"
    takes_images = any(kind in names for names in _IMAGE_KINDS)
    takes_texts = kind in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    return ("images" if takes_images else "texts") if takes_images != takes_texts else None


def check_kind(folder: Path, config: Any, architecture: str, task: str) -> None:
    """Raises SetupError if the model does not take the task's inputs, such as texts for a model of images."""
    reads = reads_of(config, architecture)
    if reads is None or reads == TASKS[task].reads:
        return
    inputs, others = _TASKS_OF[reads]
    problem = f"{architecture or config.model_type} takes {inputs}, so it cannot have the task {task}"
    raise SetupError(f"{folder}: {problem}; leave out --task, or choose {others}")


def check_labels(folder: Path, config: Any) -> None:
    """Raises SetupError if labels are not texts, or not numbered from 0."""
    names = {index: config.id2label.get(index) for index in range(config.num_labels)}
    if bad := [f"{index}: {name!r}" for index, name in names.items() if not isinstance(name, str)]:
        raise SetupError(
            f"{folder}: config.json has no name for each label (id2label has {', '.join(bad[:_SHOWN])}); write there, "
            f"and in label2id, a text for each number from 0 to {config.num_labels - 1}"
        )


_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*_linear.pt")  # for linear layers see m3.py
_GRAPHS = ("model.onnx", "model.onnx_data", "model.onnx.data")
# Configurations, tokenizers of every kind, and modules of sentence-transformers. Weights of other frameworks are not
# downloaded.
_DOWNLOADS = ("*.json", "*.jinja", "*.txt", "*.model", "*.spm", "*.py", "README.md", "adapter_model.bin", *_WEIGHTS)
_NOT_DOWNLOADED = ("onnx/*", "openvino/*", "tf_*", "flax_*", "*.onnx*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model's files on this machine.

    - `revision`: the commit on the Hub.
    - `base`: the model into which an adapter was merged.
    - `others`: names of all files on the Hub, also of files that were not downloaded.
    """

    location: str
    folder: Path
    revision: str | None
    base: str = ""
    others: tuple[str, ...] = ()

    def describe(self) -> Source:
        files, digest = {*walk_files(self.folder)}, hashlib.sha256()
        shards = {path for path in _shards(self.folder) if path.is_file()}
        weights = (shards | _named(files, _WEIGHTS)) or _named(files, _GRAPHS) or files
        for path in sorted(weights):
            digest.update(f"{path.relative_to(self.folder)} {file_sha256(path)}\n".encode())
        return Source(location=self.location, revision=self.revision, base=self.base, weights_sha256=digest.hexdigest())


def find_source(source: str, revision: str | None, *, is_adapter: bool = False) -> ModelSource:
    """Finds a model's or an adapter's files. Downloads them if `source` is no local folder. Raises SetupError."""
    check_is_there(source)
    folder = Path(source)
    if folder.is_dir():
        _check(folder, is_adapter)
        return ModelSource(str(folder.resolve()), folder, None)
    try:
        snapshot = huggingface_hub.snapshot_download(
            source, revision=revision, allow_patterns=list(_DOWNLOADS), ignore_patterns=list(_NOT_DOWNLOADED)
        )
        if not any(next(Path(snapshot).rglob(pattern), None) for pattern in _WEIGHTS):
            graphs = [f"{folder}{name}" for name in _GRAPHS for folder in ("", "onnx/")]
            huggingface_hub.snapshot_download(source, revision=revision, allow_patterns=graphs)
    except GatedRepoError as error:
        advice = "log in with `hf auth login`"
        raise SetupError(f"{source}: the Hub gives it to accounts with access only; {advice}") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise SetupError(f"{source}: neither a local folder nor a model on the Hub") from error
    except RevisionNotFoundError as error:
        raise SetupError(f"{source}: on the Hub, but without a revision {revision!r}") from error
    # The Hub's library raises its own errors, and the errors of its HTTP library, which differs between versions.
    except Exception as error:
        raise SetupError(
            f"{source}: no local folder, and the Hub cannot be reached to download it; where "
            f"it can, run: hf download {source} --local-dir DIR, and compile the folder DIR"
        ) from error
    _check(Path(snapshot), is_adapter)
    others: list[str] = []
    with contextlib.suppress(Exception):  # the model was downloaded before, and the Hub cannot be reached now
        others = huggingface_hub.list_repo_files(source, revision=Path(snapshot).name)
    return ModelSource(source, Path(snapshot), Path(snapshot).name, others=tuple(others))


def _check(folder: Path, is_adapter: bool) -> None:
    check_files(folder)
    for _ in _shards(folder):
        pass
    if is_adapter:
        if not (folder / ADAPTER_CONFIG).is_file():
            raise SetupError(f"{folder}: no adapter: it has no {ADAPTER_CONFIG}; leave out --merge-adapter")
        return
    refuse_adapter(folder)
    if foreign_form(folder):
        return
    kind = next((kind for kind, _ in read_modules(folder)), "Transformer")
    if kind in _WITHOUT_TRANSFORMER or not (transformer_folder(folder) / "config.json").is_file():
        foreign = foreign_files(folder)
        begins = f"; modules.json begins with {kind}, and supported are models that begin with a Transformer"
        others = (begins if kind != "Transformer" else "") + (f"; {foreign}" if foreign else "")
        raise SetupError(f"{folder}: no model: it has no config.json{others}")
    _check_types(transformer_folder(folder))
    if foreign := foreign_files(transformer_folder(folder), with_weights=True):
        raise SetupError(f"{folder}: {foreign}, with --dtype int8 to have it quantized here")
