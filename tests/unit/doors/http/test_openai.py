"""doors/http/openai.py."""

import asyncio
from base64 import b64decode
from datetime import UTC, datetime
from typing import Any

import numpy as np
import openai
import pytest

from neuronpipe.api.v1.tasks_pb2 import (
    EmbeddingPrecision,
    ImageEmbeddingInput,
    ImageEmbeddingResult,
    SentenceEmbeddingInput,
    SentenceEmbeddingResult,
    TaskInput,
    TaskResult,
    Truncation,
)
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from neuronpipe.core.names import Name
from neuronpipe.gateway.requests import InferenceRequest, InferenceResult
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import model_spec

_SPECS = [model_spec("sentence_embedding", also_answers=("sentence_similarity",)), model_spec(name="other")]


def _answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    """The text's length and its negative; a text of nothing is the pipeline's to refuse."""
    text = input.sentence_embedding.text or list(input.sentence_embedding.token_ids)
    if not text:
        return InvalidInput("text", "is empty")
    return TaskResult(sentence_embedding=SentenceEmbeddingResult(embedding=[len(text), -len(text)]))


@pytest.fixture
def browser() -> Browser:
    return Browser(_SPECS, _answer, max_http_inputs=3)


async def test_a_text_becomes_a_list_of_one_vector(browser: Browser) -> None:
    status, body = await browser.post("/v1/embeddings", {"model": "small", "input": "abc"})
    assert status == 200
    assert body == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": [3.0, -3.0]}],
        "model": "small",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }
    input = SentenceEmbeddingInput(text="abc")
    assert browser.inputs == [TaskInput(sentence_embedding=input)]


async def test_texts_become_vectors_in_their_order_and_their_tokens_are_summed(browser: Browser) -> None:
    _, body = await browser.post(
        "/v1/embeddings", {"model": "small", "input": ["a", "ccc"], "dimensions": 7, "user": "u"}
    )
    assert [(entry["index"], entry["embedding"]) for entry in body["data"]] == [(0, [1.0, -1.0]), (1, [3.0, -3.0])]
    assert body["usage"] == {"prompt_tokens": 10, "total_tokens": 10}
    assert [input.sentence_embedding.dimensions for input in browser.inputs] == [7, 7]


@pytest.mark.parametrize(
    ("field", "value"),
    [("prompt", "a: "), ("instruction", "Find."), ("foo", 1), ("late_chunking", True), ("add_special_tokens", False)],
)
async def test_a_field_that_would_change_the_vector_is_refused(browser: Browser, field: str, value: object) -> None:
    status, body = await browser.post("/v1/embeddings", {"model": "small", "input": "a", field: value})
    assert (status, body["error"]["param"], browser.inputs) == (400, field, [])
    assert "is not supported" in body["error"]["message"]


_PROMPTS = {"query": "query: ", "passage": "passage: ", "Clustering": "cluster: "}


@pytest.mark.parametrize(
    ("prompts", "given", "prompt_name"),
    [
        (_PROMPTS, {"prompt_name": "query"}, "query"),
        (_PROMPTS, {"input_type": "query"}, "query"),
        (_PROMPTS, {"input_type": "search_query"}, "query"),
        (_PROMPTS, {"input_type": "document"}, "passage"),
        (_PROMPTS, {"input_type": "search_document"}, "passage"),
        (_PROMPTS, {"input_type": "clustering"}, "Clustering"),
        (_PROMPTS, {"task": "retrieval.passage"}, "passage"),
        ({"retrieval.query": "q"}, {"task": "retrieval.query"}, "retrieval.query"),
        ({"query": "q"}, {"input_type": "document"}, ""),
        ({"query": "q"}, {}, ""),
    ],
    ids=str,
)
async def test_a_prompt_is_found_by_the_words_of_every_client(
    prompts: dict[str, str], given: dict[str, Any], prompt_name: str
) -> None:
    browser = Browser([model_spec("sentence_embedding", prompts=prompts)], _answer)
    status, _ = await browser.post("/v1/embeddings", {"input": "a", **given})
    assert (status, browser.inputs[0].sentence_embedding.prompt_name) == (200, prompt_name)


@pytest.mark.parametrize(
    ("prompts", "given", "problem"),
    [
        ({}, {"input_type": "query"}, "input_type: is none of the model's prompts; they are: none"),
        ({}, {"task": "retrieval.passage"}, "task: is none of the model's prompts; they are: none"),
        (_PROMPTS, {"task": "separation"}, "they are: Clustering, passage, query"),
        (_PROMPTS, {"prompt_name": "query", "input_type": "query"}, "input_type: says the same as prompt_name"),
    ],
    ids=str,
)
async def test_a_prompt_that_the_model_does_not_have_is_refused(
    prompts: dict[str, str], given: dict[str, Any], problem: str
) -> None:
    browser = Browser([model_spec("sentence_embedding", prompts=prompts)], _answer)
    status, body = await browser.post("/v1/embeddings", {"input": "a", **given})
    assert (status, browser.inputs) == (400, [])
    assert problem in body["error"]["message"]


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        ({"input_type": "query", "truncation": True}, "input_type"),
        ({"input_type": "document", "output_dimension": 2}, "input_type"),
        ({"task": "retrieval.query", "embedding_type": "float"}, "task"),
        ({"task": "text-matching", "late_chunking": False}, "task"),
    ],
    ids=str,
)
async def test_voyages_and_jinas_word_for_a_prompt_is_ignored_by_a_model_without_prompts(
    browser: Browser, given: dict[str, Any], ignored: str
) -> None:
    body = {"model": "small", "input": "a", **given}
    assert (await browser.post("/v1/embeddings", body))[0] == 200
    assert browser.headers["x-neuronpipe-ignored"] == ignored
    assert browser.inputs[0].sentence_embedding.prompt_name == ""
    status, answer = await browser.post("/v1/embeddings", body, neuronpipe_strict="true")
    assert (status, answer["error"]["param"]) == (400, ignored)
    with_prompts = Browser([model_spec("sentence_embedding", prompts={"query": "q", "passage": "p"})], _answer)
    status, _ = await with_prompts.post("/v1/embeddings", body | {ignored: "separation"})
    assert status == 400


async def test_the_words_of_other_clients_are_understood_and_their_defaults_change_nothing(browser: Browser) -> None:
    defaults = {"embedding_type": "float", "late_chunking": False, "modality": "text"}
    defaults |= {"priority": 0, "embed_dtype": "float32", "endianness": "native", "metadata": {"a": "b"}}
    asked = {"output_dimension": 7, "truncation": True, "normalized": False, "truncation_side": "left"}
    status, _ = await browser.post("/v1/embeddings", {"model": "small", "input": "a", **defaults, **asked})
    expected = SentenceEmbeddingInput(
        text="a", dimensions=7, skip_normalize=True, truncation=Truncation.TRUNCATION_LEFT
    )
    assert (status, browser.inputs) == (200, [TaskInput(sentence_embedding=expected)])


_TOO_LONG = InvalidInput("text", "9 tokens; set truncation to cut", ["truncation"])
_NO_PROMPT = InvalidInput("prompt_name", "no prompt goes before token_ids", ["token_ids"])


@pytest.mark.parametrize(
    ("error", "given", "told"),
    [
        (InvalidInput("precision", "is wrong"), {"embedding_type": "int8"}, "embedding_type: is wrong"),
        (InvalidInput("precision", "is wrong"), {"output_dtype": "int8"}, "output_dtype: is wrong"),
        (InvalidInput("dimensions", "is wrong"), {"output_dimension": 999}, "output_dimension: is wrong"),
        (_TOO_LONG, {"truncation": False}, "input: 9 tokens; set truncation to cut"),
        (_TOO_LONG, {"truncate": False}, "input: 9 tokens; set truncate to cut"),
        (_NO_PROMPT, {"input_type": "query"}, "input_type: no prompt goes before input"),
        (_NO_PROMPT, {"task": "query"}, "task: no prompt goes before input"),
        (_NO_PROMPT, {"prompt_name": "query"}, "prompt_name: no prompt goes before input"),
    ],
)
async def test_an_error_has_the_name_that_was_sent(error: InvalidInput, given: dict[str, Any], told: str) -> None:
    browser = Browser([model_spec("sentence_embedding", prompts=_PROMPTS)], lambda _: error)
    _, body = await browser.post("/v1/embeddings", {"input": "a", **given})
    assert body["error"]["message"] == told


@pytest.mark.parametrize(
    ("first", "second"), [("dimensions", "output_dimension"), ("normalize", "normalized"), ("truncate", "truncation")]
)
async def test_two_names_of_a_field_are_refused_together(browser: Browser, first: str, second: str) -> None:
    value: object = 7 if first == "dimensions" else True
    status, body = await browser.post("/v1/embeddings", {"model": "small", "input": "a", first: value, second: value})
    assert (status, body["error"]["param"], browser.inputs) == (400, second, [])
    assert body["error"]["message"] == f"{second}: says the same as {first}; send one of them"
    status, _ = await browser.post("/v1/embeddings", {"model": "small", "input": "a", first: None, second: value})
    assert status == 200


async def test_an_error_of_a_message_names_the_message() -> None:
    browser = Browser(_SPECS, lambda _: InvalidInput("text", "is empty"))
    _, body = await browser.post("/v1/embeddings", {"model": "small", "messages": [{"role": "user", "content": ""}]})
    assert body["error"]["message"] == "messages[0].content: is empty"


async def test_base64_is_of_float32_in_little_endian(browser: Browser) -> None:
    _, body = await browser.post("/v1/embeddings", {"model": "small", "input": "abc", "encoding_format": "base64"})
    assert np.frombuffer(b64decode(body["data"][0]["embedding"]), "<f4").tolist() == [3, -3]


@pytest.mark.parametrize(
    ("word", "precision", "dtype"),
    [
        ("output_dtype", EmbeddingPrecision.EMBEDDING_PRECISION_INT8, "int8"),
        ("output_dtype", EmbeddingPrecision.EMBEDDING_PRECISION_UINT8, "uint8"),
        ("embedding_type", EmbeddingPrecision.EMBEDDING_PRECISION_BINARY, "binary"),
        ("embedding_type", EmbeddingPrecision.EMBEDDING_PRECISION_UBINARY, "ubinary"),
    ],
)
async def test_voyage_and_jina_name_the_numbers_of_a_vector(
    word: str, precision: "EmbeddingPrecision.ValueType", dtype: str
) -> None:
    result = SentenceEmbeddingResult(packed=b"\x01\xff", precision=precision)
    browser = Browser(_SPECS, lambda _: TaskResult(sentence_embedding=result))
    _, body = await browser.post("/v1/embeddings", {"model": "small", "input": "a", word: dtype})
    assert body["data"][0]["embedding"] == ([1, 255] if dtype.startswith("u") else [1, -1])
    assert browser.inputs[0].sentence_embedding.precision == precision
    asked = {"model": "small", "input": "a", word: dtype, "encoding_format": "base64"}
    _, body = await browser.post("/v1/embeddings", asked)
    assert b64decode(body["data"][0]["embedding"]) == b"\x01\xff"


async def test_jinas_base64_is_a_type_of_float32(browser: Browser) -> None:
    _, body = await browser.post("/v1/embeddings", {"model": "small", "input": "abc", "embedding_type": "base64"})
    assert np.frombuffer(b64decode(body["data"][0]["embedding"]), "<f4").tolist() == [3, -3]
    assert browser.inputs == [TaskInput(sentence_embedding=SentenceEmbeddingInput(text="abc"))]


_VECTOR = np.array([3, -1, 0.5, 2, -4, 1, 1, -0.25], np.float32)


def _typed_browser() -> Browser:
    spec = model_spec("sentence_embedding", embedding_dimensions=8)
    return Browser([spec], lambda _: TaskResult(sentence_embedding=SentenceEmbeddingResult(embedding=_VECTOR)))


async def test_several_types_are_an_object_for_each_vector_of_one_run() -> None:
    browser = _typed_browser()
    given = {"input": ["a", "b"], "embedding_type": ["float", "ubinary", "base64"]}
    _, body = await browser.post("/v1/embeddings", given)
    assert [entry["embedding"].keys() for entry in body["data"]] == [{"float", "ubinary", "base64"}] * 2
    found = body["data"][1]["embedding"]
    scaled = _VECTOR / np.linalg.norm(_VECTOR)
    np.testing.assert_allclose(found["float"], scaled, atol=1e-7)
    np.testing.assert_allclose(np.frombuffer(b64decode(found["base64"]), "<f4"), scaled, atol=1e-7)
    assert found["ubinary"] == [0b10110110]
    whole = SentenceEmbeddingInput(text="a", skip_normalize=True)
    assert browser.inputs[0] == TaskInput(sentence_embedding=whole)
    assert len(browser.inputs) == 2


async def test_several_types_have_the_options_of_one() -> None:
    given = {"input": "a", "embedding_type": ["float"], "dimensions": 2, "normalize": False}
    _, body = await _typed_browser().post("/v1/embeddings", given)
    assert body["data"][0]["embedding"] == {"float": [3, -1]}
    _, body = await _typed_browser().post("/v1/embeddings", given | {"encoding_format": "base64"})
    assert np.frombuffer(b64decode(body["data"][0]["embedding"]["float"]), "<f4").tolist() == [3, -1]


async def test_a_list_without_token_ids_is_refused() -> None:
    status, body = await _typed_browser().post("/v1/embeddings", {"input": [[1], []]})
    expected = (400, "input[1]: has 0 elements, the minimum is 1")
    assert (status, body["error"]["message"]) == expected


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"embedding_type": ["int8"]}, "embedding_type: the model's bundle has no ranges for int8"),
        ({"embedding_type": ["binary"], "dimensions": 7}, "embedding_type: binary vectors have"),
        ({"embedding_type": ["float"], "output_dimension": 9}, "output_dimension: 9, the model has 8"),
        ({"embedding_type": ["int4"]}, "embedding_type[0]: must be 'float'"),
        ({"embedding_type": "int4"}, "embedding_type: must be 'float'"),
        ({"embedding_type": []}, "embedding_type: has 0 elements, the minimum is 1"),
    ],
    ids=str,
)
async def test_a_type_that_the_model_cannot_have_is_refused(given: dict[str, Any], told: str) -> None:
    browser = _typed_browser()
    status, body = await browser.post("/v1/embeddings", {"input": "a", **given})
    assert (status, browser.inputs) == (400, [])
    assert body["error"]["message"].startswith(told)


async def test_an_error_of_one_text_names_its_place(browser: Browser) -> None:
    status, body = await browser.post("/v1/embeddings", {"model": "small", "input": ["a", ""]})
    assert status == 400
    problem = {"message": "input[1]: is empty", "type": "invalid_request_error", "param": "input[1]"}
    assert body["error"] == problem | {"code": "invalid_input"}
    _, body = await browser.post("/v1/embeddings", {"model": "small", "input": ""})
    assert body["error"]["param"] == "input"


@pytest.mark.parametrize(("ids", "several"), [([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])])
async def test_token_ids_stand_in_place_of_a_text(browser: Browser, ids: object, several: list[list[int]]) -> None:
    status, body = await browser.post("/v1/embeddings", {"model": "small", "input": ids, "dimensions": 2})
    assert (status, [entry["index"] for entry in body["data"]]) == (200, [*range(len(several))])
    assert [list(input.sentence_embedding.token_ids) for input in browser.inputs] == several
    assert {(input.sentence_embedding.text, input.sentence_embedding.dimensions) for input in browser.inputs} == {
        ("", 2)
    }


@pytest.mark.parametrize(
    ("ids", "field"),
    [
        ([1, -1], "input[1]"),
        ([[1], [1 << 32]], "input[1][0]"),
        ([1, 2.5], "input[1]"),
        ([1, "a"], "input[1]"),
        ([1] * 65_537, "input"),
    ],
)
async def test_what_is_no_token_id_is_named_by_its_place(browser: Browser, ids: object, field: str) -> None:
    status, body = await browser.post("/v1/embeddings", {"model": "small", "input": ids})
    assert (status, body["error"]["param"]) == (400, field)


@pytest.mark.parametrize("count", [0, 4])
async def test_no_inputs_and_too_many_are_refused_by_the_limit(browser: Browser, count: int) -> None:
    status, body = await browser.post("/v1/embeddings", {"model": "small", "input": ["a"] * count})
    assert status == 400
    assert body["error"]["message"] == f"input: {count} inputs, must be from 1 to 3"


async def test_as_many_texts_as_openai_takes_run_in_turns_of_a_batch() -> None:
    browser = Browser(_SPECS, _answer)
    running = most = 0
    infer = browser.pipeline.infer

    async def counted(request: InferenceRequest, span: Name) -> InferenceResult:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return await infer(request, span)

    browser.pipeline.infer = counted  # type: ignore[method-assign]
    status, body = await browser.post(
        "/v1/embeddings", {"model": "small", "input": ["a" * (n % 9 + 1) for n in range(2048)]}
    )
    assert (status, most) == (200, 256)
    assert [entry["embedding"][0] for entry in body["data"]] == [n % 9 + 1 for n in range(2048)]


@pytest.mark.parametrize(
    ("cuts", "kept"),
    [
        ({"truncate": True}, 0),
        ({"truncate_prompt_tokens": -1}, 0),
        ({"truncate_prompt_tokens": 7}, 7),
        ({"truncate": True, "truncate_prompt_tokens": 7}, 7),
    ],
    ids=str,
)
async def test_a_long_text_is_cut_where_the_request_says_so(browser: Browser, cuts: dict[str, Any], kept: int) -> None:
    await browser.post("/v1/embeddings", {"model": "small", "input": "abc", **cuts})
    input = browser.inputs[0].sentence_embedding
    assert (input.truncation, input.truncation_tokens) == (Truncation.TRUNCATION_RIGHT, kept)


async def test_a_long_text_is_told_by_which_field_to_cut_it() -> None:
    problem = "9 tokens, the model takes 8; set truncation to cut"
    browser = Browser(_SPECS, lambda given: InvalidInput("text", problem, ["truncation"]))
    _, body = await browser.post("/v1/embeddings", {"model": "small", "input": ["a"]})
    assert body["error"]["message"] == "input[0]: 9 tokens, the model takes 8; set truncate to cut"


@pytest.mark.parametrize("named", [{}, {"model": ""}, {"model": "dummy"}, {"model": "tgi"}], ids=str)
async def test_without_a_model_the_default_one_answers(browser: Browser, named: dict[str, str]) -> None:
    """huggingface_hub sends `dummy` where it has none."""
    status, body = await browser.post("/v1/embeddings", {"input": "abc"} | named)
    assert (status, body["model"], browser.pipeline.asked[0].model) == (200, "small", "small")


async def test_an_alias_is_listed_and_answers_under_its_name() -> None:
    browser = Browser(_SPECS, _answer, model_aliases="BAAI/bge-m3=small, gone=unknown")
    _, body = await browser.get("/v1/models")
    expected = [("other", "other"), ("small", "small"), ("BAAI/bge-m3", "small")]
    assert [(model["id"], model["root"]) for model in body["data"]] == expected
    assert (await browser.get("/v1/models/BAAI/bge-m3"))[1] == body["data"][2]
    status, body = await browser.post("/v1/embeddings", {"model": "BAAI/bge-m3", "input": "a"})
    assert (status, body["model"]) == (200, "BAAI/bge-m3")
    assert (await browser.get("/v1/models/gone"))[0] == 404


async def test_models_are_listed_by_the_names_that_requests_call(browser: Browser) -> None:
    _, body = await browser.get("/v1/models")
    expected = [("other", ["text_classification"]), ("small", ["sentence_embedding", "sentence_similarity"])]
    assert [(model["id"], model["tasks"]) for model in body["data"]] == expected
    assert (await browser.get("/v1/models/small"))[1] == body["data"][1]


async def test_a_model_has_the_fields_of_anthropics_models(browser: Browser) -> None:
    _, body = await browser.get("/v1/models/small")
    assert (body["type"], body["display_name"]) == ("model", "small")
    assert datetime.fromisoformat(body["created_at"]) == datetime.fromtimestamp(body["created"], UTC)
    read = openai.types.Model.model_validate(body)
    assert (read.id, read.created, read.owned_by) == ("small", 0, "neuronpipe")


async def test_an_unknown_model_is_not_found(browser: Browser) -> None:
    status, body = await browser.get("/v1/models/unknown")
    assert (status, body["error"]["code"]) == (404, "model_not_found")


async def test_a_name_without_end_is_not_repeated(browser: Browser) -> None:
    status, body = await browser.get(f"/v1/models/{'x' * 10_000}")
    assert (status, body["error"]["message"]) == (400, "model: 10000 characters, the limit is 256")


async def test_results_that_are_too_large_together_are_refused() -> None:
    browser = Browser(_SPECS, _answer, max_batch_response_bytes=1 << 10)
    status, body = await browser.post("/v1/embeddings", {"model": "small", "input": ["a"] * 200})
    assert status == 400
    assert body["error"]["message"].startswith(
        "input: the results are too large for one response, the limit is 1024 bytes"
    )


_IMAGE = {"url": "data:image/png;base64,aW1hZ2U="}
_PARTS: list[dict[str, Any]] = [
    {"type": "image_url", "image_url": _IMAGE | {"detail": "auto"}},
    {"type": "input_image", "image_url": _IMAGE["url"]},
    {"image": "aW1hZ2U="},
    {"image": _IMAGE["url"]},
]


def _image_browser() -> Browser:
    def answer(input: TaskInput) -> TaskResult:
        if input.HasField("image_embedding"):
            return TaskResult(image_embedding=ImageEmbeddingResult(embedding=[1, 2]))
        return TaskResult(sentence_embedding=SentenceEmbeddingResult(embedding=[3, 4]))

    return Browser([model_spec("image_embedding", also_answers=("sentence_embedding",))], answer, max_input_bytes=64)


async def test_images_of_every_form_become_vectors_among_those_of_texts() -> None:
    browser = _image_browser()
    parts = [*_PARTS, {"type": "text", "text": "a"}, {"text": "b"}, "c"]
    _, body = await browser.post("/v1/embeddings", {"input": parts, "dimensions": 2, "normalize": False})
    assert [entry["embedding"] for entry in body["data"]] == [*4 * [[1, 2]], *3 * [[3, 4]]]
    image = ImageEmbeddingInput(image=b"image", dimensions=2, skip_normalize=True)
    assert browser.inputs[:4] == 4 * [TaskInput(image_embedding=image)]
    assert [input.sentence_embedding.text for input in browser.inputs[4:]] == ["a", "b", "c"]


@pytest.mark.parametrize("content", [[_PARTS[0]], [{"type": "text", "text": "a"}], "a"], ids=str)
async def test_vllms_messages_are_a_text_or_an_image(content: object) -> None:
    browser = _image_browser()
    _, body = await browser.post("/v1/embeddings", {"messages": [{"role": "user", "content": content}]})
    assert body["data"][0]["embedding"] == ([1, 2] if content == [_PARTS[0]] else [3, 4])


async def test_an_image_may_be_larger_than_a_text() -> None:
    browser = _image_browser()
    status, _ = await browser.post("/v1/embeddings", {"input": {"image": 400 * "aaaa"}})
    assert (status, len(browser.inputs[0].image_embedding.image)) == (200, 1200)


@pytest.mark.parametrize(
    ("body", "field", "problem"),
    [
        ({"input": ["a", "b" * 65]}, "input[1]", "more than 64 bytes, the limit"),
        ({"input": [{"text": "b" * 65}]}, "input[0].text", "more than 64 bytes, the limit"),
        ({"input": ["a", {"image": "https://example.com/a.png"}]}, "input[1]", "is an address; send the image itself"),
        ({"input": [{"image": ""}, {"image": "é"}]}, "input[1]", "is no Base64"),
        ({"input": {"image": "a", "text": "b"}}, "input", "must have one of text, image and image_url"),
        ({"input": {"type": "text"}}, "input", "must have one of text, image and image_url"),
        ({"input": [{"type": "audio", "text": "b"}]}, "input[0].type", "must be 'text'"),
        ({"messages": [{"role": "user", "content": _PARTS[:2]}]}, "messages[0].content", "has more than 1 elements"),
        ({"messages": [{"role": "user", "content": "a"}], "input": "a"}, "input", "is not supported"),
    ],
    ids=str,
)
async def test_a_wrong_part_is_named(body: dict[str, Any], field: str, problem: str) -> None:
    browser = _image_browser()
    status, answer = await browser.post("/v1/embeddings", body)
    assert (status, answer["error"]["param"], browser.inputs) == (400, field, [])
    assert problem in answer["error"]["message"]


def _static_answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    """As _answer, of one text or several; a text of nothing is refused by its place."""
    texts = list(input.sentence_embedding.texts)
    if "" in texts:
        return InvalidInput(f"texts[{texts.index('')}]", "is empty")
    if input.sentence_embedding.precision:
        packed = b"".join(bytes([len(text), 255]) for text in texts)
        precision = EmbeddingPrecision.EMBEDDING_PRECISION_UINT8
        return TaskResult(sentence_embedding=SentenceEmbeddingResult(packed=packed, precision=precision))
    embedding = [number for text in texts for number in (len(text), -len(text))]
    return TaskResult(sentence_embedding=SentenceEmbeddingResult(embedding=embedding)) if texts else _answer(input)


@pytest.fixture
def static() -> Browser:
    return Browser([model_spec("sentence_embedding", architecture="StaticEmbeddingModel")], _static_answer)


async def test_texts_for_static_embeddings_are_one_input(static: Browser) -> None:
    body = {"model": "small", "input": ["a", "ccc"], "dimensions": 2}
    _, answer = await static.post("/v1/embeddings", body)
    assert [(one["index"], one["embedding"]) for one in answer["data"]] == [(0, [1.0, -1.0]), (1, [3.0, -3.0])]
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}  # of the input, which the pipeline counted
    expected = SentenceEmbeddingInput(texts=["a", "ccc"], dimensions=2)
    assert static.inputs == [TaskInput(sentence_embedding=expected)]
    _, answer = await static.post("/v1/embeddings", body | {"output_dtype": "uint8"})
    assert [one["embedding"] for one in answer["data"]] == [[1, 255], [3, 255]]


async def test_long_texts_and_token_ids_for_static_embeddings_are_inputs_of_their_own(static: Browser) -> None:
    long = "x" * 60_000
    _, answer = await static.post("/v1/embeddings", {"model": "small", "input": ["a", "bb", long, "ccc", long]})
    assert [one["embedding"][0] for one in answer["data"]] == [1, 2, 60_000, 3, 60_000]
    inputs = [input.sentence_embedding for input in static.inputs]
    assert [len(input.texts) or input.text for input in inputs] == [4, long]
    _, answer = await static.post("/v1/embeddings", {"model": "small", "input": [[1, 2], [3]]})
    assert [one["embedding"] for one in answer["data"]] == [[2.0, -2.0], [1.0, -1.0]]


async def test_a_refused_text_of_many_for_static_embeddings_is_named_by_its_own_index(static: Browser) -> None:
    texts = ["x" * 40_000, "x" * 40_000, "a", "", "b"]
    status, body = await static.post("/v1/embeddings", {"model": "small", "input": texts})
    assert status == 400
    assert body["error"]["param"] == "input[3]"
    assert body["error"]["message"].startswith("input[3]: is empty")
