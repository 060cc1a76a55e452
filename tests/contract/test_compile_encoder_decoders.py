"""A model with an encoder and a decoder is compiled if the graphs that run choose the tokens of `generate`."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from neuronpipe.compiler.tasks import SOURCE_TASKS, load_module
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ModelSpec
from neuronpipe.tasks.text_options import GenerationFacts
from neuronpipe.tasks.text_to_text import TranslationFacts
from tests.models.compiling import compile_model
from tests.models.encoder_decoders import MODELS, TOKENS, save_encoder_decoder
from tests.models.repository import for_neuron

_TASKS = {"marian": "translation", "mbart": "translation", "nllb": "translation"}
# Untyped: accuracies that a bundle may lack are there.
_compile: Any = compile_model


def _spec(source: Path, task: str) -> ModelSpec:
    """What a bundle says of the model, without the graph."""
    module = load_module(source, task, SOURCE_TASKS[task].load_tokenizer(source))
    return dataclasses.replace(module, inputs=("input_ids",)).spec("m", 1, {})


@pytest.mark.sampled
@pytest.mark.parametrize("family", MODELS)
def test_every_token_is_compared(family: str, tmp_path: Path) -> None:
    source = save_encoder_decoder(family, tmp_path / "source", max_length=40, min_length=5, forced_eos_token_id=2)
    bundle = _compile(source, tmp_path / "repository")
    accuracy = bundle.manifest.artifacts[0].accuracy
    facts = GenerationFacts.of(bundle.spec)
    assert accuracy.agreement == 1
    assert accuracy.largest_difference <= 1e-4 * accuracy.largest_output
    assert (bundle.spec.task, bundle.spec.max_tokens) == (_TASKS.get(family, "summarization"), TOKENS)
    start = 1 if "t5" in family else 2
    assert (facts.decoder_start_token_ids, facts.max_text_tokens) == ((start,), TOKENS - 1)
    assert (facts.max_new_tokens, facts.min_new_tokens, facts.default_of("forced_eos_token_id")) == (39, 4, 2)


@pytest.mark.sampled
@pytest.mark.parametrize("family", MODELS)
def test_every_token_in_the_slots_of_neuron_is_compared(family: str, tmp_path: Path, neuron_double: object) -> None:
    source = save_encoder_decoder(family, tmp_path / "source")
    bundle = _compile(source, tmp_path / "repository", **for_neuron(tmp_path, "6x48"))
    (artifact,) = bundle.manifest.artifacts
    assert artifact.accuracy.agreement == 1
    assert artifact.accuracy.largest_difference <= 1e-4 * artifact.accuracy.largest_output
    names = ["6x48.pt", "6x48.json", "encoder-6x48.pt", "encoder-6x48.json"]
    assert [Path(name).name for name in artifact.files] == names
    facts = GenerationFacts.of(bundle.spec)
    assert (bundle.spec.max_tokens, facts.max_text_tokens + len(facts.decoder_start_token_ids)) == (48, 48)


@pytest.mark.parametrize(
    ("family", "bucket", "message"),
    [("bart", "4x48", "a text of BartForConditionalGeneration takes 5 slots, 4 for its beams and one for")],
)
def test_what_slots_cannot_hold_is_refused(
    family: str, bucket: str, message: str, tmp_path: Path, neuron_double: object
) -> None:
    source = save_encoder_decoder(family, tmp_path / "source")
    with pytest.raises(SetupError, match=message):
        _compile(source, tmp_path / "repository", task="summarization", **for_neuron(tmp_path, bucket))


def test_a_model_with_other_position_biases_is_refused_by_name(tmp_path: Path) -> None:
    transformers.UMT5Config(architectures=["UMT5ForConditionalGeneration"]).save_pretrained(tmp_path / "source")
    with pytest.raises(SetupError, match="UMT5ForConditionalGeneration is not supported: its attention depends on d"):
        _compile(tmp_path / "source", tmp_path / "repository")


_SETTINGS = {"num_beams": 4, "early_stopping": True, "max_length": 90, "min_length": 10, "no_repeat_ngram_size": 3}
_DIRECTIONS = {
    "translation_en_to_de": {**_SETTINGS, "prefix": "translate English to German: "},
    "translation_en_to_fr": {**_SETTINGS, "prefix": "translate English to French: "},
}


def test_what_a_model_says_of_a_task_goes_before_what_it_says_of_all(tmp_path: Path) -> None:
    said = {"summarization": {**_SETTINGS, "prefix": "summarize: "}, **_DIRECTIONS}
    source = save_encoder_decoder("t5", tmp_path / "source", task_specific_params=said)
    summaries = GenerationFacts.of(_spec(source, "summarization"))
    assert (summaries.prefix, summaries.num_beams, summaries.early_stopping) == ("summarize: ", 4, True)
    assert (summaries.min_new_tokens, summaries.default_of("no_repeat_ngram_size")) == (9, 3)
    assert summaries.max_new_tokens is None, "pipelines take 256 where the model itself has no max_length"
    translations = TranslationFacts.of(_spec(source, "translation"))
    assert translations.source_language == "en"
    assert translations.prefixes == {
        "en": {"de": "translate English to German: ", "fr": "translate English to French: "}
    }


@pytest.mark.parametrize(("said", "beams"), [({}, 4), ({"num_beams": 1}, 1), ({"num_beams": 3}, 3)])
def test_beams_are_those_that_the_model_names_and_else_those_of_the_pipelines(
    said: dict[str, int], beams: int, tmp_path: Path
) -> None:
    source = save_encoder_decoder("t5", tmp_path / "source")
    path = source / "generation_config.json"  # transformers itself leaves out a 1
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
    assert GenerationFacts.of(_spec(source, "summarization")).num_beams == beams


def test_directions_with_settings_of_their_own_are_refused(tmp_path: Path) -> None:
    said = {**_DIRECTIONS, "translation_en_to_ro": {"num_beams": 2, "prefix": "translate English to Romanian: "}}
    source = save_encoder_decoder("t5", tmp_path / "source", task_specific_params=said)
    with pytest.raises(SetupError, match="other settings for some languages"):
        _compile(source, tmp_path / "repository", task="translation")


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        (
            "generation_config.json",
            {"decoder_start_token_id": 10**6},
            "sets decoder_start_token_id to 1000000, the voc",
        ),
        ("config.json", {"task_specific_params": {"summarization": 3}}, "task_specific_params of summarization in its"),
        ("config.json", {"relative_attention_num_buckets": 16}, "have another shape than config.json says; get its"),
    ],
)
def test_settings_that_no_text_can_have_are_refused_by_name(
    name: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = save_encoder_decoder("t5", tmp_path / "source")
    (source / name).write_text(json.dumps(json.loads((source / name).read_text()) | fields))
    with pytest.raises(SetupError, match=message):
        _compile(source, tmp_path / "repository")


def test_a_model_of_images_and_texts_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.Gemma3Config(architectures=["Gemma3ForConditionalGeneration"])
    config.save_pretrained(tmp_path / "source")
    with pytest.raises(SetupError, match="Gemma3ForConditionalGeneration writes text about images and texts, which is"):
        _compile(tmp_path / "source", tmp_path / "repository")


def test_a_model_without_positions_writes_as_much_as_it_says(tmp_path: Path) -> None:
    source = save_encoder_decoder("mt5", tmp_path / "source", max_length=700)
    facts = GenerationFacts.of(_spec(source, "summarization"))
    assert (facts.max_text_tokens, facts.max_new_tokens) == (699, 699)


@pytest.mark.parametrize("task", ["text_generation", "fill_mask"])
def test_another_task_is_refused(task: str, tmp_path: Path) -> None:
    source = save_encoder_decoder("bart", tmp_path / "source")
    with pytest.raises(SetupError, match=f"cannot have the task {task.replace('_', '-')}: summarization and transl"):
        _compile(source, tmp_path / "repository", task=task)
