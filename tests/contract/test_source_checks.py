"""What is wrong with a model's folder is told in one sentence that says what to do.

Runs with transformers 4.57.6 as well: .venv-transformers4/bin/python -m pytest tests/contract/test_source_checks.py
"""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from demo.model import find_minilm
from neuronpipe.compiler import CompileRequest, compile_bundle
from neuronpipe.core.errors import SetupError
from tests.models.images import make_image_source
from tests.models.repository import bert_config, save

pytestmark = pytest.mark.sampled

Change = Callable[[Path], object]


def _compile(
    source: Path,
    repository: Path,
    *,
    task: str = "",
    name: str = "m",
    report: Callable[[str], None] = lambda line: None,
) -> Any:
    return compile_bundle(CompileRequest(str(source), task, repository, name, backend="fake"), report)


def _configured(**values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def _with(name: str, content: str | bytes) -> Change:
    return lambda folder: (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())


class _Malicious:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/neuronpipe-was-here",)


def _in_pytorchs_form(content: object) -> Change:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        if isinstance(content, bytes):
            (folder / "pytorch_model.bin").write_bytes(content)
        else:
            torch.save(content, folder / "pytorch_model.bin")

    return change


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])


def _only_adapter(folder: Path) -> None:
    (folder / "config.json").unlink()
    _ADAPTER(folder)


def _only_onnx(folder: Path) -> None:
    (folder / "onnx").mkdir()
    (folder / "model.safetensors").rename(folder / "onnx" / "model.onnx")


def _static_vectors(folder: Path) -> None:
    (folder / "config.json").unlink()
    module = {"path": "0_StaticEmbedding", "type": "sentence_transformers.models.StaticEmbedding"}
    (folder / "modules.json").write_text(json.dumps([module]))


def _with_token_beyond(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens(["<brand>"])
    tokenizer.save_pretrained(folder)


_ADAPTER = _with("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "owner/base"}')
_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
_MERGE = "made for owner/base; --merge-adapter compiles the two as one (pip install 'neuronpipe[compile-adapters]')"


@pytest.mark.parametrize(
    ("change", "task", "sentence"),
    [
        pytest.param(
            _configured(id2label={"0": "a", "1": None, "2": 3, "3": "d"}),
            "text_classification",
            "source: config.json has no name for each label (id2label has 1: None, 2: 3); write there, and in "
            "label2id, a text for each "
            "number from 0 to 3",
            id="labels that are no texts",
        ),
        pytest.param(
            _configured(id2label={"0": "a", "1": "b", "2": "c", "7": "d"}, label2id={"a": 0, "b": 1, "c": 2, "d": 7}),
            "",
            "(id2label has 3: None); write there",
            id="labels with gaps",
        ),
        pytest.param(
            _with_token_beyond,
            "",
            "source: its tokenizer has tokens beyond the model's 30522 embeddings (<brand>); train the model after "
            "resize_token_embeddings",
            id="token beyond the embeddings",
        ),
        pytest.param(_only_adapter, "", f"source: holds an adapter (LoRA), not a whole model, {_MERGE}", id="adapter"),
        pytest.param(
            _ADAPTER, "", f"source: holds an adapter (LoRA) beside its weights, {_MERGE}", id="adapter beside weights"
        ),
        pytest.param(
            _with("model.safetensors", _POINTER),
            "",
            "/model.safetensors: a pointer of Git LFS, not the file itself",
            id="LFS",
        ),
        pytest.param(
            _with("tokenizer.json", _POINTER), "", "/tokenizer.json: a pointer of Git LFS", id="LFS tokenizer"
        ),
        pytest.param(_cut, "", "cannot load it: model.safetensors is damaged or cut off (", id="cut safetensors"),
        pytest.param(
            _in_pytorchs_form(b"no weights"),
            "",
            "pytorch_model.bin is damaged or cut off; get the file again",
            id="broken .bin",
        ),
        pytest.param(
            _in_pytorchs_form({"weight": _Malicious()}),
            "",
            "cannot load it: pytorch_model.bin holds more than numbers, and to read it might run its code; get the "
            "weights as safetensors",
            id="malicious pickle",
        ),
        pytest.param(
            _configured(model_type="t5", architectures=["T5EncoderModel"]),
            "",
            "source: T5EncoderModel is the encoder of a model with a decoder, which is not supported; take a model of "
            "an encoder only",
            id="T5 encoder",
        ),
        pytest.param(
            _configured(quantization_config={"load_in_8bit": True, "_load_in_8bit": True}),
            "",
            "source: its weights are quantized by bitsandbytes; compile the original in its place, with --dtype int8",
            id="bitsandbytes",
        ),
        pytest.param(
            _configured(quantization_config={"quant_method": "gptq"}),
            "",
            "its weights are quantized by gptq;",
            id="GPTQ",
        ),
        pytest.param(
            _only_onnx,
            "",
            "source: has no weights of PyTorch, only the graph model.onnx, which the back end openvino takes; leave "
            "out --backend fake",
            id="ONNX only",
        ),
        pytest.param(
            _static_vectors,
            "",
            "source: no model: it has no config.json; modules.json begins with StaticEmbedding, and supported are "
            "models that begin with a Transformer",
            id="static vectors",
        ),
        pytest.param(
            _configured(auto_map={"AutoModel": "owner/name--modeling.JinaBertModel"}),
            "",
            "source: config.json names code of its own (auto_map: JinaBertModel), which is not run, and what "
            "transformers has for its",
            id="code of its own",
        ),
        pytest.param(
            lambda folder: None,
            "image_classification",
            "source: BertForSequenceClassification takes texts, so it cannot have the task image_classification; "
            "leave out --task",
            id="texts for images",
        ),
    ],
)
def test_a_folder_is_refused_with_what_is_wrong_and_what_to_do(
    change: Change, task: str, sentence: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    source = shutil.copytree(sources["classifier"], tmp_path / "source")
    change(source)
    with pytest.raises(SetupError, match=re.escape(sentence)) as refused:
        _compile(source, tmp_path, task=task)
    assert "\n" not in str(refused.value)
    assert not Path("/tmp/neuronpipe-was-here").exists()


def test_a_model_of_images_is_refused_for_a_task_of_texts_and_has_no_longest_input(tmp_path: Path) -> None:
    source = make_image_source(tmp_path / "source", "ViT")
    sentence = (
        "ViTForImageClassification takes images, so it cannot have the task text_classification; leave out "
        "--task, or choose --task "
    )
    with pytest.raises(SetupError, match=sentence):
        _compile(source, tmp_path, task="text_classification")
    lines: list[str] = []
    _compile(source, tmp_path, report=lines.append)
    assert "32 x 32 pixels" in "".join(lines)
    assert "longest input" not in "".join(lines)


def test_files_that_are_not_in_the_bundle_are_told(sources: dict[str, Path], tmp_path: Path) -> None:
    source = shutil.copytree(sources["classifier"], tmp_path / "source")
    lines: list[str] = []
    _compile(source, tmp_path, name="one", report=lines.append)
    assert "not used" not in "".join(lines)
    (source / "sparse_linear.pt").write_bytes(b"x")
    _compile(source, tmp_path, name="two", report=lines.append)
    assert "      not used      sparse_linear.pt; the bundle has nothing of it" in "\n".join(lines).splitlines()


def test_code_of_its_own_that_transformers_has_by_now_is_told_and_not_run(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    source = shutil.copytree(sources["classifier"], tmp_path / "source")
    _configured(auto_map={"AutoModelForSequenceClassification": "modeling.BertForSequenceClassification"})(source)
    lines: list[str] = []
    _compile(source, tmp_path, report=lines.append)
    assert "      its own code (auto_map) is not run; BertForSequenceClassification of transformers is" in lines


def test_outputs_that_are_no_numbers_are_refused_before_anything_is_converted(tmp_path: Path) -> None:
    model = transformers.BertForSequenceClassification(bert_config())
    source = save(model, tmp_path / "source")
    with torch.no_grad():
        model.classifier.weight.fill_(3e38)  # numbers, whose sum is infinite
    model.save_pretrained(source)
    with pytest.raises(
        SetupError,
        match="outputs of BertForSequenceClassification are also NaN or infinite in PyTorch: its weights are damaged",
    ):
        _compile(source, tmp_path)


@pytest.mark.parametrize("unreadable", ["model.safetensors", ""], ids=["file", "folder"])
def test_files_of_another_user_are_told_with_the_command_that_opens_them(
    unreadable: str, sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = shutil.copytree(sources["classifier"], tmp_path / "source")
    refused = source / unreadable
    opened, listed = Path.open, os.scandir

    # Not by file modes: tests may run as root, who reads everything.
    def open_(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    def scandir(path: Any) -> Any:
        if not isinstance(path, int) and Path(path) == refused:
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(Path, "open", open_)
    monkeypatch.setattr(os, "scandir", scandir)
    monkeypatch.setattr(os, "geteuid", lambda: 65532)
    sentence = f"{refused}: not readable for user 65532; its owner can run: chmod -R a+rX {source}"
    with pytest.raises(SetupError, match=re.escape(sentence)):
        _compile(source, tmp_path)


@pytest.mark.parametrize("name", ["a,b", "a b"])
def test_names_that_settings_cannot_list_are_refused(name: str, sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=f"name '{name}' has a comma or a space, .* choose another with --name"):
        _compile(sources["classifier"], tmp_path, name=name)


def test_the_old_layout_of_sentence_transformers_compiles_as_the_new_one(tmp_path: Path) -> None:
    old = tmp_path / "old"
    new = shutil.copytree(find_minilm(), tmp_path / "new")
    shutil.copytree(
        new, old / "0_Transformer", ignore=shutil.ignore_patterns("modules.json", "*_Pooling", "*_Normalize")
    )
    for folder in new.glob("[0-9]_*"):
        shutil.copytree(folder, old / folder.name)
    modules = json.loads((new / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (old / "modules.json").write_text(json.dumps(modules))
    (old / "config.json").write_text('{"__version__": "0.2.6"}')
    before, after = (_compile(folder, tmp_path, name=folder.name) for folder in (new, old))
    assert after.spec.model_copy(update={"name": "new"}) == before.spec
    assert after.tokenizer_json() == before.tokenizer_json()
