"""doors/http/rerank.py."""

from typing import Any

import pytest

from neuronpipe.api.v1.tasks_pb2 import ScoreFunction, TaskInput, TaskResult, Truncation
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import model_spec
from tests.unit.task_messages import task_input, task_result


def _answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    """The last text first; an empty text is refused as the task does it."""
    texts = input.rerank.texts
    if "" in texts:
        return InvalidInput(f"query and texts[{list(texts).index('')}]", "is empty")
    order = list(reversed(range(len(texts))))[: input.rerank.top_n or None]
    return task_result(rerank={"texts": [{"index": index, "score": index / 4} for index in order]})


@pytest.fixture
def browser() -> Browser:
    return Browser([model_spec("rerank")], _answer)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
async def test_documents_come_back_as_cohere_and_jina_have_them(browser: Browser, path: str) -> None:
    body = {"model": "small", "query": "q", "documents": ["a", {"text": "b", "title": "t"}, "c"], "top_n": 2}
    status, answer = await browser.post(path, body, x_request_id="r")
    assert status == 200
    assert answer == {
        "id": "r",
        "model": "small",
        "results": [{"index": 2, "relevance_score": 0.5}, {"index": 1, "relevance_score": 0.25}],
        "usage": {"prompt_tokens": 5, "total_tokens": 5, "truncated_tokens": 2},
        "meta": {"api_version": {"version": "2"}, "billed_units": {"search_units": 1}},
    }
    truncation = Truncation.TRUNCATION_RIGHT
    found = browser.inputs
    assert found == [task_input(rerank={"query": "q", "texts": ["a", "b", "c"], "top_n": 2, "truncation": truncation})]


async def test_documents_are_returned_where_they_are_asked_for(browser: Browser) -> None:
    _, answer = await browser.post("/v2/rerank", {"query": "q", "documents": ["a", "b"], "return_documents": True})
    assert [result["document"] for result in answer["results"]] == [{"text": "b"}, {"text": "a"}]


async def test_more_may_be_asked_for_than_there_are(browser: Browser) -> None:
    status, answer = await browser.post("/v2/rerank", {"query": "q", "documents": ["a", "b"], "top_n": 9})
    assert (status, len(answer["results"])) == (200, 2)


@pytest.mark.parametrize("kept", [None, -1, 6])
async def test_documents_are_cut_to_as_many_tokens_as_the_request_says(browser: Browser, kept: int | None) -> None:
    await browser.post("/v2/rerank", {"query": "q", "documents": ["a"], "truncate_prompt_tokens": kept})
    input = browser.inputs[0].rerank
    assert (input.truncation, input.truncation_tokens) == (Truncation.TRUNCATION_RIGHT, max(kept or 0, 0))


async def test_voyages_words_are_understood(browser: Browser) -> None:
    await browser.post("/v1/rerank", {"query": "q", "documents": ["a", "b"], "top_k": 1, "truncation": False})
    await browser.post("/v1/rerank", {"query": "q", "documents": ["a", "b"], "top_k": None, "truncation": True})
    assert [input.rerank.top_n for input in browser.inputs] == [1, 0]
    cuts = [input.rerank.truncation for input in browser.inputs]
    assert cuts == [Truncation.TRUNCATION_ERROR, Truncation.TRUNCATION_RIGHT]


@pytest.mark.parametrize("asked", [{"top_k": 2}, {"truncation": True}], ids=str)
async def test_voyages_clients_find_the_ranks_in_data(browser: Browser, asked: dict[str, Any]) -> None:
    body = {"query": "q", "documents": ["a", "b", "c"], "return_documents": True, **asked}
    _, answer = await browser.post("/v1/rerank", body)
    assert [(rank["index"], rank["document"]) for rank in answer["data"][:2]] == [(2, "c"), (1, "b")]
    assert answer["object"] == "list"
    assert "results" not in answer


async def test_a_request_that_may_be_voyages_has_both_answers(browser: Browser) -> None:
    body = {"model": "small", "query": "q", "documents": ["a", "b"], "return_documents": True}
    _, answer = await browser.post("/v1/rerank", body)
    assert [rank["document"] for rank in answer["data"]] == ["b", "a"]
    assert [rank["document"] for rank in answer["results"]] == [{"text": "b"}, {"text": "a"}]
    _, answer = await browser.post("/v1/rerank", {"query": "q", "documents": ["a", "b"]})
    assert answer["data"] == answer["results"] == [_rank(1), _rank(0)]


def _rank(index: int) -> dict[str, Any]:
    return {"index": index, "relevance_score": index / 4}


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/rerank", {"top_n": 1}),
        ("/v1/rerank", {"max_tokens_per_doc": 9}),
        ("/v1/rerank", {"rank_fields": ["text"]}),
        ("/v2/rerank", {}),
        ("/rerank", {}),
    ],
)
async def test_a_request_of_cohere_or_jina_has_their_answer_alone(
    browser: Browser, path: str, asked: dict[str, Any]
) -> None:
    _, answer = await browser.post(path, {"query": "q", "documents": ["a"], **asked})
    assert "results" in answer
    assert answer.keys().isdisjoint({"data", "object"})


@pytest.mark.parametrize(("documents", "units"), [(1, 1), (100, 1), (101, 2), (250, 3)])
async def test_a_hundred_documents_are_a_search_unit(browser: Browser, documents: int, units: int) -> None:
    _, answer = await browser.post("/v2/rerank", {"query": "q", "documents": ["a"] * documents, "top_n": 1})
    assert answer["meta"]["billed_units"] == {"search_units": units}


async def test_two_numbers_of_results_are_refused_together(browser: Browser) -> None:
    status, answer = await browser.post("/v1/rerank", {"query": "q", "documents": ["a"], "top_k": 1, "top_n": 2})
    assert (status, answer["message"]) == (400, "top_k: says the same as top_n; send one of them")


async def test_a_pair_that_is_too_long_is_told_to_set_voyages_field() -> None:
    error = InvalidInput("query and texts[0]", "9 tokens; set truncation to cut", ["truncation"])
    browser = Browser([model_spec("rerank")], lambda _: error)
    _, answer = await browser.post("/v1/rerank", {"query": "q", "documents": ["a"], "truncation": False})
    assert answer["message"] == "query and documents[0]: 9 tokens; set truncation to cut"


@pytest.mark.parametrize("given", [{"texts": ["a"]}, {"documents": ["a"]}], ids=str)
async def test_an_unknown_field_is_named_in_either_form(browser: Browser, given: dict[str, list[str]]) -> None:
    status, answer = await browser.post("/rerank", {"query": "q", "instruction": "Find.", **given})
    assert status == 400
    assert "instruction: is not supported" in str(answer)


async def test_an_error_names_the_document(browser: Browser) -> None:
    status, answer = await browser.post("/v2/rerank", {"query": "q", "documents": ["a", ""]})
    assert (status, answer["message"]) == (400, "query and documents[1]: is empty")


async def test_long_documents_are_limited_and_read_in_chunks_as_the_request_says(browser: Browser) -> None:
    body = {"query": "q", "documents": ["a"], "max_tokens_per_doc": 5, "max_chunks_per_doc": 3}
    assert (await browser.post("/v2/rerank", body))[0] == 200
    input = browser.inputs[0].rerank
    assert (input.max_text_tokens, input.max_chunks, input.truncation) == (5, 3, Truncation.TRUNCATION_RIGHT)


async def test_what_would_change_the_answer_and_is_not_there_is_refused(browser: Browser) -> None:
    status, answer = await browser.post("/v2/rerank", {"query": "q", "documents": ["a"], "raw_scores": True})
    assert (status, answer["detail"]) == (400, "raw_scores: is not supported")


async def test_texts_come_back_as_tei_has_them(browser: Browser) -> None:
    asked = {"query": "q", "texts": ["a", "b"], "raw_scores": True, "return_text": True}
    body = {**asked, "truncate": True, "truncation_direction": "Left"}
    status, answer = await browser.post("/rerank", body)
    expected = (200, [{"index": 1, "score": 0.25, "text": "b"}, {"index": 0, "score": 0.0, "text": "a"}])
    assert (status, answer) == expected
    input = browser.inputs[0].rerank
    assert (input.function, input.truncation) == (ScoreFunction.SCORE_FUNCTION_NONE, Truncation.TRUNCATION_LEFT)


async def test_tei_cuts_nothing_and_returns_no_texts_unless_asked_to(browser: Browser) -> None:
    _, answer = await browser.post("/rerank", {"query": "q", "texts": ["a"]})
    assert answer == [{"index": 0, "score": 0.0}]
    assert browser.inputs[0].rerank.truncation == Truncation.TRUNCATION_UNSPECIFIED


async def test_teis_form_may_ask_for_the_best_texts_as_litellm_does(browser: Browser) -> None:
    _, answer = await browser.post("/rerank", {"query": "q", "texts": ["a", "b"], "top_n": 1})
    assert answer == [{"index": 1, "score": 0.25}]
    await browser.post("/rerank", {"query": "q", "texts": ["a", "b"], "top_n": 9})
    assert [input.rerank.top_n for input in browser.inputs] == [1, 2]


async def test_neither_texts_nor_documents_is_an_error_in_teis_form(browser: Browser) -> None:
    expected = (400, {"error": "texts: is missing", "error_type": "Validation"})
    assert await browser.post("/rerank", {"query": "q"}) == expected
