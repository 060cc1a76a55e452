"""Encoder-decoders that read a text (BART, mBART, T5), and T5's encoders, answer as transformers and
sentence-transformers do, and what they cannot have is refused by name.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer

from neuronpipe.api.v1.tasks_pb2 import (
    FeatureExtractionInput,
    ScoreFunction,
    SentenceEmbeddingInput,
    TaskInput,
    TextClassificationInput,
    Truncation,
)
from neuronpipe.compiler import PipelineOptions
from neuronpipe.compiler.detection import read_configuration
from neuronpipe.core.errors import SetupError
from tests.contract.inference import infer_all
from tests.models.architectures import ENCODER_DECODERS, make_source
from tests.models.compiling import compile_model
from tests.models.encoder_decoders import INSTRUCTIONS, save_embedder, save_encoder_decoder
from tests.models.repository import for_neuron

# As in test_decoders_that_embed.py, for logits of up to 5.
_TOLERANCE = 5e-5
_RIGHT = Truncation.TRUNCATION_RIGHT
_TEXTS = (
    "ok",
    "The ferry leaves Stockholm at half past nine.",
    "  spaces \t and\nlines ",
    "北京是中华人民共和国的首都。 👍",
    # Not the special tokens of Unigram, which transformers finds in texts; see serving_json.
    "[CLS] and [SEP], literally",
    "many words " * 40,
)


async def _vectors(bundle_folder: Path, prompt_name: str = "") -> Any:
    inputs = [SentenceEmbeddingInput(text=text, prompt_name=prompt_name, truncation=_RIGHT) for text in _TEXTS]
    results = await infer_all(bundle_folder, [TaskInput(sentence_embedding=input) for input in inputs])
    return np.array([result.sentence_embedding.embedding for result in results], np.float32)


def _reference(source: Path) -> SentenceTransformer:
    return SentenceTransformer(str(source), device="cpu", processor_kwargs={"split_special_tokens": True})


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "openvino") for name in ENCODER_DECODERS), ("BART", "torch"), ("T5", "torch")]
)
async def test_logits_equal_those_of_transformers(name: str, backend: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", name, "text_classification")
    bundle = compile_model(source, tmp_path / "repository", "text_classification", backend=backend)
    texts = [*_TEXTS, *(["an end </s> in <s> a text"] if name == "BART" else [])]
    pairs = [(text, pair) for text in texts for pair in ("", texts[1])]
    inputs = [
        TextClassificationInput(
            text=text, text_pair=pair, top_k=3, function=ScoreFunction.SCORE_FUNCTION_NONE, truncation=_RIGHT
        )
        for text, pair in pairs
    ]
    results = await infer_all(bundle.folder, [TaskInput(text_classification=input) for input in inputs])
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, split_special_tokens=True)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(source).eval()
    for (text, pair), result in zip(pairs, results, strict=True):
        encoded = tokenizer(text, pair or None, truncation="longest_first", return_tensors="pt")
        with torch.inference_mode():
            logits = model(**encoded).logits[0].numpy()
        ours = {label.label: label.score for label in result.text_classification.labels}
        expected = dict(zip(bundle.spec.labels, logits.tolist(), strict=True))
        assert ours == pytest.approx(expected, rel=0, abs=_TOLERANCE), (text, pair)


@pytest.mark.sampled
@pytest.mark.parametrize("backend", ["openvino", "torch"])
async def test_vectors_of_an_encoder_equal_those_of_sentence_transformers(backend: str, tmp_path: Path) -> None:
    source = save_embedder(tmp_path / "source", make_source(tmp_path / "base", "T5", "sentence_embedding"))
    bundle = compile_model(source, tmp_path / "repository", backend=backend)
    assert (bundle.spec.task, bundle.spec.architecture) == ("sentence_embedding", "T5EncoderModel")
    expected = _reference(source).encode(list(_TEXTS))
    np.testing.assert_allclose(await _vectors(bundle.folder), expected, rtol=0, atol=_TOLERANCE)


async def test_the_encoder_of_a_whole_model_makes_vectors(tmp_path: Path) -> None:
    source = save_encoder_decoder("mt5", tmp_path / "source")
    assert read_configuration(source).find_task().task == "summarization"
    bundle = compile_model(source, tmp_path / "repository", "sentence_embedding")
    expected = _reference(source).encode(list(_TEXTS), normalize_embeddings=True)
    np.testing.assert_allclose(await _vectors(bundle.folder), expected, rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize("is_named_by_its_card", [False, True])
async def test_the_instruction_of_instructor_is_not_pooled(is_named_by_its_card: bool, tmp_path: Path) -> None:
    base = make_source(tmp_path / "base", "T5", "sentence_embedding")
    source = save_embedder(tmp_path / "source", base, include_prompt=False)
    reference = _reference(source)
    if is_named_by_its_card:  # as published, its files do not say it
        (source / "README.md").write_text("# hkunlp/instructor-base\nWe introduce **Instructor**.\n")
        pooling = source / "1_Pooling" / "config.json"
        fields = json.loads(pooling.read_text())
        del fields["include_prompt"]
        pooling.write_text(json.dumps(fields))
    bundle = compile_model(source, tmp_path / "repository")
    for name in INSTRUCTIONS:
        expected = reference.encode(list(_TEXTS), prompt_name=name)
        np.testing.assert_allclose(await _vectors(bundle.folder, name), expected, rtol=0, atol=_TOLERANCE)
    reference.set_pooling_include_prompt(True)
    assert (
        np.abs(await _vectors(bundle.folder, "query") - reference.encode(list(_TEXTS), prompt_name="query")).max()
        > 0.01
    )


async def test_features_of_an_encoder_equal_those_of_sentence_transformers(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "UMT5", "feature_extraction")
    bundle = compile_model(source, tmp_path / "repository")
    assert bundle.spec.task == "feature_extraction"
    inputs = [FeatureExtractionInput(text=text, truncation=_RIGHT) for text in _TEXTS]
    results = await infer_all(bundle.folder, [TaskInput(feature_extraction=input) for input in inputs])
    expected = _reference(source).encode(list(_TEXTS), output_value="token_embeddings")
    for result, vectors in zip(results, expected, strict=True):
        features = result.feature_extraction
        ours = np.frombuffer(features.data, "<f4").reshape(tuple(features.shape))
        np.testing.assert_allclose(ours, vectors.numpy(), rtol=0, atol=_TOLERANCE)


@pytest.mark.sampled
def test_an_encoder_is_traced_for_each_bucket_of_neuron(tmp_path: Path, neuron_double: object) -> None:
    source = make_source(tmp_path / "source", "T5", "sentence_embedding")
    options = for_neuron(tmp_path, "1x16", "8x64")
    (artifact,) = compile_model(source, tmp_path / "repository", "sentence_embedding", **options).manifest.artifacts
    assert [Path(name).name for name in artifact.files] == ["1x16.pt", "1x16.json", "8x64.pt", "8x64.json"]
    assert artifact.accuracy is not None
    assert artifact.accuracy.largest_difference < _TOLERANCE


@pytest.mark.sampled
@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "int8-weights"])
@pytest.mark.parametrize(("name", "task"), [("BART", "text_classification"), ("T5", "sentence_embedding")])
def test_other_types_are_compiled_and_compared(name: str, task: str, dtype: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", name, task)
    (artifact,) = compile_model(source, tmp_path / "repository", task, dtype=dtype).manifest.artifacts
    assert artifact.dtype == dtype
    assert artifact.accuracy is not None
    assert artifact.accuracy.agreement is not None
    assert artifact.accuracy.agreement > 0.9


# Fields of facebook/bart-large-mnli's config.json that transformers does not read.
_PUBLISHED = {
    "_num_labels": 3,
    "add_final_layer_norm": False,
    "classif_dropout": 0.0,
    "forced_eos_token_id": 2,
    "gradient_checkpointing": False,
    "normalize_before": False,
    "num_hidden_layers": 2,
    "output_past": False,
}


def _described_anew(source: Path, **fields: Any) -> Path:
    path = source / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return source


def test_bart_for_entailment_is_for_zero_shot_classification_as_published(tmp_path: Path) -> None:
    source = _described_anew(make_source(tmp_path / "source", "BART", "zero_shot_classification"), **_PUBLISHED)
    bundle = compile_model(source, tmp_path / "repository", backend="fake")
    assert (bundle.spec.task, bundle.spec.also_answers) == ("zero_shot_classification", ("text_classification",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"decoder_start_token_id": None}, "config.json has no decoder_start_token_id, with which its decoder begins"),
        ({"eos_token_id": 7}, "its tokenizer does not end texts with the eos_token_id 7 of config.json"),
    ],
)
def test_a_classifier_that_cannot_read_is_refused(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    source = _described_anew(make_source(tmp_path / "source", "BART", "text_classification"), **fields)
    with pytest.raises(SetupError, match=message):
        compile_model(source, tmp_path / "repository", "text_classification")


def test_a_model_whose_decoder_reads_its_encoder_is_not_cut_into_parts(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "BART", "text_classification")
    with pytest.raises(SetupError, match="--pipeline-cores: BartForSequenceClassification has an encoder that every"):
        compile_model(source, tmp_path / "repository", "text_classification", pipeline=PipelineOptions(2))


@pytest.mark.parametrize(
    ("config", "architecture", "problem"),
    [
        (transformers.BartConfig(), "BartModel", "has an encoder and a decoder; such models are"),
        (transformers.PegasusConfig(), "PegasusModel", "has an encoder and a decoder; such models are"),
        (transformers.WhisperConfig(), "WhisperForAudioClassification", r"takes sounds \(input_features\)"),
        (
            transformers.SpeechT5Config(is_encoder_decoder=False),
            "SpeechT5EncoderModel",
            "has an encoder and a decoder; such models are",
        ),
    ],
)
def test_others_are_refused_by_name(config: Any, architecture: str, problem: str, tmp_path: Path) -> None:
    config.architectures = [architecture]
    config.save_pretrained(tmp_path / "source")
    with pytest.raises(SetupError, match=f"{architecture} {problem}"):
        compile_model(tmp_path / "source", tmp_path / "repository")


@pytest.mark.parametrize(
    ("name", "made_for", "task", "message"),
    [
        ("BART", "text_classification", "sentence_embedding", "its tasks are text-classification, rerank, zero-shot-c"),
        ("T5", "question_answering", "text_classification", "T5ForQuestionAnswering cannot have the task text-class"),
        ("T5", "sentence_embedding", "fill_mask", "T5EncoderModel cannot have the task fill-mask: .*; its tasks are f"),
    ],
)
def test_another_task_is_refused_with_those_that_it_can_have(
    name: str, made_for: str, task: str, message: str, tmp_path: Path
) -> None:
    source = make_source(tmp_path / "source", name, made_for)
    with pytest.raises(SetupError, match=message):
        compile_model(source, tmp_path / "repository", task)
