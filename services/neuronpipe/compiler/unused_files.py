"""Finds the weights and modules in a model's folder from which no part of its bundle is made."""

import fnmatch
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from neuronpipe.compiler.m3 import HEADS, has_heads
from neuronpipe.compiler.routers import read_router
from neuronpipe.compiler.saved_files import read_object
from neuronpipe.compiler.sentence_transformers import read_modules, transformer_folder

# Tasks whose graphs contain all modules of sentence-transformers. Graphs of other tasks contain the first module alone.
_WITH_MODULES = frozenset(
    ("sentence_embedding", "sentence_similarity", "multi_vector_embedding", "sparse_embedding", "rerank")
)
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy", ".npz")
# The same weights in another format or type, and files that training leaves behind.
_SAME = (
    *("model.*.safetensors", "pytorch_model.*.bin", "consolidated*", "tf_model*", "flax_model*", "rust_model*"),
    *("model.ckpt*", "openvino_model*", "training_args.bin", "optimizer*", "scheduler*", "rng_state*", "scaler*"),
)
_SAME_FOLDERS = frozenset(("onnx", "openvino", "coreml", "gguf", "original", "metal"))
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
# Modules without weights that do not change results, or that the postprocessor replaces.
_WITHOUT_TRACE = ("Dropout", "Normalize")
_SHOWN = 8


def unused_files(folder: Path, task: str, names: Iterable[str] = ()) -> list[str]:
    """Names the modules and files of weights in a folder that the bundle of a task does not use, for a user.

    `names`: files of the model that were not downloaded. Other formats of the used weights do not count. Raises
    SetupError for a modules.json that cannot be read.
    """
    modules = read_modules(folder)
    used = [transformer_folder(folder), *(path for _, path in modules if task in _WITH_MODULES)]
    if router := read_router(folder):
        used += [path for side in router.modules.values() for _, path in side]
    unused = [
        f"module {kind}"
        for kind, path in modules[1:]
        if path not in used and kind not in _WITHOUT_TRACE and task not in _WITH_MODULES
    ]
    loaded = {name for used_folder in used for name in _loaded(folder, used_folder)}
    if task in _WITH_MODULES and has_heads(folder):
        loaded.update(HEADS)
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    other_files = sorted(
        name for name in present.union(names) if _is_other(PurePosixPath(name), {*present, *names}, loaded)
    )
    unused += other_files
    return [*unused[:_SHOWN], f"{len(unused) - _SHOWN} others"] if len(unused) > _SHOWN else unused


def _loaded(folder: Path, used: Path) -> Iterator[str]:
    """Yields the weight files that are loaded from a part of the folder, and their names in PyTorch's format."""
    within = used.resolve().relative_to(folder.resolve())
    for name in ("model.safetensors", "pytorch_model.bin"):
        yield (within / name).as_posix()
    for name in _INDEXES:
        if (used / name).is_file():
            shards = read_object(used / name).get("weight_map")
            yield from (
                (within / str(shard)).as_posix() for shard in (shards if isinstance(shards, dict) else {}).values()
            )


def _is_other(path: PurePosixPath, present: set[str], loaded: set[str]) -> bool:
    if path.suffix not in _WEIGHTS or str(path) in loaded or any(part.startswith(".") for part in path.parts):
        return False
    if not _SAME_FOLDERS.isdisjoint(path.parts) or any(fnmatch.fnmatch(path.name, pattern) for pattern in _SAME):
        return False
    is_pytorch = fnmatch.fnmatch(path.name, "pytorch_model*.bin")
    return not (is_pytorch and any(str(path.parent / name) in present for name in ("model.safetensors", _INDEXES[0])))
