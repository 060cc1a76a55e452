"""Long texts in chunks: vectors equal means of sentence-transformers' vectors, and scores the best of its scores."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from neuronpipe.api.v1.tasks_pb2 import RerankInput, SentenceEmbeddingInput, TaskInput, Truncation
from neuronpipe.core.errors import InvalidInput
from tests.contract.inference import infer_all
from tests.contract.test_late_interaction import _own as late_interaction
from tests.models.compiling import compile_model
from tests.oracle.small_models import make_source
from tests.oracle.texts import generated

# As in test_parity.py, for vectors of length 1, logits and sums of cosines.
_TOLERANCE = 5e-5
_MAX_TOKENS = 32
_LONG = generated(51, 3, words=(60, 200))
_PROMPT = "search for: "


def _embedder(folder: Path, family: str, pooling: str, **options: Any) -> Path:
    base = make_source(folder / "base", family, "Model", max_tokens=_MAX_TOKENS)
    modules = [Transformer(str(base)), Pooling(32, pooling, **options)]
    prompts = {"query": _PROMPT, "document": ""}
    SentenceTransformer(modules=modules, device="cpu", prompts=prompts).save(str(folder / "model"))
    return folder / "model"


def _chunks(tokenizer: Any, text: str, room: int) -> list[list[int]]:
    """The tokens of a text, in parts."""
    ids = tokenizer(text, add_special_tokens=False, truncation=False)["input_ids"]
    return [ids[start : start + room] for start in range(0, len(ids), room)]


def _ends(tokenizer: Any, text: str) -> list[int]:
    """The ends of a text's tokens, in characters."""
    return [end for _, end in tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]]


def _whole(tokenizer: Any, first: list[int], second: list[int] | None = None) -> dict[str, torch.Tensor]:
    """A text or a pair with BERT's or RoBERTa's special tokens."""
    begin, end = [tokenizer.cls_token_id], [tokenizer.sep_token_id]
    has_types = "token_type_ids" in tokenizer.model_input_names
    ids = [*begin, *first, *end]
    types = [0] * len(ids)
    if second is not None:
        behind = [*([] if has_types else end), *second, *end]
        ids, types = ids + behind, types + [1] * len(behind)
    arrays = {"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids), dtype=torch.long)}
    return arrays | ({"token_type_ids": torch.tensor([types])} if has_types else {})


@pytest.mark.parametrize(
    ("family", "pooling", "prompt_name", "options"),
    [
        ("Bert", "mean", "", {}),
        ("Bert", "cls", "query", {}),
        ("Roberta", "mean", "query", {}),
        ("Roberta", "mean", "query", {"include_prompt": False}),
    ],
)
async def test_a_vector_is_the_mean_of_the_vectors_of_the_chunks(
    family: str, pooling: str, prompt_name: str, options: Any, tmp_path: Path
) -> None:
    source = _embedder(tmp_path / "source", family, pooling, **options)
    bundle = compile_model(source, tmp_path / "repository")
    reference = SentenceTransformer(str(source), device="cpu")
    tokenizer = reference.tokenizer
    prompt = tokenizer(_PROMPT if prompt_name else "", add_special_tokens=False)["input_ids"]
    inputs = [
        TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, prompt_name=prompt_name, max_chunks=100))
        for text in (*_LONG, "short")
    ]
    for input, result in zip(inputs, await infer_all(bundle.folder, inputs), strict=True):
        # The prompt and the text are one text, as in sentence-transformers.
        ids = tokenizer(
            (_PROMPT if prompt_name else "") + input.sentence_embedding.text, add_special_tokens=False, truncation=False
        )["input_ids"]
        # RoBERTa joins the space at the end of the prompt with the first word of the text.
        before = prompt if ids[: len(prompt)] == prompt else prompt[:-1]
        assert ids[: len(before)] == before
        room = bundle.spec.max_tokens - 2 - len(before)
        parts = [ids[start : start + room] for start in range(len(before), len(ids), room)]
        assert (len(parts) > 2) == (input.sentence_embedding.text != "short")
        vectors = []
        for part in parts:
            features = _whole(tokenizer, [*before, *part]) | {"prompt_length": len(prompt) + 1}
            if not prompt:
                features.pop("prompt_length")
            with torch.inference_mode():
                vectors.append(reference(features)["sentence_embedding"][0].numpy())
        mean = np.average(vectors, axis=0, weights=[len(part) for part in parts])
        expected = mean / np.linalg.norm(mean)
        np.testing.assert_allclose(result.sentence_embedding.embedding, expected, rtol=0, atol=_TOLERANCE)


async def test_token_ids_are_read_in_parts_as_they_are(tmp_path: Path) -> None:
    source = _embedder(tmp_path / "source", "Bert", "mean")
    bundle = compile_model(source, tmp_path / "repository")
    reference = SentenceTransformer(str(source), device="cpu")
    ids = reference.tokenizer(_LONG[0], truncation=False)["input_ids"]
    parts = [ids[start : start + _MAX_TOKENS] for start in range(0, len(ids), _MAX_TOKENS)]
    input = TaskInput(sentence_embedding=SentenceEmbeddingInput(token_ids=ids, max_chunks=len(parts)))
    (result,) = await infer_all(bundle.folder, [input])
    with torch.inference_mode():
        features = [{"input_ids": torch.tensor([part]), "attention_mask": torch.ones(1, len(part))} for part in parts]
        vectors = [reference(row)["sentence_embedding"][0].numpy() for row in features]
    mean = np.average(vectors, axis=0, weights=[len(part) for part in parts])
    ours = result.sentence_embedding.embedding
    np.testing.assert_allclose(ours, mean / np.linalg.norm(mean), rtol=0, atol=_TOLERANCE)


def _ranking(texts: Sequence[str], query: str = "a query", **options: Any) -> TaskInput:
    return TaskInput(rerank=RerankInput(query=query, texts=texts, **options))


def _scores(result: Any) -> list[float]:
    return [text.score for text in sorted(result.rerank.texts, key=lambda text: text.index)]


@pytest.mark.parametrize("family", ["Bert", "Roberta"])
async def test_a_score_is_the_best_of_the_scores_of_the_chunks(family: str, tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", family, "ForSequenceClassification", max_tokens=_MAX_TOKENS, num_labels=1)
    bundle = compile_model(source, tmp_path / "repository", "rerank")
    reference = CrossEncoder(str(source), device="cpu")
    tokenizer, model = reference.tokenizer, reference.model
    texts = ("short", *_LONG, "")
    query = tokenizer("a query", add_special_tokens=False)["input_ids"]
    room = _MAX_TOKENS - len(query) - tokenizer.num_special_tokens_to_add(pair=True)
    expected = []
    for text in texts:
        with torch.inference_mode():
            parts = _chunks(tokenizer, text, room) or [[]]
            logits = [float(model(**_whole(tokenizer, query, part)).logits[0, 0]) for part in parts]
        expected.append(1 / (1 + np.exp(-max(logits))))
    (result,) = await infer_all(bundle.folder, [_ranking(texts, max_chunks=100)])
    np.testing.assert_allclose(_scores(result), expected, rtol=0, atol=_TOLERANCE)
    (cut,) = await infer_all(bundle.folder, [_ranking(_LONG, max_chunks=1, truncation=Truncation.TRUNCATION_RIGHT)])
    first = [text[: _ends(tokenizer, text)[room - 1]] for text in _LONG]
    assert _scores(cut) == _scores((await infer_all(bundle.folder, [_ranking(first)]))[0])


async def test_late_interaction_takes_the_best_chunk(tmp_path: Path) -> None:
    source = late_interaction(tmp_path, "BERT", {"strategy": "fixed", "length": 24})
    bundle = compile_model(source, tmp_path / "repository")
    reference = MultiVectorEncoder(str(source), device="cpu")
    # Each word is a token, so that a chunk is a text of its own.
    words = [word for word in reference.tokenizer.get_vocab() if word.isalpha() and word.islower()][:60]
    text, query = " ".join(words + words[::-2]), "where do cats sleep?"
    (result,) = await infer_all(bundle.folder, [_ranking([text, "ok"], query, max_chunks=100)])
    tokenizer = reference.tokenizer
    prefix = tokenizer("search_document: ", add_special_tokens=False)["input_ids"]
    parts = _chunks(tokenizer, text, 40 - 2 - len(prefix))
    asked = np.asarray(reference.encode_query(query))
    documents = [np.asarray(reference.encode_document(tokenizer.decode(part))) for part in parts]
    best = max(float((asked @ document.T).max(axis=1).sum()) for document in documents)
    short = float((asked @ np.asarray(reference.encode_document("ok")).T).max(axis=1).sum())
    np.testing.assert_allclose(_scores(result), [best, short], rtol=0, atol=_TOLERANCE * len(asked))


async def test_the_tokens_of_a_text_that_are_read_can_be_limited(tmp_path: Path) -> None:
    source = make_source(tmp_path / "source", "Bert", "ForSequenceClassification", max_tokens=_MAX_TOKENS, num_labels=1)
    bundle = compile_model(source, tmp_path / "repository", "rerank")
    tokenizer = CrossEncoder(str(source), device="cpu").tokenizer
    ends = _ends(tokenizer, _LONG[0])
    limited, same = await infer_all(
        bundle.folder, [_ranking([_LONG[0], "ok"], max_text_tokens=9), _ranking([_LONG[0][: ends[8]], "ok"])]
    )
    assert _scores(limited) == _scores(same)


async def test_more_chunks_than_asked_for_are_an_error_that_names_the_text(tmp_path: Path) -> None:
    source = _embedder(tmp_path / "source", "Bert", "mean")
    bundle = compile_model(source, tmp_path / "repository")
    input = SentenceEmbeddingInput(text=_LONG[0], max_chunks=2)
    with pytest.raises(InvalidInput, match=r"^text: \d+ chunks of 30 tokens, the limit is 2 \(max_chunks\)"):
        await infer_all(bundle.folder, [TaskInput(sentence_embedding=input)])
    with pytest.raises(InvalidInput, match=r"^max_chunks: 1025, the limit is 1024"):
        await infer_all(
            bundle.folder, [TaskInput(sentence_embedding=SentenceEmbeddingInput(text="a", max_chunks=1025))]
        )
    right = Truncation.TRUNCATION_RIGHT
    input = SentenceEmbeddingInput(text="a", prompt_name="query", truncation_tokens=4, truncation=right, max_chunks=2)
    with pytest.raises(InvalidInput, match=r"^text: \d+ tokens around the text leave no room for it, the limit is 4"):
        await infer_all(bundle.folder, [TaskInput(sentence_embedding=input)])


@pytest.mark.parametrize("setting", ["cut", "chunks"])
async def test_the_setting_decides_where_the_request_does_not(setting: str, tmp_path: Path) -> None:
    source = _embedder(tmp_path / "source", "Bert", "mean")
    bundle = compile_model(source, tmp_path / "repository")
    explicit: dict[str, Any] = {
        "truncation": Truncation.TRUNCATION_RIGHT,
        "max_chunks": 1024 if setting == "chunks" else 0,
    }
    inputs = [
        TaskInput(sentence_embedding=SentenceEmbeddingInput(text=_LONG[0], **options)) for options in ({}, explicit)
    ]
    ours, expected = await infer_all(bundle.folder, inputs, long_texts=setting)
    assert ours.sentence_embedding == expected.sentence_embedding
    refused = SentenceEmbeddingInput(text=_LONG[0], truncation=Truncation.TRUNCATION_ERROR)
    with pytest.raises(InvalidInput, match=r"^text: "):
        await infer_all(bundle.folder, [TaskInput(sentence_embedding=refused)], long_texts=setting)
