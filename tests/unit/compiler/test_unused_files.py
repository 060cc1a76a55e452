"""compiler/unused_files.py: what a user is told of a model's folder that is not in the bundle."""

import json
from pathlib import Path

import huggingface_hub
import pytest

from neuronpipe.compiler.source import find_source
from neuronpipe.compiler.unused_files import unused_files

_WEIGHTS = ("config.json", "model.safetensors")
_MODULES = ("Transformer", "Pooling", "Dense", "Dropout", "Normalize")


def _folder(folder: Path, *names: str, modules: tuple[str, ...] = ()) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    if modules:
        listed = [
            {"type": f"sentence_transformers.models.{kind}", "path": f"{number}_{kind}" if number else ""}
            for number, kind in enumerate(modules)
        ]
        (folder / "modules.json").write_text(json.dumps(listed))
    return folder


def test_heads_beside_the_weights_are_named(tmp_path: Path) -> None:
    heads = ("sparse_linear.pt", "head/model_head.pkl", "other.safetensors", "9_Dense/model.safetensors")
    folder = _folder(tmp_path, *_WEIGHTS, *heads, "1_Pooling/config.json", modules=_MODULES[:2])
    assert unused_files(folder, "sentence_embedding") == sorted(heads)


@pytest.mark.parametrize(
    "name",
    [
        *("README.md", "tokenizer.json", "sentencepiece.bpe.model", "onnx/model.onnx", "onnx/weights.bin"),
        *("openvino/openvino_model.bin", "openvino_model.bin", "tf_model.h5", "flax_model.msgpack", "rust_model.ot"),
        *("pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.fp16.safetensors", "model.onnx"),
        *("training_args.bin", "optimizer.pt", "rng_state_0.pth", "original/consolidated.00.pth", "model.Q4_0.gguf"),
        *("2_Dense/pytorch_model.bin", ".cache/a.bin"),
    ],
)
def test_other_formats_of_the_same_weights_and_what_holds_none_are_not_named(tmp_path: Path, name: str) -> None:
    folder = _folder(tmp_path, *_WEIGHTS, "2_Dense/config.json", "2_Dense/model.safetensors", name, modules=_MODULES)
    assert unused_files(folder, "sentence_embedding") == []


def test_shards_are_used(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "config.json", "a.safetensors", "b.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert unused_files(folder, "fill_mask") == ["b.safetensors"]


def test_modules_are_used_by_the_tasks_that_have_them(tmp_path: Path) -> None:
    folder = _folder(tmp_path, *_WEIGHTS, "2_Dense/config.json", "2_Dense/model.safetensors", modules=_MODULES)
    assert unused_files(folder, "rerank") == []
    assert unused_files(folder, "feature_extraction") == ["module Pooling", "module Dense", "2_Dense/model.safetensors"]


def test_a_transformer_in_a_folder_of_its_own_is_used(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "0_Transformer/config.json", "0_Transformer/model.safetensors", "head.pt")
    (folder / "modules.json").write_text(
        '[{"type": "sentence_transformers.models.Transformer", "path": "0_Transformer"}]'
    )
    assert unused_files(folder, "sentence_embedding") == ["head.pt"]


def test_a_long_list_has_an_end(tmp_path: Path) -> None:
    folder = _folder(tmp_path, *_WEIGHTS, *(f"{number}.pt" for number in range(10)))
    assert unused_files(folder, "fill_mask") == [*(f"{number}.pt" for number in range(8)), "2 others"]


@pytest.mark.parametrize("is_reached", [True, False])
def test_files_that_stay_on_the_hub_are_named_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reached: bool
) -> None:
    folder = _folder(tmp_path / "c0ffee", *_WEIGHTS)

    def list_repo_files(source: str, revision: str) -> list[str]:
        if not is_reached:
            raise OSError
        assert (source, revision) == ("some/model", "c0ffee")
        return [*_WEIGHTS, "sparse_linear.pt", "pytorch_model.bin"]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(folder))
    monkeypatch.setattr(huggingface_hub, "list_repo_files", list_repo_files)
    source = find_source("some/model", None)
    assert unused_files(source.folder, "fill_mask", source.others) == ["sparse_linear.pt"] * is_reached
