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
from neuronpipe.core.errors import SetupError
from tests.models.compiling import compile_model
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
    return compile_model(source, repository, task, name=name, report=report, backend="fake")


def _configured(**values: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    return change


def test_a_model_of_texts_is_refused_for_a_task_of_images(sources: dict[str, Path], tmp_path: Path) -> None:
    sentence = (
        "BertForSequenceClassification takes texts, so it cannot have the task image_classification; leave out --task"
    )
    with pytest.raises(SetupError, match=sentence):
        _compile(sources["classifier"], tmp_path, task="image_classification")


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


def test_own_code_that_transformers_has_by_now_is_told_and_not_run(sources: dict[str, Path], tmp_path: Path) -> None:
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
