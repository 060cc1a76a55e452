"""Decoders that make vectors and scores answer as sentence-transformers and transformers do, which pad at the left or
at the right.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from neuronpipe.api.v1.tasks_pb2 import (
    RerankInput,
    ScoreFunction,
    SentenceEmbeddingInput,
    TaskInput,
    TextClassificationInput,
    Truncation,
)
from neuronpipe.compiler.detection import read_configuration
from neuronpipe.core.errors import InvalidInput, SetupError
from neuronpipe.tasks.rerank import RerankFacts
from tests.contract.inference import infer_all
from tests.models.architectures import DECODERS, make_source
from tests.models.compiling import compile_model
from tests.models.repository import SMALL, save
from tests.models.tokenizers import byte_level_bpe

# As in test_parity.py, for logits and scores of up to 5.
_TOLERANCE = 5e-5
_RIGHT = Truncation.TRUNCATION_RIGHT
_TEXTS = (
    "ok",
    "The ferry leaves Stockholm at half past nine.",
    "  spaces \t and\nlines ",
    "北京是中华人民共和国的首都。 👍",
    "<s> and </s>, literally",
    "many words " * 40,
)
_PROMPTS = {"query": "Instruct: find it\nQuery: ", "document": "", "title": "title: none | text: "}

pytestmark = pytest.mark.long


def _embedder(
    folder: Path, architecture: str, pooling: str | tuple[str, ...], side: str, *modules: torch.nn.Module
) -> Path:
    """A model as sentence-transformers saves it, whose tokenizer pads at a side."""
    base = make_source(folder / "base", architecture, "sentence_embedding")
    transformer = Transformer(str(base))
    transformer.tokenizer.padding_side = side
    parts, default = [transformer, Pooling(32, pooling), *modules], "title" if modules else None
    whole = SentenceTransformer(modules=parts, device="cpu", prompts=_PROMPTS, default_prompt_name=default)
    whole.save(str(folder / "model"))
    return folder / "model"


def _dense() -> Sequence[torch.nn.Module]:
    weights = torch.from_numpy(np.random.default_rng(5).standard_normal((48, 32)).astype(np.float32))
    linear = {"bias": False, "activation_function": torch.nn.Identity()}
    return Dense(32, 48, init_weight=weights, **linear), Dense(48, 32, init_weight=weights.T.contiguous(), **linear)


_EMBEDDERS: Mapping[str, Callable[[Path], Path]] = {
    # As Qwen3-Embedding, e5-mistral, SGPT and EmbeddingGemma.
    "Qwen3": lambda folder: _embedder(folder, "Qwen3", "lasttoken", "left"),
    "Mistral": lambda folder: _embedder(folder, "Mistral", ("lasttoken", "mean"), "right"),
    "Llama": lambda folder: _embedder(folder, "Llama", "weightedmean", "left"),
    "Gemma 2": lambda folder: _embedder(folder, "Gemma 2", "lasttoken", "left"),
    "Gemma 3, bidirectional": lambda folder: _embedder(folder, "Gemma 3, bidirectional", "mean", "right", *_dense()),
}


@pytest.mark.parametrize("name", _EMBEDDERS)
async def test_vectors_equal_those_of_sentence_transformers_with_each_prompt(name: str, tmp_path: Path) -> None:
    source = _EMBEDDERS[name](tmp_path)
    bundle = compile_model(source, tmp_path / "repository", name="model")
    assert bundle.spec.public_facts["prompt_names"] == sorted(_PROMPTS)
    reference = SentenceTransformer(str(source), device="cpu", processor_kwargs={"split_special_tokens": True})
    for prompt in (None, *_PROMPTS):
        inputs = [
            TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, prompt_name=prompt or "", truncation=_RIGHT))
            for text in _TEXTS
        ]
        ours = [result.sentence_embedding.embedding for result in await infer_all(bundle.folder, inputs)]
        expected = reference.encode(list(_TEXTS), prompt_name=prompt, normalize_embeddings=True)
        np.testing.assert_allclose(np.array(ours, np.float32), expected, rtol=0, atol=_TOLERANCE)


@pytest.mark.parametrize("name", DECODERS)
async def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", name, "text_classification")
    bundle = compile_model(source, tmp_path / "repository", name="model")
    inputs = [
        TaskInput(
            text_classification=TextClassificationInput(
                text=text, text_pair=pair, top_k=3, function=ScoreFunction.SCORE_FUNCTION_NONE, truncation=_RIGHT
            )
        )
        for text, pair in zip(_TEXTS, ("", "other", *_TEXTS[:4]), strict=True)
    ]
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, split_special_tokens=True)
    pipeline = transformers.pipeline("text-classification", model=str(source), tokenizer=tokenizer, device="cpu")
    for input, result in zip(inputs, await infer_all(bundle.folder, inputs), strict=True):
        given = {"text": input.text_classification.text, "text_pair": input.text_classification.text_pair or None}
        (expected,) = pipeline([given], function_to_apply="none", top_k=None, truncation=True)
        ours = {label.label: label.score for label in result.text_classification.labels}
        assert ours == pytest.approx({label["label"]: label["score"] for label in expected}, abs=2e-4)


_CHAT = (
    "{% set q = messages | selectattr('role', 'eq', 'query') | map(attribute='content') | first %}"
    "{% set d = messages | selectattr('role', 'eq', 'document') | map(attribute='content') | first %}"
    "<|im_start|>system\nJudge {it}.<|im_end|>\n<|im_start|>user\n<Query>: {{ q }}\n<Document>: {{ d }}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_QUERIES = ("where do cats sleep", " {braces} ")
_DOCUMENTS = ("The cat sat on the mat.", "\nLines \n", "{query} <|im_end|> yes", "的 text")


def _writer(folder: Path, chat_template: str | None) -> Path:
    """A Qwen3 as Qwen3-Reranker is published, with a tokenizer that has the tokens of chats."""
    tokenizer = byte_level_bpe(max_tokens=192)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tokenizer.add_tokens(["<think>", "</think>", "yes", "no"])
    tokenizer.chat_template = chat_template
    config = transformers.Qwen3Config(
        vocab_size=len(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=192,
        tie_word_embeddings=True,
        **SMALL,
    )
    return save(transformers.Qwen3ForCausalLM(config), folder, tokenizer)


def _scores(result: Any) -> list[float]:
    return [text.score for text in sorted(result.rerank.texts, key=lambda text: text.index)]


@pytest.mark.parametrize("is_saved", [True, False], ids=["saved by sentence-transformers", "as transformers saves it"])
async def test_log_odds_of_yes_and_no_equal_those_of_sentence_transformers(is_saved: bool, tmp_path: Path) -> None:
    source = _writer(tmp_path / "source", _CHAT)
    if is_saved:
        CrossEncoder(str(source), device="cpu").save_pretrained(str(tmp_path / "saved"))
        source = tmp_path / "saved"
        assert (source / "modules.json").is_file()
    task = "" if is_saved else "rerank"
    bundle = compile_model(source, tmp_path / "repository", task, name="model")
    reference = CrossEncoder(str(source), device="cpu", processor_kwargs={"split_special_tokens": False})
    activations = {
        ScoreFunction.SCORE_FUNCTION_NONE: torch.nn.Identity(),
        ScoreFunction.SCORE_FUNCTION_UNSPECIFIED: torch.nn.Sigmoid(),
    }
    for function, activation in activations.items():
        asked = [RerankInput(query=query, texts=_DOCUMENTS, function=function) for query in _QUERIES]
        inputs = [TaskInput(rerank=input) for input in asked]
        for query, result in zip(_QUERIES, await infer_all(bundle.folder, inputs), strict=True):
            # What a text spells of special tokens is text here, and a token there.
            known = [index for index, text in enumerate(_DOCUMENTS) if "<|" not in text]
            expected = reference.predict([(query, _DOCUMENTS[index]) for index in known], activation_fn=activation)
            ours = _scores(result)
            np.testing.assert_allclose([ours[index] for index in known], expected, rtol=0, atol=_TOLERANCE)


async def test_a_text_that_is_too_long_for_the_template_is_an_error_or_loses_its_end(tmp_path: Path) -> None:
    source = _writer(tmp_path / "source", _CHAT)
    bundle = compile_model(source, tmp_path / "repository", "rerank", name="model")
    limit, words = bundle.spec.max_tokens, "word " * 300

    async def rank(query: str, text: str, truncation: "Truncation.ValueType") -> list[float]:
        input = TaskInput(rerank=RerankInput(query=query, texts=[text], truncation=truncation))
        (result,) = await infer_all(bundle.folder, [input])
        return _scores(result)

    with pytest.raises(InvalidInput, match=rf"query and texts\[0\]: \d+ tokens, the model takes {limit}; set trunc"):
        await rank("a query", words, Truncation.TRUNCATION_ERROR)
    assert await rank("a query", words, _RIGHT) == await rank("a query", words + "more", _RIGHT)
    left = Truncation.TRUNCATION_LEFT
    assert await rank("a query", words, left) == await rank("a query", f"more {words}", left)
    with pytest.raises(InvalidInput, match=r"^query: \d+ tokens around the text leave no room for it"):
        await rank(words, "a text", _RIGHT)


_QUESTION = "\nIs it relevant to it? Answer."
_LONG = ("word " * 300, "Lines.\n" * 90, "的 text " * 60, "cats sleep " * 41 + "\n", "short")


@pytest.mark.parametrize(
    "behind",
    [_QUESTION + "<|im_end|>\n<|im_start|>assistant\n", _QUESTION, "\n\nend<|im_end|>", "<|im_end|>\nyes or no: "],
)
async def test_a_text_that_is_too_long_loses_its_end_and_not_the_template_behind(behind: str, tmp_path: Path) -> None:
    template = _CHAT.partition("<|im_end|>\n<|im_start|>assistant")[0] + behind
    source = _writer(tmp_path / "source", template)
    bundle = compile_model(source, tmp_path / "repository", "rerank", name="model")
    ranking = RerankInput(query="a query", texts=_LONG, truncation=_RIGHT, function=ScoreFunction.SCORE_FUNCTION_NONE)
    (result,) = await infer_all(bundle.folder, [TaskInput(rerank=ranking)])
    reference = CrossEncoder(str(source), device="cpu", max_length=bundle.spec.max_tokens)
    expected = reference.predict([("a query", text) for text in _LONG], activation_fn=torch.nn.Identity())
    np.testing.assert_allclose(_scores(result), expected, rtol=0, atol=_TOLERANCE)
    query = TaskInput(rerank=RerankInput(query="word " * 188, texts=["a text"], truncation=_RIGHT))
    with pytest.raises(
        InvalidInput, match=r"^query: \d+ tokens around the text leave no room for it, the limit is 192"
    ):
        await infer_all(bundle.folder, [query])


def test_what_is_no_reranker_is_refused_with_what_to_do(tmp_path: Path) -> None:
    def refused(folder: Path, message: str) -> None:
        with pytest.raises(SetupError, match=message):
            compile_model(folder, tmp_path / "repository", "rerank", name="model")

    trimming = _CHAT.replace("{{ q }}", "{{ q | trim }}")
    refused(_writer(tmp_path / "trimming", trimming), "its chat template changes the texts that are written into it")
    words = _writer(tmp_path / "words", None)
    tokenizer = byte_level_bpe(max_tokens=192)
    tokenizer.chat_template = _CHAT
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (words / name).unlink()
    tokenizer.save_pretrained(words)
    refused(words, "its tokenizer has no tokens 'yes' and 'no', by which a decoder ranks texts")


def test_a_decoder_is_a_reranker_where_its_card_says_so(tmp_path: Path) -> None:
    source = _writer(tmp_path / "source", None)
    assert read_configuration(source).find_task().task == "text_generation"
    (source / "README.md").write_text("---\npipeline_tag: text-ranking\n---\n")
    assert read_configuration(source).find_task().task == "rerank"


def test_facts_without_a_template_are_those_of_older_bundles() -> None:
    assert RerankFacts.model_validate(json.loads('{"score_function": "sigmoid", "prompt": ""}')).template == ()


async def test_longrope_makes_vectors_up_to_the_length_of_its_short_factors(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 16}
    factors = {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    base = make_source(tmp_path / "base", "Llama", "sentence_embedding")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"rope_parameters": rope | factors}))
    whole = SentenceTransformer(modules=[Transformer(str(base)), Pooling(32, "mean")], device="cpu")
    whole.save(str(tmp_path / "model"))
    lines: list[str] = []
    bundle = compile_model(tmp_path / "model", tmp_path / "repository", report=lines.append)
    assert bundle.spec.max_tokens == 16
    assert "longrope, whose factors of short texts hold up to 16 tokens" in "\n".join(lines)
    asked = SentenceEmbeddingInput(text=_TEXTS[-1], truncation=_RIGHT, skip_normalize=True)
    (result,) = await infer_all(bundle.folder, [TaskInput(sentence_embedding=asked)])
    reference = SentenceTransformer(str(tmp_path / "model"), device="cpu")
    reference.max_seq_length = 16
    expected = reference.encode([_TEXTS[-1]])[0]
    np.testing.assert_allclose(result.sentence_embedding.embedding, expected, rtol=0, atol=_TOLERANCE)
