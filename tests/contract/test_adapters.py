"""`--merge-adapter`: an adapter of peft compiled as one model with its base, which answers as transformers' merged
model does.
"""

import dataclasses
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers

from neuronpipe import cli
from neuronpipe.bundles.repository import Bundle
from neuronpipe.compiler import CompileRequest, compile_bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.backends import load_backend
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest, compute
from tests.models.adapters import save_adapter
from tests.models.repository import bert_config, save, tokenizer

# Raised inside peft and transformers; nothing that we call.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning"),
    pytest.mark.sampled,
]

_TEXTS = ["A fine day.", "The train is late again, and nobody says why."]
_LORA: dict[str, Any] = {"r": 4, "lora_alpha": 16, "target_modules": ["query", "value"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A masked language model, as adapters are made for: it has no classifier."""
    return save(transformers.BertForMaskedLM(bert_config()), tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def classifier_adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An adapter of three labels for that base, and the base with it."""
    folder = tmp_path_factory.mktemp("adapter") / "adapter"
    # The pooler is made with the head: a masked language model has none of its own.
    model = transformers.BertForSequenceClassification.from_pretrained(base, num_labels=3)
    return folder, save_adapter(model, folder, **_LORA, task_type="SEQ_CLS", modules_to_save=["classifier", "pooler"])


def _merged(source: Path, repository: Path, **changes: Any) -> Bundle:
    request = CompileRequest(str(source), "", repository, "model", merge_adapter=True, max_divergence=1e-3)
    return compile_bundle(dataclasses.replace(request, **changes), lambda line: None)


async def _outputs(bundle: Bundle) -> Mapping[str, Any]:
    artifact = bundle.artifact("openvino")
    with bundle.artifact_files(artifact) as files:
        request = BackendRequest(bundle.spec, files, artifact.properties, cores=1, threads=1)
        backend = load_backend("openvino", request)
    try:
        return await compute(backend, 0, {name: array.numpy() for name, array in _encoded().items()})
    finally:
        backend.close()


def _encoded() -> Any:
    return tokenizer()(_TEXTS, padding=True, return_tensors="pt")


async def test_merged_classifier_answers_as_transformers_with_the_adapter_does(
    classifier_adapter: tuple[Path, Any], base: Path, tmp_path: Path
) -> None:
    folder, adapted = classifier_adapter
    bundle = _merged(folder, tmp_path)
    with torch.inference_mode():
        expected = adapted.merge_and_unload()(**_encoded()).logits.numpy()
    # float32 in another order of sums; the adapter itself changes the logits by more than 0.1.
    np.testing.assert_allclose((await _outputs(bundle))["logits"], expected, rtol=0, atol=1e-4)
    assert bundle.spec.task == "text_classification"
    assert bundle.spec.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert bundle.manifest.source.location == str(folder.resolve())
    assert bundle.manifest.source.base == str(base.resolve())


def test_labels_of_the_adapters_configuration_are_kept(classifier_adapter: tuple[Path, Any], tmp_path: Path) -> None:
    folder = shutil.copytree(classifier_adapter[0], tmp_path / "adapter")
    labels = {0: "good", 1: "bad", 2: "mixed"}
    config = bert_config(id2label=labels, label2id={label: index for index, label in labels.items()})
    config.save_pretrained(folder)
    assert _merged(folder, tmp_path / "repository").spec.labels == ("good", "bad", "mixed")


async def test_merged_embedding_model_keeps_the_pooling_of_its_base(tmp_path: Path) -> None:
    model = transformers.BertModel(bert_config())
    base = save(model, tmp_path / "base")
    kinds = {"Transformer": "", "Pooling": "1_Pooling"}
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in kinds.items()]
    (base / "modules.json").write_text(json.dumps(modules))
    (base / "1_Pooling").mkdir()
    (base / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode": "cls"}))
    model = transformers.BertModel.from_pretrained(base)
    adapted = save_adapter(model, tmp_path / "adapter", **_LORA, task_type="FEATURE_EXTRACTION")
    bundle = _merged(tmp_path / "adapter", tmp_path / "repository")
    with torch.inference_mode():
        expected = adapted(**_encoded()).last_hidden_state[:, 0].numpy()
    np.testing.assert_allclose((await _outputs(bundle))["sentence_embedding"], expected, rtol=0, atol=1e-4)


def test_base_model_option_goes_before_what_the_adapter_names(
    classifier_adapter: tuple[Path, Any], base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = _with_settings(classifier_adapter[0], tmp_path, base_model_name_or_path="/no/such/base")
    arguments = f"compile {folder} --merge-adapter --repository {tmp_path}/repository --backend torch".split()
    with pytest.raises(SystemExit):
        cli.main(arguments)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"neuronpipe: the base model of {folder}: /no/such/base: no such folder; adapter_config.json names it, "
        "--base-model names another place"
    )
    cli.main([*arguments, "--base-model", str(base)])
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path}/repository/adapter/1\n"
    assert f"      merged into {base.resolve()}" in captured.err.splitlines()


def _with_settings(adapter: Path, tmp_path: Path, **settings: Any) -> Path:
    folder = shutil.copytree(adapter, tmp_path / "adapter")
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))
    return folder


@pytest.mark.parametrize(
    ("settings", "changes", "sentence"),
    [
        (
            {"task_type": "CAUSAL_LM"},
            {},
            "the adapter is for CAUSAL_LM, a model that writes text, with which adapters are not merged here; merge "
            r"it with peft \(merge_and_unload\)",
        ),
        ({"base_model_name_or_path": None}, {}, "adapter_config.json names no base model; name it with --base-model"),
        ({"target_modules": ["none_such"]}, {}, "does not fit its base model"),
        ({"target_modules": ["query"]}, {}, "does not fit its base model"),
        (
            {},
            {"task": "token_classification"},
            "the model was not trained for this task; it is a BertForSequenceClassification, not a Bert",
        ),
        (
            {"task_type": None, "auto_mapping": {"base_model_class": "NoSuchModel"}},
            {},
            "is for a model NoSuchModel, which transformers",
        ),
    ],
    ids=["decoder", "no base", "modules that are not there", "weights that are not used", "task", "class"],
)
def test_adapter_that_cannot_be_merged_is_refused_with_the_reason(
    settings: dict[str, Any],
    changes: dict[str, Any],
    sentence: str,
    classifier_adapter: tuple[Path, Any],
    tmp_path: Path,
) -> None:
    folder = _with_settings(classifier_adapter[0], tmp_path, **settings)
    with pytest.raises(SetupError, match=sentence):
        _merged(folder, tmp_path / "repository", **changes)
    assert list((tmp_path / "repository").rglob("*")) == []


def test_base_of_another_width_is_refused(classifier_adapter: tuple[Path, Any], tmp_path: Path) -> None:
    config = bert_config()
    config.hidden_size = 64
    wider = save(transformers.BertForMaskedLM(config), tmp_path / "other")
    with pytest.raises(SetupError, match=r"does not fit its base model .*/other; name the right one with --base-model"):
        _merged(classifier_adapter[0], tmp_path / "repository", base_model=str(wider))


def test_head_that_neither_has_is_refused_like_any_that_was_not_trained(base: Path, tmp_path: Path) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(base, num_labels=2)
    save_adapter(model, tmp_path / "adapter", **_LORA)
    with pytest.raises(SetupError, match=r"its weights lack bert\.pooler\.dense\.bias, .*, classifier\.bias"):
        _merged(tmp_path / "adapter", tmp_path / "repository")


def test_prompts_that_were_trained_cannot_be_merged(base: Path, tmp_path: Path) -> None:
    model = transformers.BertForSequenceClassification.from_pretrained(base, num_labels=2)
    peft.get_peft_model(model, peft.PromptTuningConfig(task_type="SEQ_CLS", num_virtual_tokens=4)).save_pretrained(
        tmp_path / "adapter"
    )
    with pytest.raises(SetupError, match="an adapter of the kind PROMPT_TUNING cannot be merged; LoRA can"):
        _merged(tmp_path / "adapter", tmp_path / "repository")


def test_without_peft_the_extra_is_named(
    classifier_adapter: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(
        SetupError, match=r"--merge-adapter needs the package peft, .*: pip install 'neuronpipe\[compile-adapters\]'"
    ):
        _merged(classifier_adapter[0], tmp_path)


def test_options_for_adapters_are_refused_where_there_is_none(base: Path, tmp_path: Path) -> None:
    with pytest.raises(
        SetupError, match=r"base: no adapter: it has no adapter_config\.json; leave out --merge-adapter"
    ):
        _merged(base, tmp_path)
    with pytest.raises(SetupError, match="--base-model is for --merge-adapter"):
        _merged(base, tmp_path, merge_adapter=False, base_model="another")
