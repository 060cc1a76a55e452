"""doors/http/cohere.py."""

from base64 import b64decode
from typing import Any

import numpy as np
import pytest
from sentence_transformers.util.quantization import quantize_embeddings

from neuronpipe.api.v1.tasks_pb2 import ImageEmbeddingInput, SentenceEmbeddingInput, TaskInput, TaskResult, Truncation
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import model_spec
from tests.unit.task_messages import task_result

# The vector of a model, which is not of length one, and its ranges of int8.
_VECTOR = np.array([3, -1, 0.5, 2, -4, 1, 1, -0.25], np.float32)
_LOWEST, _HIGHEST = (-1.0,) * 8, (1.0,) * 8
_ASKED = {"texts": ["a", "b"], "input_type": "search_document"}


def _answer(input: TaskInput) -> TaskResult:
    return task_result(sentence_embedding={"embedding": _VECTOR})


def _browser(**facts: Any) -> Browser:
    spec = model_spec("sentence_embedding", embedding_dimensions=8, lowest=_LOWEST, highest=_HIGHEST, **facts)
    return Browser([spec], _answer)


async def test_every_type_is_made_of_one_vector() -> None:
    browser = _browser()
    words = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
    status, answer = await browser.post("/v2/embed", _ASKED | {"embedding_types": words}, x_request_id="r")
    assert (status, answer["id"], answer["response_type"]) == (200, "r", "embeddings_by_type")
    assert (answer["texts"], answer["meta"]["billed_units"]) == (["a", "b"], {"input_tokens": 10})
    assert len(browser.inputs) == 2
    vectors = np.stack([_VECTOR / np.linalg.norm(_VECTOR)] * 2)
    np.testing.assert_allclose(answer["embeddings"]["float"], vectors, atol=1e-7)
    np.testing.assert_array_equal(
        [np.frombuffer(b64decode(text), "<f4") for text in answer["embeddings"]["base64"]],
        np.array(answer["embeddings"]["float"], np.float32),
    )
    for word in ("int8", "uint8", "binary", "ubinary"):
        expected = quantize_embeddings(vectors, word, ranges=np.array([_LOWEST, _HIGHEST], np.float32))
        assert answer["embeddings"][word] == expected.tolist(), word


async def test_floats_are_the_default_and_dimensions_are_cut_before_scaling() -> None:
    _, answer = await _browser().post("/v2/embed", _ASKED | {"output_dimension": 2})
    assert answer["embeddings"].keys() == {"float"}
    np.testing.assert_allclose(answer["embeddings"]["float"][0], [3 / 10**0.5, -1 / 10**0.5], atol=1e-6)


@pytest.mark.parametrize(
    ("prompts", "input_type", "prompt_name"),
    [
        ({"query": "q", "document": "d"}, "search_query", "query"),
        ({"query": "q", "passage": "d"}, "search_document", "passage"),
        ({"query": "q"}, "search_document", ""),
        ({"search_query": "q"}, "search_query", "search_query"),
        ({"Clustering": "c"}, "clustering", "Clustering"),
    ],
    ids=str,
)
async def test_input_type_chooses_the_models_prompt(prompts: dict[str, str], input_type: str, prompt_name: str) -> None:
    browser = _browser(prompts=prompts)
    assert (await browser.post("/v2/embed", {"texts": ["a"], "input_type": input_type}))[0] == 200
    assert browser.inputs[0].sentence_embedding.prompt_name == prompt_name
    assert "x-neuronpipe-ignored" not in browser.headers


async def test_a_model_without_prompts_says_that_it_ignores_the_type() -> None:
    browser = _browser()
    assert (await browser.post("/v2/embed", _ASKED))[0] == 200
    assert browser.headers["x-neuronpipe-ignored"] == "input_type"
    status, answer = await browser.post("/v2/embed", _ASKED, neuronpipe_strict="true")
    assert (status, answer["message"]) == (400, "input_type: is none of the model's prompts; they are: none")


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"input_type": "clustering"}, "input_type: is none of the model's prompts; they are: query"),
        ({"input_type": None}, "input_type: is missing"),
        ({"embedding_types": ["int4"]}, "embedding_types[0]: must be 'float'"),
        ({"embedding_types": []}, "embedding_types: has 0 elements, the minimum is 1"),
        ({"output_dimension": 9}, "output_dimension: 9, the model has 8"),
        ({"embedding_types": ["float", "binary"], "output_dimension": 7}, "embedding_types: binary vectors have"),
        ({"truncate": "NONE", "max_tokens": 3}, "max_tokens: is for truncate START or END"),
        ({"texts": []}, "texts: 0 inputs, must be from 1 to"),
        ({"model": "ranker"}, "supports rerank"),
    ],
    ids=str,
)
async def test_an_error_names_coheres_field(asked: dict[str, Any], message: str) -> None:
    spec = model_spec("sentence_embedding", embedding_dimensions=8, prompts={"query": "q"})
    browser = Browser([spec, model_spec("rerank", name="ranker")], _answer)
    status, answer = await browser.post("/v2/embed", _ASKED | asked)
    assert (status, browser.inputs) == (400, [])
    assert message in answer["message"]


@pytest.mark.parametrize(
    ("asked", "truncation", "tokens"),
    [
        ({}, Truncation.TRUNCATION_RIGHT, 0),
        ({"truncate": "START", "max_tokens": 7}, Truncation.TRUNCATION_LEFT, 7),
        ({"truncate": "NONE"}, Truncation.TRUNCATION_ERROR, 0),
    ],
    ids=str,
)
async def test_long_texts_are_cut_as_cohere_cuts_them(
    asked: dict[str, Any], truncation: "Truncation.ValueType", tokens: int
) -> None:
    browser = _browser()
    await browser.post("/v2/embed", {"texts": ["a"], "input_type": "search_query"} | asked)
    expected = SentenceEmbeddingInput(text="a", skip_normalize=True, truncation=truncation, truncation_tokens=tokens)
    assert browser.inputs == [TaskInput(sentence_embedding=expected)]


@pytest.mark.parametrize(
    "asked",
    [
        {"images": ["data:image/png;base64,aW1hZ2U="]},
        {"inputs": [{"content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,aW1hZ2U="}}]}]},
    ],
    ids=str,
)
async def test_images_become_vectors(asked: dict[str, Any]) -> None:
    spec = model_spec("image_embedding", embedding_dimensions=8, lowest=_LOWEST, highest=_HIGHEST)
    result = task_result(image_embedding={"embedding": _VECTOR})
    browser = Browser([spec], lambda _: result)
    _, answer = await browser.post("/v2/embed", asked | {"input_type": "image", "embedding_types": ["ubinary"]})
    assert answer["embeddings"] == {"ubinary": [[0b10110110]]}
    assert answer["meta"]["billed_units"] == {"images": 1}
    image = ImageEmbeddingInput(image=b"image", skip_normalize=True)
    assert browser.inputs == [TaskInput(image_embedding=image)]


async def test_texts_and_images_are_billed_each_in_their_units() -> None:
    spec = model_spec("image_embedding", also_answers=("sentence_embedding",), embedding_dimensions=8)

    def answer(input: TaskInput) -> TaskResult:
        if input.HasField("image_embedding"):
            return task_result(image_embedding={"embedding": _VECTOR})
        return _answer(input)

    contents = [{"image": "aW1hZ2U="}, {"text": "a"}, {"image": "aW1hZ2U="}]
    asked = {"inputs": [{"content": [part]} for part in contents], "input_type": "search_query"}
    _, body = await Browser([spec], answer).post("/v2/embed", asked)
    assert body["meta"]["billed_units"] == {"input_tokens": 5, "images": 2}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"texts": ["a"], "images": ["aW1hZ2U="]}, "must have one of texts, images and inputs"),
        ({}, "must have one of texts, images and inputs"),
        ({"images": ["aW1hZ2U=", "http://a/b"]}, "images[1]: is an address; send the image itself"),
        ({"inputs": [{"content": 2 * [{"type": "text", "text": "a"}]}]}, "inputs[0].content: has more than 1 elements"),
    ],
    ids=str,
)
async def test_an_error_names_the_image(asked: dict[str, Any], message: str) -> None:
    browser = Browser([model_spec("image_embedding")], _answer)
    status, answer = await browser.post("/v2/embed", asked | {"input_type": "image"})
    assert (status, browser.inputs) == (400, [])
    assert message in answer["message"]
