"""doors/http/vllm.py."""

from base64 import b64decode
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import (
    LabelScore,
    RerankInput,
    ScoreFunction,
    SentenceEmbeddingInput,
    SentenceSimilarityInput,
    TaskInput,
    TaskResult,
    TextClassificationInput,
    Truncation,
)
from neuronpipe.core.errors import InvalidInput
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import model_spec
from tests.unit.task_messages import task_result

_SPECS = [
    model_spec("rerank", name="reranker"),
    model_spec("sentence_embedding", name="embedder", also_answers=("sentence_similarity",)),
    model_spec(name="labels"),
    model_spec("feature_extraction", name="tokens"),
    model_spec("fill_mask", name="filler"),
]
_USAGE = {"prompt_tokens": 5, "total_tokens": 5, "completion_tokens": 0}


def _answer(input: TaskInput) -> TaskResult:
    match input.WhichOneof("task"):
        case "rerank":
            return task_result(rerank={"texts": [{"score": len(input.rerank.texts[0])}]})
        case "sentence_similarity":
            return task_result(sentence_similarity={"scores": [0.5]})
        case "sentence_embedding":
            return task_result(sentence_embedding={"embedding": [1, 2]})
        case "feature_extraction":
            data = np.array([[1, 2], [3, 4]], "<f4").tobytes()
            return task_result(feature_extraction={"data": data, "shape": [2, 2]})
    scores = {"b": 0.5, "c": 0.375, "a": 0.125}  # the best first
    labels = [LabelScore(label=label, score=score) for label, score in scores.items()]
    return task_result(text_classification={"labels": labels})


@pytest.fixture
def browser() -> Browser:
    return Browser(_SPECS, _answer)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_one_text_is_scored_with_each_of_several(browser: Browser, path: str) -> None:
    status, body = await browser.post(path, {"model": "reranker", "text_1": "q", "text_2": ["a", "bb"]})
    assert (status, body["object"], body["model"], body["usage"]["prompt_tokens"]) == (200, "list", "reranker", 10)
    expected = [{"index": 0, "object": "score", "score": 1.0}, {"index": 1, "object": "score", "score": 2.0}]
    assert body["data"] == expected
    assert browser.inputs == [TaskInput(rerank=_pair("q", "a")), TaskInput(rerank=_pair("q", "bb"))]


def _pair(query: str, text: str) -> RerankInput:
    return RerankInput(query=query, texts=[text])


@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents"), ("data_1", "data_2")])
async def test_lists_of_one_length_are_pairs_by_each_versions_names(browser: Browser, names: tuple[str, str]) -> None:
    first, second = names
    await browser.post("/score", {"model": "reranker", first: ["q", "r"], second: ["a", "b"]})
    assert [(input.rerank.query, list(input.rerank.texts)) for input in browser.inputs] == [("q", ["a"]), ("r", ["b"])]


@pytest.mark.parametrize("kept", [-1, 6])
async def test_logits_and_cutting_are_asked_for_as_in_vllm(browser: Browser, kept: int) -> None:
    options = {"use_activation": False, "truncate_prompt_tokens": kept, "truncation_side": "left"}
    await browser.post("/score", {"model": "reranker", "text_1": "q", "text_2": "a", **options})
    [input] = browser.inputs
    assert input.rerank.function == ScoreFunction.SCORE_FUNCTION_NONE
    assert input.rerank.truncation == Truncation.TRUNCATION_LEFT
    assert input.rerank.truncation_tokens == max(kept, 0)


async def test_vectors_are_scored_by_their_cosine(browser: Browser) -> None:
    _, body = await browser.post("/score", {"model": "embedder", "text_1": "s", "text_2": ["a"]})
    assert [entry["score"] for entry in body["data"]] == [0.5]
    input = SentenceSimilarityInput(source="s", texts=["a"])
    assert browser.inputs == [TaskInput(sentence_similarity=input)]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"text_1": ["a", "b"], "text_2": ["c"]}, "text_2: 1 texts, must be as many as text_1 has, 2"),
        ({"text_1": "a", "text_2": []}, "text_2: 0 inputs, must be from 1 to 2048"),
        ({"text_1": "a"}, "text_2: is missing"),
        ({"queries": ["a", "b"], "documents": ["c"]}, "documents: 1 texts, must be as many as queries has, 2"),
        ({"data_1": "a", "data_2": []}, "data_2: 0 inputs, must be from 1 to 2048"),
        ({"text_1": "a", "queries": "b", "text_2": "c"}, "queries: says the same as text_1; send one of them"),
        (
            {"text_1": "a", "text_2": "b", "truncate_prompt_tokens": 0},
            "truncate_prompt_tokens: must be 1 or more, or -1 for as many as the model takes",
        ),
    ],
)
async def test_what_is_wrong_is_named(browser: Browser, body: Any, error: str) -> None:
    status, answer = await browser.post("/score", {"model": "reranker", **body})
    assert (status, answer["error"]["message"]) == (400, error)


async def test_a_pair_that_is_too_long_is_told_by_which_field_to_cut_it() -> None:
    problem = "9 tokens, the model takes 8; set truncation to cut"
    browser = Browser(_SPECS, lambda given: InvalidInput("query and texts[0]", problem, ["truncation"]))
    _, body = await browser.post("/score", {"model": "reranker", "text_1": "q", "text_2": ["a", "b"]})
    expected = "text_1 and text_2[0]: 9 tokens, the model takes 8; set truncate_prompt_tokens to cut"
    assert body["error"]["message"] == expected


async def test_a_pair_is_named_by_the_names_that_were_sent() -> None:
    browser = Browser(_SPECS, lambda given: InvalidInput("query and texts[0]", "is wrong"))
    _, body = await browser.post("/score", {"model": "reranker", "queries": "q", "documents": ["a", "b"]})
    assert body["error"]["message"] == "queries and documents[0]: is wrong"


async def test_probabilities_are_in_the_order_of_the_labels(browser: Browser) -> None:
    status, body = await browser.post("/classify", {"model": "labels", "input": ["t"]})
    assert (status, body["usage"]) == (200, _USAGE)
    assert body["data"] == [{"index": 0, "label": "b", "probs": [0.125, 0.5, 0.375], "num_classes": 3}]
    input = TextClassificationInput(text="t", top_k=3)
    assert browser.inputs == [TaskInput(text_classification=input)]


@pytest.mark.parametrize(
    ("model", "more", "data"),
    [
        ("embedder", {}, [1.0, 2.0]),
        ("embedder", {"task": "embed"}, [1.0, 2.0]),
        ("tokens", {}, [[1.0, 2.0], [3.0, 4.0]]),
        ("tokens", {"task": "token_embed"}, [[1.0, 2.0], [3.0, 4.0]]),
        ("labels", {}, [0.125, 0.5, 0.375]),
    ],
)
async def test_a_pool_is_what_the_models_head_gives(
    browser: Browser, model: str, more: dict[str, Any], data: list[Any]
) -> None:
    _, body = await browser.post("/pooling", {"model": model, "input": "t", **more})
    assert body["data"] == [{"index": 0, "object": "pooling", "data": data}]
    _, body = await browser.post("/pooling", {"model": model, "input": "t", "encoding_format": "base64", **more})
    assert np.frombuffer(b64decode(body["data"][0]["data"]), "<f4").tolist() == np.ravel(data).tolist()


async def test_the_options_of_a_pooled_vector(browser: Browser) -> None:
    await browser.post("/pooling", {"model": "embedder", "input": "t", "dimensions": 1, "use_activation": False})
    input = SentenceEmbeddingInput(text="t", dimensions=1, skip_normalize=True)
    assert browser.inputs == [TaskInput(sentence_embedding=input)]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ({"model": "filler"}, "model 'filler' supports fill-mask, which /pooling does not give"),
        ({"model": "tokens", "task": "embed"}, "task: model 'tokens' has no task for embed; it has: feature_ex"),
        ({"model": "embedder", "task": "classify"}, "task: model 'embedder' has no task for classify; it has: s"),
        ({"model": "tokens", "dimensions": 2}, "dimensions: is for models of sentence embeddings"),
    ],
)
async def test_what_a_model_does_not_pool_is_refused(browser: Browser, body: Any, error: str) -> None:
    status, answer = await browser.post("/pooling", {"input": "t", **body})
    assert status == 400
    assert answer["error"]["param"] == next((field for field in ("task", "dimensions") if field in body), None)
    assert answer["error"]["message"].startswith(error)
