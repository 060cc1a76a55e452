"""Where models are cut into parts, what a part holds, and what is not cut. test_architectures.py says that the parts
answer right.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from neuronpipe.compiler import CompileRequest, PipelineOptions, compile_bundle
from neuronpipe.compiler.pipeline_parallel import PipelinedModel
from neuronpipe.compiler.tasks import SOURCE_TASKS, load_module
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.backends import part_turns
from neuronpipe.stages.neuron_executor.backends.base import CoreLost
from neuronpipe.stages.neuron_executor.backends.part_turns import PartTurns
from tests.models.compiling import compile_model
from tests.models.decoders import save_decoder
from tests.models.repository import SMALL, save
from tests.models.tokenizers import unigram, word_piece

_LAYERS = 6


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., PipelinedModel]:
    """A model of six layers with a head, in parts."""

    def make(head: str, task: str, *options: Any, vocabulary: int = 0) -> PipelinedModel:
        tokenizer = word_piece(max_tokens=64)
        config = transformers.BertConfig(
            **{**SMALL, "num_hidden_layers": _LAYERS}, vocab_size=vocabulary or len(tokenizer)
        )
        folder = save(getattr(transformers, head)(config), tmp_path_factory.mktemp("source"), tokenizer)
        module = load_module(folder, task, SOURCE_TASKS[task].load_tokenizer(folder))
        example = {name: torch.ones(2, 8, dtype=torch.int64) for name in module.inputs}
        return PipelinedModel(module, example).cut(PipelineOptions(*options))

    return make


def test_layers_are_shared_out_evenly_by_time(cut: Callable[..., PipelinedModel]) -> None:
    classifier = ("BertForSequenceClassification", "text_classification")
    assert cut(*classifier, 2).firsts == (0, 3)
    assert cut(*classifier, 3).firsts == (0, 2, 4)
    assert cut(*classifier, _LAYERS).firsts == tuple(range(_LAYERS))
    # A head that multiplies more weights than all layers has a part of its own but for one layer.
    assert cut("BertForMaskedLM", "fill_mask", 3).firsts == (0, 2, 5)


def test_by_memory_a_large_vocabulary_counts(cut: Callable[..., PipelinedModel]) -> None:
    pipeline = cut("BertForSequenceClassification", "text_classification", 3, "memory", vocabulary=2_000)
    assert pipeline.firsts == (0, 1, 4)
    sizes = []
    for number in range(3):
        with pipeline.part(number) as (part, example):
            sizes.append(sum(parameter.numel() for parameter in part.module.parameters()))
            assert tuple(example) == part.inputs
    first, *others = sizes
    # Embeddings are in the first part only, and the head in the last.
    assert first > 2_000 * 32 > 2 * max(others)


def test_the_model_is_whole_again_after_a_part_was_used(cut: Callable[..., PipelinedModel]) -> None:
    pipeline = cut("BertForSequenceClassification", "text_classification", 2)
    module = pipeline.source.module
    names = [name for name, _ in module.named_parameters()]
    with pipeline.part(1) as (part, _):
        assert len(list(part.module.parameters())) < len(names)
    assert [name for name, _ in module.named_parameters()] == names


def test_a_weight_that_the_example_hides_stays_where_it_is_read(tmp_path: Path) -> None:
    """transformers makes the row of the padding zero, and traces for Neuron are made of padding."""
    tokenizer = unigram(max_tokens=64)
    config = transformers.XLMRobertaConfig(vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id, **SMALL)
    model = transformers.XLMRobertaForSequenceClassification(config)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert not model.roberta.embeddings.word_embeddings.weight[tokenizer.pad_token_id].any()
    task = "text_classification"
    module = load_module(tmp_path, task, SOURCE_TASKS[task].load_tokenizer(tmp_path))
    text = {"input_ids": torch.arange(5, 21).view(2, 8), "attention_mask": torch.ones(2, 8, dtype=torch.int64)}
    padding = text | {"input_ids": torch.full((2, 8), tokenizer.pad_token_id)}
    (found,) = PipelinedModel(module, padding, (0, 1)).run([text])
    torch.testing.assert_close(found, {name: tensor.detach() for name, tensor in module.module(**text).items()})


def test_a_batch_behind_one_that_hangs_is_not_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_turns, "_LIMIT_S", 0.01)
    turns = PartTurns("model", parts=2, cores=2)
    with turns.take(1), pytest.raises(CoreLost, match="core 1 hangs with another batch") as lost, turns.take(1):
        pass
    assert not lost.value.has_begun


def test_more_parts_than_layers_are_refused(cut: Callable[..., PipelinedModel]) -> None:
    with pytest.raises(SetupError, match="--pipeline-cores 7: BertForSequenceClassification has 6 layers"):
        cut("BertForSequenceClassification", "text_classification", 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline": PipelineOptions(0)}, "--pipeline-cores 0"),
        ({"pipeline": PipelineOptions(2, "luck")}, "time or memory"),
        ({"pipeline": PipelineOptions(1, "memory")}, "--pipeline-balance memory: is for --pipeline-cores of 2 or more"),
        ({"backend": "torch"}, "--pipeline-cores: the back end 'torch' computes a model on one core; openvino and neu"),
        ({"backend": "fake"}, "--pipeline-cores: the back end 'fake' computes a model on one core"),
        ({"dtype": "int8"}, "--pipeline-cores: not with --dtype int8; float32 and bfloat16 can be cut"),
    ],
)
def test_what_is_not_cut_is_refused_before_it_is_read(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"pipeline": PipelineOptions(2), "task": "", "dtype": "float32"} | changes
    request = CompileRequest(source="nowhere", repository=tmp_path, name="model", **options)
    with pytest.raises(SetupError, match=message):
        compile_bundle(request, lambda line: None)


def test_what_generates_is_not_cut(tmp_path: Path) -> None:
    source = save_decoder("llama", tmp_path / "writer")
    with pytest.raises(SetupError, match="--pipeline-cores: what generates text is computed by one core"):
        compile_model(source, tmp_path, name="writer", pipeline=PipelineOptions(2))


def test_each_part_has_one_batch_at_a_time_and_parts_work_side_by_side() -> None:
    turns = PartTurns("model", parts=2, cores=5)
    assert [list(turns.cores_of(core)) for core in range(5)] == [[0, 1], [0, 1], [2, 3], [2, 3], [2, 3]]
    entered = threading.Event()

    def enter() -> None:
        with turns.take(0):
            entered.set()

    with turns.take(0):
        with turns.take(1), turns.take(2):
            pass  # other parts, and other pipelines
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.05)
    thread.join()
    assert entered.is_set()
    first, second = turns.part_ns
    assert first > second > 0
    assert PartTurns("model", parts=1, cores=2).part_ns == ()
