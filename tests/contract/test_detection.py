"""What a model is for is found by its files, and what cannot be served is refused with the reason.

Runs with transformers 4.57.6 as well: .venv-transformers4/bin/python -m pytest tests/contract/test_detection.py
"""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import transformers

from demo.model import find_minilm
from neuronpipe.compiler.detection import read_configuration
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.rerank import RerankFacts
from neuronpipe.tasks.zero_shot_classification import ZeroShotFacts
from tests.models.compiling import compile_model
from tests.models.repository import bert_config, save
from tests.models.tokenizers import word_piece

_NLI = {
    "label2id": {"contradiction": 0, "neutral": 1, "entailment": 2},
    "id2label": {0: "contradiction", 1: "neutral", 2: "entailment"},
}
_ONE = {"id2label": {0: "score"}, "label2id": {"score": 0}}


def _folder(folder: Path, *, tag: str = "", tags: str = "", files: dict[str, Any] | None = None, **config: Any) -> Path:
    """A model's folder without its weights."""
    described = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **config}
    for name, content in {"config.json": described, **(files or {})}.items():
        (folder / name).write_text(json.dumps(content))
    if tag or tags:
        (folder / "README.md").write_text(f"---\npipeline_tag: {tag}\ntags: [{tags}]\n---\n# A model\n")
    return folder


def _modules(*kinds: str) -> list[dict[str, Any]]:
    return [
        {"idx": index, "type": f"sentence_transformers.models.{kind}", "path": ""} for index, kind in enumerate(kinds)
    ]


def _is(architecture: str, model_type: str = "bert", **more: Any) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture], **more}


_CLASSIFIER, _WRITER = "BertForSequenceClassification", "BartForConditionalGeneration"
_POOLING = {"modules.json": _modules("Transformer", "Pooling")}
_CROSS_ENCODER = {"config_sentence_transformers.json": {"model_type": "CrossEncoder"}}
_SPLADE = {"modules.json": _modules("MLMTransformer", "SpladePooling")}


@pytest.mark.parametrize(
    ("described", "task", "reason"),
    [
        ({}, "text_classification", _CLASSIFIER),
        (_NLI, "zero_shot_classification", f"{_CLASSIFIER} with a label for entailment"),
        (
            {**_NLI, "tag": "text-classification"},
            "text_classification",
            f"{_CLASSIFIER}; README.md: text-classification",
        ),
        ({"tag": "zero-shot-classification"}, "text_classification", _CLASSIFIER),
        (_ONE, "text_classification", _CLASSIFIER),
        ({**_ONE, "tag": "text-ranking"}, "rerank", f"{_CLASSIFIER}; README.md: text-ranking"),
        (
            {**_ONE, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            "rerank",
            f"{_CLASSIFIER} with one label, saved as a cross-encoder",
        ),
        (
            {**_ONE, "files": {"modules.json": _modules("Transformer"), **_CROSS_ENCODER}},
            "rerank",
            f"{_CLASSIFIER} with one label, saved as a cross-encoder",
        ),
        (_is("BertForQuestionAnswering"), "question_answering", "BertForQuestionAnswering"),
        (_is("GPT2LMHeadModel", "gpt2"), "text_generation", "GPT2LMHeadModel"),
        (_is("LlamaForCausalLM", "llama"), "text_generation", "LlamaForCausalLM"),
        (_is(_WRITER, "bart"), "summarization", _WRITER),
        (_is(_WRITER, "bart", tag="translation"), "translation", f"{_WRITER}; README.md: translation"),
        (_is("MarianMTModel", "marian"), "translation", "MarianMTModel"),
        (
            _is("MBartForConditionalGeneration", "mbart"),
            "translation",
            "MBartForConditionalGeneration, which is made for several languages",
        ),
        (_is("BertModel"), "feature_extraction", "BertModel"),
        (
            _is("BertModel", tag="sentence-similarity"),
            "sentence_embedding",
            "BertModel; README.md: sentence-similarity",
        ),
        (_is("ElectraForPreTraining", "electra"), "feature_extraction", "ElectraForPreTraining"),
        (_is("BertModel", tag="text-generation"), "feature_extraction", "BertModel"),
        (
            _is("BertForMaskedLM", tag="feature-extraction"),
            "feature_extraction",
            "BertForMaskedLM; README.md: feature-extraction",
        ),
        (_is("BertModel", tag="feature-extraction", files=_POOLING), "sentence_embedding", "modules.json"),
        (_is("CLIPVisionModel", "clip_vision_model"), "image_embedding", "CLIPVisionModel"),
        (_is("SiglipVisionModel", "siglip_vision_model"), "image_embedding", "SiglipVisionModel"),
        (_is("HF_ColBERT"), "multi_vector_embedding", "HF_ColBERT"),
        (_is("BertModel", tags="ColBERT, PyLate"), "multi_vector_embedding", "BertModel"),
        *(
            (_is("BertModel", tags=tag, files=_POOLING), "sentence_embedding", "modules.json")
            for tag in ("colbert", "splade", "late-interaction", "sparse-encoder")
        ),
        (_is("BertForMaskedLM", tags="splade"), "sparse_embedding", "BertForMaskedLM; README.md"),
        ({"files": _SPLADE}, "sparse_embedding", "modules.json"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_models_task_is_found_with_reason(described: dict[str, Any], task: str, reason: str, tmp_path: Path) -> None:
    found = read_configuration(_folder(tmp_path, **described)).find_task()
    assert (found.task, found.reason) == (task, reason)


_ANY = ("", "text_classification")


@pytest.mark.parametrize(
    ("described", "tasks", "message"),
    [
        (
            _is("GPT2Model", "gpt2"),
            _ANY,
            "GPT2Model is a decoder, which writes text; the only task of such decoders is text-generation; vectors and "
            "scores are made by those of the kinds gemma, ",
        ),
        (
            _is("GPT2Model", "gpt2"),
            ("text_generation",),
            "GPT2Model does not write text: text-generation is for decoders, which end in",
        ),
        (
            _is("GPT2LMHeadModel", "gpt2"),
            ("text_classification",),
            "GPT2LMHeadModel is a decoder, which writes text; the only task of such decoders",
        ),
        (_is("OPTForSequenceClassification", "opt"), _ANY, "OPTForSequenceClassification is a decoder"),
        (
            _is("LongT5EncoderModel", "longt5"),
            _ANY,
            "LongT5EncoderModel is not supported: its attention depends on distances",
        ),
        (_is("FunnelForSequenceClassification", "funnel"), _ANY, "its layers pool neighbouring tokens"),
        (_is("BrosForTokenClassification", "bros"), _ANY, "it reads the place of each word on a page"),
        (_is("LEDForConditionalGeneration", "led"), _ANY, "its encoder attends in windows"),
        (_is("NystromformerModel", "nystromformer"), _ANY, "its attention averages segments of a batch"),
        (_is("CanineForSequenceClassification", "canine"), _ANY, "its tokenizer reads characters and has no form as"),
        ({"model_type": "extractor", "architectures": None}, _ANY, "extractor is not supported: it is a GLiNER2"),
        (_is("Wav2Vec2ForSequenceClassification", "wav2vec2"), _ANY, r"takes sounds \(input_values\), and tasks have"),
        (_is("AltCLIPModel", "altclip"), _ANY, "AltCLIPModel is not supported: of models of images and texts, CLIP"),
        (_is("BartModel", "bart"), _ANY, "has an encoder and a decoder"),
        ({"model_type": "our_own"}, _ANY, r"model type 'our_own', which transformers [\d.]+ does not know$"),
        (
            {"model_type": "nomic_own", "auto_map": {"AutoModel": "m.M"}},
            _ANY,
            "has code of its own .auto_map., which is not run$",
        ),
        (
            {"model_type": "nomic_bert", "n_embd": 768, "auto_map": {"AutoModel": "m.Own"}},
            _ANY,
            r"config.json names code of its own \(auto_map: Own\), which is not run",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_is_refused_for_a_task_that_it_cannot_have(
    described: dict[str, Any], tasks: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    source = str(_folder(tmp_path, **described))
    for task in tasks:
        backend = "openvino" if task == "text_generation" else "fake"
        with pytest.raises(SetupError, match=message):
            compile_model(source, tmp_path / "to", task, backend=backend)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (_is("BertForNextSentencePrediction"), "BertForNextSentencePrediction is not a known architecture"),
        (_is("BertForSomethingModel"), "BertForSomethingModel is not a known architecture"),
        (
            {"architectures": None},
            "config.json names no architecture, so its task is not known; choose one with --task",
        ),
        (_is("BertModel", tags="splade"), "makes sparse vectors, and BertModel has no head of a masked language model"),
        (
            _is("BertModel", files={**_POOLING, "config_setfit.json": {}}),
            r"is a SetFit model, whose classifier \(model_head.pkl\) is a pickle and not read; --task",
        ),
        (
            {"files": {"modules.json": _modules("Transformer", "Router"), **_CROSS_ENCODER}},
            "is a cross-encoder with Router behind its model; supported are LogitScore, and Pooling",
        ),
        (
            {**_ONE, "sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            "makes scores of logits by torch.nn.modules.activation.Tanh; supported are ",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_without_task_is_refused_by_what_it_is(described: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=message):
        read_configuration(_folder(tmp_path, **described)).find_task()


@pytest.mark.parametrize(
    ("config", "task", "message"),
    [
        ({"num_labels": 3}, "rerank", "has 3 labels; a cross-encoder that ranks texts has one, the score"),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.activation.Tanh"},
            "rerank",
            "makes scores of logits by torch.nn.modules.activation.Tanh; supported are ",
        ),
        (
            {"num_labels": 2},
            "zero_shot_classification",
            "none of its labels begins with 'entail', or it is the only one; there are: LABEL_0, ",
        ),
        (
            {"id2label": {0: "entailment"}, "label2id": {"entailment": 0}},
            "zero_shot_classification",
            "none of its labels begins with 'entail', or it is the only one; there are: entailment",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_classifier_that_cannot_have_the_task_is_refused(
    config: dict[str, Any], task: str, message: str, tmp_path: Path
) -> None:
    source = save(transformers.BertForSequenceClassification(bert_config(**config)), tmp_path / "source")
    with pytest.raises(SetupError, match=message):
        compile_model(source, tmp_path, task, backend="fake")


@pytest.mark.parametrize(
    ("weights", "backends", "expected"),
    [
        ("float32", ("float32", "bfloat16"), "float32"),
        ("bfloat16", ("float32", "bfloat16"), "bfloat16"),
        ("float16", ("float32", "bfloat16"), "float32"),
        ("float16", ("float32", "float16"), "float16"),
    ],
)
@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])  # of transformers 5 and 4
def test_the_dtype_is_that_of_the_weights_where_the_back_end_has_it(
    name: str, weights: str, backends: tuple[str, ...], expected: str, tmp_path: Path
) -> None:
    described: dict[str, Any] = {name: weights}
    assert read_configuration(_folder(tmp_path, **described)).dtype_of(backends) == expected


def test_a_classifier_whose_configuration_has_no_end_of_a_text_is_compiled(tmp_path: Path) -> None:
    tokenizer = word_piece(max_tokens=64)
    config = transformers.RoCBertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64
    )
    source = save(transformers.RoCBertForSequenceClassification(config), tmp_path / "source", tokenizer)
    assert compile_model(source, tmp_path, backend="fake").spec.task == "text_classification"


def test_what_openvino_cannot_convert_is_told_to_try_the_other_back_end(tmp_path: Path) -> None:
    tokenizer = word_piece(max_tokens=64)
    config = transformers.XLMConfig(vocab_size=len(tokenizer), emb_dim=32, n_layers=1, n_heads=4)
    source = save(transformers.XLMForSequenceClassification(config), tmp_path / "source", tokenizer)
    level = logging.getLogger().level
    with pytest.raises(SetupError, match=r"OpenVINO .* cannot convert XLM.*; --backend torch may compile it$"):
        compile_model(source, tmp_path)
    assert logging.getLogger().level == level, "later warnings would be lost"
    compile_model(source, tmp_path, backend="torch")


def test_a_card_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    folder = _folder(tmp_path)
    (folder / "README.md").write_text("---\n: [\n---\n")
    assert read_configuration(folder).find_task().task == "text_classification"


def test_what_was_found_is_shown_and_stored(tmp_path: Path) -> None:
    lines: list[str] = []
    source = save(transformers.BertForSequenceClassification(bert_config(**_NLI)), tmp_path / "source")
    bundle = compile_model(source, tmp_path, report=lines.append, backend="fake", dtype="")
    assert (
        "      task          zero_shot_classification (BertForSequenceClassification with a label for entailment); "
        "also answers text_classification\n"
        "      labels        3: contradiction, neutral, entailment\n"
        "      scores        softmax\n"
        "      longest input 512 tokens\n"
        "      dtype         float32"
    ) in lines
    assert bundle.spec.tasks == ("zero_shot_classification", "text_classification")
    assert ZeroShotFacts.of(bundle.spec).entailment_id == 2


def test_a_sentence_transformers_model_answers_both_of_its_tasks(tmp_path: Path) -> None:
    lines: list[str] = []
    bundle = compile_model(find_minilm(), tmp_path, report=lines.append, backend="fake", dtype="")
    assert bundle.spec.tasks == ("sentence_embedding", "sentence_similarity")
    found = next(line for line in lines if "pooling" in line)
    assert "      pooling       mean\n      longest input 256 tokens\n" in found


@pytest.mark.parametrize("has_modules", [True, False])
def test_a_cross_encoder_is_read_as_sentence_transformers_reads_it(has_modules: bool, tmp_path: Path) -> None:
    source = save(transformers.BertForSequenceClassification(bert_config(num_labels=1)), tmp_path / "source")
    settings = {
        "model_type": "CrossEncoder",
        "activation_fn": "torch.nn.modules.linear.Identity",
        "prompts": {"search": "Find: "},
        "default_prompt_name": "search",
    }
    (source / "config_sentence_transformers.json").write_text(json.dumps(settings))
    (source / "sentence_bert_config.json").write_text('{"max_seq_length": 40}')
    if has_modules:
        kind = "sentence_transformers.base.modules.transformer.Transformer"
        module = {"idx": 0, "name": "0", "path": "", "type": kind}
        (source / "modules.json").write_text(json.dumps([module]))
    spec = compile_model(source, tmp_path, backend="fake").spec
    # Without modules.json, sentence-transformers 6 reads none of these settings.
    expected = RerankFacts(score_function="none", prompt="Find: ") if has_modules else RerankFacts()
    assert (spec.tasks, spec.max_tokens) == (("rerank", "text_classification"), 40 if has_modules else 512)
    assert RerankFacts.of(spec) == expected


def test_a_tokenizer_without_a_fast_form_is_refused(tmp_path: Path) -> None:
    source = save(transformers.BertModel(bert_config()), tmp_path / "source")
    for path in source.glob("*token*"):
        path.unlink()
    shutil.copy(find_minilm() / "vocab.txt", source)
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "CanineTokenizer"}')
    with pytest.raises(SetupError, match=r"CanineTokenizer is written in Python only and .*; compile a model with"):
        compile_model(source, tmp_path, backend="fake")
