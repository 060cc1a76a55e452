"""doors/http/moderations.py."""

from typing import Any

import pytest

from neuronpipe.api.v1.tasks_pb2 import LabelScore, TaskInput, TaskResult, TextClassificationInput, Truncation
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from tests.unit.doors.http.written_pipeline import Browser
from tests.unit.model_specs import model_spec
from tests.unit.task_messages import task_result

_SCORES = {"kind": {"a": 0.4, "b": 0.1, "c": 0.2}, "rude": {"b": 0.9, "a": 0.5, "c": 0.1}}


def _answer(input: TaskInput) -> TaskResult | NeuronpipeError:
    text = input.text_classification.text
    if not text:
        return InvalidInput("text", "is empty")
    labels = [LabelScore(label=label, score=score) for label, score in _SCORES[text].items()]
    return task_result(text_classification={"labels": labels})


def _browser(**facts: Any) -> Browser:
    return Browser([model_spec(**facts)], _answer)


async def _moderate(input: object, **facts: Any) -> list[dict[str, Any]]:
    status, answer = await _browser(**facts).post("/v1/moderations", {"input": input}, x_request_id="r")
    assert (status, answer["id"], answer["model"]) == (200, "modr-r", "small")
    results: list[dict[str, Any]] = answer["results"]
    return results


async def test_labels_are_the_categories_and_a_score_of_half_flags() -> None:
    kind, rude = await _moderate(["kind", "rude"])
    assert kind == {
        "flagged": False,
        "categories": {"a": False, "b": False, "c": False},
        "category_scores": pytest.approx({"a": 0.4, "b": 0.1, "c": 0.2}),
        "category_applied_input_types": {"a": ["text"], "b": ["text"], "c": ["text"]},
    }
    assert (rude["flagged"], rude["categories"]) == (True, {"a": True, "b": True, "c": False})


async def test_a_table_of_the_model_joins_labels_and_leaves_labels_out() -> None:
    categories = {"a": "harassment", "c": "harassment"}
    [kind, rude] = await _moderate(["kind", "rude"], moderation_categories=categories)
    assert (kind["flagged"], kind["category_scores"]) == (False, pytest.approx({"harassment": 0.4}))
    assert (rude["flagged"], rude["category_scores"]) == (True, pytest.approx({"harassment": 0.5}))


async def test_parts_of_an_input_share_a_result() -> None:
    parts = [{"type": "text", "text": text} for text in ("kind", "rude")]
    [result] = await _moderate(parts)
    assert result["category_scores"] == pytest.approx({"a": 0.5, "b": 0.9, "c": 0.2})


async def test_all_labels_are_asked_for_and_a_long_text_is_cut_only_where_the_request_says_so() -> None:
    browser = _browser()
    await browser.post("/v1/moderations", {"input": "kind"})
    await browser.post("/v1/moderations", {"input": "kind", "truncate_prompt_tokens": -1})
    assert [input.text_classification for input in browser.inputs] == [
        TextClassificationInput(text="kind", top_k=3, truncation=truncation)
        for truncation in (Truncation.TRUNCATION_UNSPECIFIED, Truncation.TRUNCATION_RIGHT)
    ]


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"input": ["kind", ""]}, "input[1]"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image_url", "image_url": {"url": "data:"}}]}, "input[0].image_url"),
        ({"input": "kind", "model": "other"}, None),
    ],
    ids=str,
)
async def test_an_error_names_the_input(body: dict[str, Any], field: str | None) -> None:
    status, answer = await _browser().post("/v1/moderations", body)
    assert (status, answer["error"]["param"]) == (404 if field is None else 400, field)
