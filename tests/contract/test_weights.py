"""Weights that the task's graph reads must be in the model's files; others may be missing.

Runs with transformers 4.57.6 as well: .venv-transformers4/bin/python -m pytest tests/contract/test_weights.py
"""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from neuronpipe.compiler.modules import SourceModule, pretrained_model
from neuronpipe.compiler.own_code import in_known_form
from neuronpipe.compiler.source import ModelSource
from neuronpipe.compiler.tasks import SOURCE_TASKS, load_module
from neuronpipe.compiler.weights import find_read
from neuronpipe.core.errors import SetupError
from tests.models.architectures import ARCHITECTURES, make_source, tasks_of
from tests.models.compiling import compile_model
from tests.models.repository import bert_config, classifier, embedder, save, tagger

_LONGFORMER = "longformer.encoder.layer.1.attention.self"


def _compile(source: Path, task: str, repository: Path) -> None:
    compile_model(source, repository, task, backend="fake")


def _drop(source: Path, *keys: str) -> None:
    path = source / "model.safetensors"
    kept = {name: tensor for name, tensor in load_file(path).items() if not any(key in name for key in keys)}
    save_file(kept, path, {"format": "pt"})


def _load(source: Path, task: str) -> SourceModule:
    source = in_known_form(ModelSource(str(source), source, None), source.parent).folder
    return load_module(source, task, SOURCE_TASKS[task].load_tokenizer(source))


def _outputs(module: SourceModule) -> list[torch.Tensor]:
    batch = SOURCE_TASKS[module.task].encode(module, ["the quick brown fox"])
    with torch.inference_mode():
        return list(module.module(**{name: torch.from_numpy(batch[name]) for name in module.inputs}).values())


def _readers(module: SourceModule) -> set[str]:
    """The parameters of which an output depends: computed by changing each."""
    expected, found = _outputs(module), set()
    for name, parameter in pretrained_model(module.module).named_parameters():
        kept = parameter.clone()
        # Noise, as no attention changes where the same is added to all keys.
        parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        if not all(torch.equal(output, wanted) for output, wanted in zip(_outputs(module), expected, strict=True)):
            found.add(name)
        parameter.copy_(kept)
    return found


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("architecture", "task"),
    [
        (architecture, task)
        for architecture in ARCHITECTURES
        for task in ("text_classification", "sentence_embedding", "fill_mask", "image_classification")
        if task in tasks_of(architecture)
    ],
)
def test_a_graph_reads_the_weights_that_change_an_output_when_they_are_changed_and_no_others(
    architecture: str, task: str, tmp_path: Path
) -> None:
    module = _load(make_source(tmp_path / "source", architecture, task), task)
    expected = _readers(module)
    if (architecture, task) == ("Longformer", "text_classification"):
        # Its head sees the first token, which sees all by weights of its own. In the last layer the graph computes what
        # the others see as well, and takes none of it.
        expected |= {f"{_LONGFORMER}.{qkv}.{kind}" for qkv in ("query", "key", "value") for kind in ("weight", "bias")}
    pretrained_model(module.module).requires_grad_(True)
    assert set(find_read(module, SOURCE_TASKS[task].encode(module, ["one text"]))) == expected


def test_a_checkpoint_for_another_task_is_refused_with_what_it_is_and_what_to_do(tmp_path: Path) -> None:
    source = tagger(tmp_path / "source")
    sentence = (
        r"source: its weights lack bert\.pooler\.dense\.bias, bert\.pooler\.dense\.weight: the model was not trained "
        r"for this task; it is a BertForTokenClassification, not a BertForSequenceClassification: leave out --task, or "
        r"train it for the task first$"
    )
    with pytest.raises(SetupError, match=sentence):
        _compile(source, "text_classification", tmp_path)
    _compile(source, "", tmp_path)


def test_a_head_of_the_same_names_is_not_taken_for_another_task(tmp_path: Path) -> None:
    source = classifier(tmp_path / "source")
    with pytest.raises(
        SetupError, match="it is a BertForSequenceClassification, not a BertForTokenClassification: leave out --task"
    ):
        _compile(source, "token_classification", tmp_path)


def test_a_classifier_whose_file_lost_its_pooler_is_refused(tmp_path: Path) -> None:
    source = classifier(tmp_path / "source")
    _drop(source, "pooler")
    with pytest.raises(
        SetupError,
        match=r"its weights lack bert\.pooler\..*: its files lost what a BertForSequenceClassification is made of",
    ):
        _compile(source, "text_classification", tmp_path)


def test_a_pooler_that_the_graph_does_not_read_may_be_missing_and_leaves_no_trace(tmp_path: Path) -> None:
    source = embedder(tmp_path / "source")
    expected = _outputs(_load(source, "sentence_embedding"))
    _drop(source, "pooler")
    module = _load(source, "sentence_embedding")
    assert all(torch.equal(output, wanted) for output, wanted in zip(_outputs(module), expected, strict=True))
    assert not any(tensor.any() for name, tensor in module.module.state_dict().items() if "pooler" in name)
    assert not any(parameter.requires_grad for parameter in module.module.parameters())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_named(value: float, tmp_path: Path) -> None:
    model = transformers.BertForSequenceClassification(bert_config())
    source = save(model, tmp_path / "source")
    with torch.no_grad():
        model.bert.encoder.layer[0].output.dense.weight[3, 5] = value
    model.save_pretrained(source)
    with pytest.raises(
        SetupError, match=r"its weights bert\.encoder\.layer\.0\.output\.dense\.weight hold NaN or infinity; train"
    ):
        _compile(source, "text_classification", tmp_path)


def test_a_head_of_another_size_is_named_with_what_to_write_into_the_configuration(tmp_path: Path) -> None:
    source = save(transformers.BertForSequenceClassification(bert_config(num_labels=5)), tmp_path / "source")
    bert_config(architectures=["BertForSequenceClassification"]).save_pretrained(source)
    sentence = (
        r"its weights classifier\.bias, classifier\.weight have another shape than config\.json says, which "
        r"has 2 labels; give the name"
    )
    with pytest.raises(SetupError, match=sentence):
        _compile(source, "text_classification", tmp_path)


def test_a_weight_that_no_graph_reads_is_reported_and_a_head_of_training_is_not(tmp_path: Path) -> None:
    source = save(transformers.BertForPreTraining(bert_config()), tmp_path / "source")
    for task in ("sentence_embedding", "fill_mask"):
        assert "not used" not in _load(source, task).remarks
    weights = load_file(source / "model.safetensors")
    save_file(weights | {"linear.weight": torch.zeros(16, 32)}, source / "model.safetensors", {"format": "pt"})
    lines: list[str] = []
    compile_model(source, tmp_path, "sentence_embedding", report=lines.append, backend="fake")
    expected = "      not used      the weights linear.weight: transformers has no such weights in BertModel"
    assert expected in "\n".join(lines).splitlines()
