"""doors/http/tei.py, and which model answers (doors/inference.py)."""

import numpy as np
import pytest

from neuronpipe.api.v1.tasks_pb2 import LabelScore, ScoreFunction, TaskInput, TaskResult, TokenWeight, Truncation
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, SetupError
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import model_spec
from tests.unit.task_messages import task_result

_SPECS = [
    model_spec("sentence_embedding", name="first", also_answers=("sentence_similarity",)),
    model_spec("feature_extraction", name="tokens"),
    model_spec(name="labels"),
    model_spec("sparse_embedding", name="weights"),
]


def _answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    task = input.WhichOneof("task")
    if task == "sentence_embedding":
        return task_result(sentence_embedding={"embedding": [1, len(input.sentence_embedding.text)]})
    if task == "feature_extraction":
        data = np.array([[1, 2], [3, 4], [5, 6]], "<f4").tobytes()
        return task_result(feature_extraction={"data": data, "shape": [3, 2]})
    if task == "sparse_embedding":
        weights = [TokenWeight(token_id=7, weight=1.5, token="a"), TokenWeight(token_id=3, weight=0.25, token="b")]
        return task_result(sparse_embedding={"weights": weights})
    if task == "sentence_similarity":
        return task_result(sentence_similarity={"scores": [0.5, 0.25]})
    if input.text_classification.text == "too long":
        return InvalidInput("text", "is too long")
    labels = [LabelScore(label="b", score=0.75), LabelScore(label="a", score=0.25)]
    return task_result(text_classification={"labels": labels})


@pytest.fixture
def browser() -> Browser:
    return Browser(_SPECS, _answer)


async def test_a_text_and_several_become_a_list_of_vectors(browser: Browser) -> None:
    assert await browser.post("/embed", {"inputs": "abc"}) == (200, [[1.0, 3.0]])
    assert await browser.post("/embed", {"inputs": ["abc", "d"]}) == (200, [[1.0, 3.0], [1.0, 1.0]])


async def test_the_options_of_embed(browser: Browser) -> None:
    await browser.post("/embed", {"inputs": "a"})
    await browser.post(
        "/embed", {"inputs": "a", "normalize": False, "dimensions": 3, "truncate": True, "truncation_direction": "left"}
    )
    default, changed = (input.sentence_embedding for input in browser.inputs)
    expected = (False, 0, Truncation.TRUNCATION_UNSPECIFIED)
    assert (default.skip_normalize, default.dimensions, default.truncation) == expected
    assert (changed.skip_normalize, changed.dimensions, changed.truncation) == (True, 3, Truncation.TRUNCATION_LEFT)


async def test_the_tokens_and_the_times_are_in_teis_headers(browser: Browser) -> None:
    await browser.post("/embed", {"inputs": ["a", "b"]})
    names = ("x-compute-tokens", "x-total-time", "x-tokenization-time", "x-queue-time", "x-inference-time")
    assert [browser.headers[name] for name in names] == ["10", "9", "1", "2", "3"]


async def test_every_token_has_a_vector(browser: Browser) -> None:
    assert await browser.post("/embed_all", {"inputs": ["a"]}) == (200, [[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])


@pytest.mark.parametrize(
    ("inputs", "texts", "is_batch"),
    [
        ("a", [("a", "")], False),
        (["a"], [("a", "")], False),
        (["a", "b"], [("a", "b")], False),
        ([["a"], ["b", "c"]], [("a", ""), ("b", "c")], True),
    ],
)
async def test_a_list_of_texts_is_a_pair_and_a_list_of_lists_a_batch(
    browser: Browser, inputs: object, texts: list[tuple[str, str]], is_batch: bool
) -> None:
    status, answer = await browser.post("/predict", {"inputs": inputs})
    labels = [{"score": 0.75, "label": "b"}, {"score": 0.25, "label": "a"}]
    assert (status, answer) == (200, [labels, labels] if is_batch else labels)
    assert [(input.text_classification.text, input.text_classification.text_pair) for input in browser.inputs] == texts
    assert browser.inputs[0].text_classification.top_k == 3  # all labels of the model


async def test_raw_scores_are_logits(browser: Browser) -> None:
    await browser.post("/predict", {"inputs": "a", "raw_scores": True})
    assert browser.inputs[0].text_classification.function == ScoreFunction.SCORE_FUNCTION_NONE


@pytest.mark.parametrize(
    ("inputs", "error"),
    [
        ([["a"], []], "inputs[1]: 0 texts, must be one or a pair"),
        (["a", "b", "c"], "inputs: 3 texts, must be one or a pair"),
        ([], "inputs: 0 texts, must be one or a pair"),
        ([["a"], ["b", ""]], "inputs[1]: the second text is empty; send the first one alone, or a text"),
        (["a", ""], "inputs: the second text is empty; send the first one alone, or a text"),
        ([["a"], ["too long"]], "inputs[1]: is too long"),
        ("too long", "inputs: is too long"),
    ],
)
async def test_an_error_of_predict_names_its_place(browser: Browser, inputs: object, error: str) -> None:
    assert await browser.post("/predict", {"inputs": inputs}) == (400, {"error": error, "error_type": "Validation"})


async def test_cosines_are_a_plain_list(browser: Browser) -> None:
    body = {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}, "parameters": {"truncate": True}}
    assert await browser.post("/similarity", body) == (200, [0.5, 0.25])
    input = browser.inputs[0].sentence_similarity
    assert (input.source, list(input.texts), input.truncation) == ("a", ["b", "c"], Truncation.TRUNCATION_RIGHT)


async def test_a_prompt_goes_by_its_name_and_is_refused_for_tokens(browser: Browser) -> None:
    await browser.post("/embed", {"inputs": "a", "prompt_name": "query"})
    await browser.post("/embed_sparse", {"inputs": "a", "prompt_name": "document"})
    dense, sparse = browser.inputs
    assert (dense.sentence_embedding.prompt_name, sparse.sparse_embedding.prompt_name) == ("query", "document")
    expected = (400, {"error": "prompt_name: is not supported", "error_type": "Validation"})
    assert await browser.post("/embed_all", {"inputs": "a", "prompt_name": "query"}) == expected


async def test_a_sparse_vector_is_a_list_of_places_and_weights(browser: Browser) -> None:
    weights = [{"index": 7, "value": 1.5}, {"index": 3, "value": 0.25}]
    assert await browser.post("/embed_sparse", {"inputs": ["a", "b"], "truncate": True}) == (200, [weights, weights])
    assert browser.inputs[0].sparse_embedding.truncation == Truncation.TRUNCATION_RIGHT


async def test_info_tells_the_kind_of_model_and_the_limits(browser: Browser) -> None:
    _, info = await browser.get("/info?model=labels")
    expected = {"classifier": {"id2label": {"0": "a", "1": "b", "2": "c"}, "label2id": {"a": 0, "b": 1, "c": 2}}}
    assert info["model_type"] == expected
    assert (info["model_id"], info["max_input_length"], info["max_client_batch_size"]) == ("labels", 16, 2048)


@pytest.mark.parametrize(("inputs", "several"), [([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])])
async def test_token_ids_stand_in_place_of_a_text(browser: Browser, inputs: object, several: list[list[int]]) -> None:
    status, body = await browser.post("/embed", {"inputs": inputs})
    assert (status, len(body)) == (200, len(several))
    assert [list(input.sentence_embedding.token_ids) for input in browser.inputs] == several


async def test_a_request_that_names_no_model_needs_one_that_is_the_only_one() -> None:
    browser = Browser([*_SPECS, model_spec("sentence_embedding", name="second")], _answer)
    status, body = await browser.post("/embed", {"inputs": "a"})
    assert status == 400
    assert body["error"].startswith("model: is missing; several models have the task sentence_embedding: first, second")
    for path, more in (("/embed?model=second", {}), ("/embed", {"model": "second"})):
        await browser.post(path, {"inputs": "a", **more})
    assert [request.model for request in browser.pipeline.asked] == ["second", "second"]


async def test_the_first_default_that_has_the_task_answers() -> None:
    browser = Browser(
        [*_SPECS, model_spec("sentence_embedding", name="second")], _answer, default_models="labels, second,first"
    )
    await browser.post("/embed", {"inputs": "a"})
    await browser.post("/embed?model=first", {"inputs": "a"})
    assert [request.model for request in browser.pipeline.asked] == ["second", "first"]


def test_a_default_that_is_not_served_is_named_at_the_start() -> None:
    with pytest.raises(SetupError, match="default_models: third is not served; served are: first, labels, tokens"):
        Browser(_SPECS, _answer, default_models="labels,third")


async def test_a_task_that_no_model_has_is_not_found(browser: Browser) -> None:
    expected = (404, {"error": "no model has the task rerank", "error_type": "Validation"})
    assert await browser.post("/rerank", {"query": "q", "texts": ["a"]}) == expected
