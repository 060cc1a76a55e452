"""A GLiNER answers as the package gliner does: the same entities, offsets and scores, nested or flat."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gliner
import pytest
import torch
import transformers

from neuronpipe.api.v1.tasks_pb2 import TaskInput, Truncation, ZeroShotTokenClassificationInput
from neuronpipe.compiler.detection import read_configuration
from neuronpipe.compiler.own_code import in_known_form
from neuronpipe.compiler.source import find_source
from neuronpipe.core.errors import InvalidInput, SetupError
from tests.contract.inference import infer_all
from tests.models.compiling import compile_model
from tests.models.repository import SMALL
from tests.models.tokenizers import byte_level_bpe, unigram, word_piece

# Of scores; logits of up to 10 differ by 1e-4.
_TOLERANCE = 5e-5
_MAX_TOKENS = 96
_TEXTS = (
    "Ada Lovelace lived in New-York and worked with Charles Babbage.",
    "a",
    "  spaces \t and\nlines ",
    "北京是中华人民共和国的首都。 naïve 👍",
    "[SEP] and [CLS], literally; it's 1,843!",
    " ".join(f"word{number}" for number in range(12)),
)
_LABELS = (("person",), ("person", "big city", "date of birth"), ("b", "a", "b", "c", "d", "e", "f"))
_ENCODERS: Mapping[str, Mapping[str, Any]] = {
    "bert": {},
    "deberta-v2": {
        "relative_attention": True,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": "p2c|c2p",
        "position_biased_input": False,
        "max_relative_positions": -1,
        "type_vocab_size": 0,
    },
    "modernbert": {"bos_token_id": 0, "cls_token_id": 0, "eos_token_id": 2, "sep_token_id": 2, "local_attention": 8},
    "xlm-roberta": {"max_position_embeddings": _MAX_TOKENS + 2},
}
_TOKENIZERS = {"bert": word_piece, "modernbert": byte_level_bpe}
_OF_TOKENS = {"span_mode": "token_level"}

pytestmark = pytest.mark.long


def _saved(folder: Path, kind: str = "bert", **changes: Any) -> gliner.GLiNER:
    """A model that gliner saved in `folder`, whose scores are spread between 0 and 1."""
    tokenizer = _TOKENIZERS.get(kind, unigram)(max_tokens=_MAX_TOKENS)
    base = folder.with_name(f"{folder.name}-encoder")
    tokenizer.save_pretrained(base)
    config = transformers.CONFIG_MAPPING[kind](
        **{
            "vocab_size": len(tokenizer),
            "max_position_embeddings": _MAX_TOKENS,
            "pad_token_id": tokenizer.pad_token_id,
            **SMALL,
            **_ENCODERS[kind],
        }
    )
    config.save_pretrained(base)
    torch.manual_seed(49)
    settings = {"hidden_size": 24, "max_width": 4, "max_len": 24, "num_rnn_layers": 1} | changes
    described = gliner.GLiNERConfig(model_name=str(base), encoder_config=config.to_dict(), **settings)
    model = gliner.GLiNER.from_config(described, backbone_from_pretrained=False)
    for name, parameter in model.model.named_parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3 if "rep_layer.bert" in name else 0.2)
    model.save_pretrained(folder)
    return model.eval()


def _inputs() -> list[ZeroShotTokenClassificationInput]:
    options = itertools.product(_TEXTS, _LABELS, (0.2, 0.6), (False, True), (False, True))
    return [
        ZeroShotTokenClassificationInput(
            text=text, candidate_labels=labels, threshold=threshold, allow_nested=allow_nested, multi_label=multi_label
        )
        for text, labels, threshold, allow_nested, multi_label in options
    ]


async def _answers(bundle: Any, inputs: list[ZeroShotTokenClassificationInput]) -> list[Any]:
    results = await infer_all(bundle.folder, [TaskInput(zero_shot_token_classification=input) for input in inputs])
    return [result.zero_shot_token_classification.entities for result in results]


def _expected(model: gliner.GLiNER, input: ZeroShotTokenClassificationInput) -> list[dict[str, Any]]:
    entities: list[dict[str, Any]] = model.predict_entities(
        input.text,
        list(input.candidate_labels),
        flat_ner=not input.allow_nested,
        threshold=input.threshold,
        multi_label=input.multi_label,
    )
    return entities


@pytest.mark.parametrize(
    ("kind", "backend", "changes"),
    [
        ("bert", "openvino", {}),
        ("deberta-v2", "openvino", {}),
        ("deberta-v2", "openvino", {"hidden_size": 32, "num_rnn_layers": 0, "embed_ent_token": False}),
        ("bert", "torch", {"num_rnn_layers": 0}),
        ("modernbert", "openvino", {}),
        ("bert", "openvino", _OF_TOKENS),
        ("deberta-v2", "openvino", _OF_TOKENS | {"hidden_size": 32, "num_rnn_layers": 0, "embed_ent_token": False}),
        ("xlm-roberta", "torch", _OF_TOKENS | {"num_rnn_layers": 0}),
    ],
)
async def test_entities_equal_those_of_the_package(
    kind: str, backend: str, changes: Mapping[str, Any], tmp_path: Path
) -> None:
    model = _saved(tmp_path / "model", kind, **changes)
    bundle = compile_model(tmp_path / "model", tmp_path / "repository", backend=backend)
    assert bundle.spec.task == "zero_shot_token_classification"
    inputs, count = _inputs(), 0
    for input, entities in zip(inputs, await _answers(bundle, inputs), strict=True):
        expected = _expected(model, input)
        ours = [(entity.start, entity.end, entity.text, entity.label) for entity in entities]
        assert ours == [(entity["start"], entity["end"], entity["text"], entity["label"]) for entity in expected]
        assert [entity.score for entity in entities] == pytest.approx(
            [entity["score"] for entity in expected], abs=_TOLERANCE
        )
        count += len(expected)
    assert count > 200, "the model finds too little to compare"


async def test_a_recurrent_layer_that_is_null_is_none(tmp_path: Path) -> None:
    model = _saved(tmp_path / "model", num_rnn_layers=0)
    path = tmp_path / "model" / "gliner_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_rnn_layers": None}))
    bundle = compile_model(tmp_path / "model", tmp_path / "repository")
    input = ZeroShotTokenClassificationInput(text=_TEXTS[0], candidate_labels=_LABELS[1], threshold=0.2)
    (entities,) = await _answers(bundle, [input])
    assert [entity.text for entity in entities] == [entity["text"] for entity in _expected(model, input)] != []


@pytest.mark.parametrize("changes", [{}, _OF_TOKENS])
@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.9), ("int8", 0.8)])
def test_other_number_types_agree(dtype: str, least: float, changes: Mapping[str, Any], tmp_path: Path) -> None:
    _saved(tmp_path / "model", **changes)
    artifact = compile_model(tmp_path / "model", tmp_path / "repository", dtype=dtype).manifest.artifacts[0]
    assert artifact.accuracy
    assert (artifact.accuracy.agreement or 0) > least


@pytest.mark.filterwarnings("ignore:Sentence of length")  # the package cuts it, too
async def test_a_text_that_is_too_long_is_an_error_or_loses_words(tmp_path: Path) -> None:
    model = _saved(tmp_path / "model")
    bundle = compile_model(tmp_path / "model", tmp_path / "repository")
    words = " ".join("abcdefghijklmnopqrstuvwxyz")

    def ask(**changes: Any) -> ZeroShotTokenClassificationInput:
        fields: Any = {"text": words, "candidate_labels": ["a", "b"], "threshold": 0.3} | changes
        return ZeroShotTokenClassificationInput(**fields)

    for changes, message in (
        ({}, r"text: 26 words, the model takes 24; set truncation"),
        ({"text": "internationalization " * 24}, r"text and candidate_labels: \d+ tokens, the model takes 96"),
        ({"candidate_labels": ["many words " * 40]}, r"candidate_labels: \d+ tokens leave no room for the text"),
        ({"candidate_labels": [f"{number}" for number in range(65)]}, r"candidate_labels: 65 labels, the limit is 64"),
        ({"threshold": 1.0}, r"threshold: 1, must be less than 1"),
        ({"text": " \n"}, r"text: has no words"),
    ):
        with pytest.raises(InvalidInput, match=message):
            await _answers(bundle, [ask(**changes)])
    right, left = Truncation.TRUNCATION_RIGHT, Truncation.TRUNCATION_LEFT
    long = "internationalization and localization of " * 6
    asked = [ask(truncation=right), ask(text=long, truncation=right), ask(truncation=left), ask(text=words[4:])]
    answers = await _answers(bundle, asked)
    for input, entities in zip(asked[:2], answers[:2], strict=True):
        expected = [(entity["start"], entity["end"], entity["label"]) for entity in _expected(model, input)]
        assert [(entity.start, entity.end, entity.label) for entity in entities] == expected
    assert [(span.start - 4, span.label) for span in answers[2]] == [(span.start, span.label) for span in answers[3]]


def test_what_cannot_be_served_is_refused_by_name(tmp_path: Path) -> None:
    _saved(tmp_path / "model")
    path = tmp_path / "model" / "gliner_config.json"
    content = json.loads(path.read_text())
    refusals = (
        (
            {"span_mode": "markerV1"},
            "has span_mode 'markerV1', which is not supported; supported: 'markerV0', 'token_level'",
        ),
        ({"represent_spans": True}, "has represent_spans True, which is not supported; supported: none"),
        (
            {"model_type": "gliner_bi_encoder_span"},
            r"has model_type 'gliner_bi_encoder_span', which is not supported \(its labels have an encoder and a token",
        ),
        (
            {"labels_encoder": "a/b"},
            r"has labels_encoder 'a/b', which is not supported \(its labels have .*\); supported: none",
        ),
        ({"relations_layer": "dot"}, r"which is not supported \(it finds relations of entities"),
        ({"encoder_config": {"model_type": "t5"}}, "has an encoder 't5'; supported are bert, deberta-v2, distilbert"),
        ({"encoder_config": None}, r"has no encoder_config, .*save_pretrained\(FOLDER\) of the package gliner"),
    )
    for number, (changes, message) in enumerate(refusals):
        path.write_text(json.dumps(content | changes))
        with pytest.raises(SetupError, match=message):
            read_configuration(in_known_form(find_source(str(tmp_path / "model"), None), tmp_path / f"{number}").folder)
    path.write_text(json.dumps(content))
    with pytest.raises(SetupError, match=r"has a recurrent layer \(LSTM\), which --backend torch cannot compile"):
        compile_model(tmp_path / "model", tmp_path / "repository", backend="torch")


def test_a_model_that_lost_weights_is_told_so(tmp_path: Path) -> None:
    _saved(tmp_path / "model", num_rnn_layers=0)
    path = tmp_path / "model" / "gliner_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_rnn_layers": 1}))
    with pytest.raises(SetupError, match=r"weights lack rnn\.lstm.*its files lost what a GLiNER is made of; save"):
        compile_model(tmp_path / "model", tmp_path / "repository")
