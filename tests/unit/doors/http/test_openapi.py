"""doors/http/openapi.py."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import TypeAdapter

from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingResult, TaskInput, TaskResult
from neuronpipe.doors.http import openapi
from neuronpipe.doors.http.bodies import check_body
from neuronpipe.doors.http.exchange import JSON, Route
from tests.unit.doors.http.written_pipeline import ROUTES, Browser
from tests.unit.model_specs import model_spec

# Generators of clients give their types these names.
_ANSWERS = {
    *("Embedding", "EmbeddingsResponse", "EmbeddingsUsage", "ModelEntry", "ModelList", "Response"),
    "ResponseTokens",
    *("Answered", "CachedTokens", "ChatChoice", "ChatCompletion", "Completion", "CompletionChoice", "TextUsage"),
    "ReasoningTokens",
    *("AnthropicMessage", "CohereEmbeddings", "MessageTokens", "ModerationResult", "Moderations"),
    *("CohereRank", "CohereRanks", "Document", "RerankUsage", "TeiRank", "VoyageRank"),
    *("Info", "Prediction", "SparseValue", "Generated", "GeneratedToken"),
    *("Detokenized", "PromptTokens", "TokenOfText"),
    *("Classes", "Classified", "PooledData", "Pools", "ScoredPair", "Scores", "_Usage"),
    *("GivenOutput", "Inferred"),
}


def _answer(input: TaskInput) -> TaskResult:
    return TaskResult(sentence_embedding=SentenceEmbeddingResult(embedding=[1, 2, 3, 4]))


@pytest.fixture
def browser() -> Browser:
    return Browser([model_spec("sentence_embedding")], _answer)


@pytest.fixture
async def document(browser: Browser) -> dict[str, Any]:
    _, document = await browser.get("/openapi.json")
    return dict(document)


_TAKING = [route for route in ROUTES if route.takes is not None]


@pytest.mark.parametrize("route", _TAKING, ids=lambda route: route.key)
def test_each_body_has_an_example_that_its_route_takes(route: Route, document: dict[str, Any]) -> None:
    content = document["paths"][route.shown_path]["post"]["requestBody"]["content"][JSON]
    assert check_body(TypeAdapter(route.takes), content["example"])


async def test_a_start_makes_no_document_and_the_first_requests_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def make(routes: Any) -> dict[str, Any]:
        made.append(routes)
        return {"openapi": "3.1.0"}

    monkeypatch.setattr(openapi, "openapi", make)
    browser = Browser([model_spec("sentence_embedding")], _answer)
    assert made == []
    answers = await asyncio.gather(*(browser.get("/openapi.json") for _ in range(3)))
    assert answers == [(200, {"openapi": "3.1.0"})] * 3
    assert len(made) == 1


def _references(value: Any) -> Iterator[str]:
    """Yields the names of the schemas to which a part of the document refers."""
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"].removeprefix("#/components/schemas/")
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _references(item)


def test_every_route_is_described(document: dict[str, Any]) -> None:
    described = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert described == {f"{route.method} {route.shown_path}" for route in ROUTES}
    assert document["openapi"] == "3.1.0"


def test_each_route_is_in_the_group_of_its_protocol(document: dict[str, Any]) -> None:
    groups = {path: one["tags"] for path, operations in document["paths"].items() for one in operations.values()}
    assert next(one["name"] for one in document["tags"]) == "neuronpipe"
    assert {name for names in groups.values() for name in names} <= {one["name"] for one in document["tags"]}
    assert groups["/v1/embeddings"] == ["OpenAI"]
    assert groups["/rerank"] == ["TEI"]
    assert groups["/v1/rerank"] == ["Cohere"]
    assert groups["/invocations"] == groups["/endpoints/{name}/invocations"] == ["SageMaker"]
    assert groups["/v1/infer"] == ["neuronpipe"]
    assert groups["/openapi.json"] == ["Health, metrics and documents"]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    references = {*_references(document)}
    assert references
    assert references <= set(document["components"]["schemas"])


def test_each_object_of_an_answer_has_its_name(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]
    found: set[str] = set()
    # The answers of these two paths are messages, whose names are in the protos.
    paths = [methods for path, methods in document["paths"].items() if path not in ("/v1/infer", "/v1/generate")]
    new = {*_references([operation["responses"] for methods in paths for operation in methods.values()])}
    while new:
        found |= new
        new = {inner for name in new for inner in _references(schemas[name])} - found
    assert found == _ANSWERS, "a new answer's name belongs to _ANSWERS"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "small", "input": ["a"]}),
        ("/v1/embeddings", {"model": "small", "input": "a", "encoding_format": "base64"}),
        ("/embed", {"inputs": "a"}),
        ("/v1/infer", {"model": "small", "input": {"sentence_embedding": {"text": "a"}}}),
        ("/v1/infer", {"model": "small", "input": {"sentence_embedding": {"text": 3}}}),
        ("/v1/embeddings", {"model": "unknown", "input": "a"}),
        ("/embed", {"inputs": 3}),
    ],
)
async def test_answers_and_errors_are_as_said(browser: Browser, document: dict[str, Any], path: str, body: Any) -> None:
    status, answer = await browser.post(path, body)
    response = document["paths"][path]["post"]["responses"]["200" if status == 200 else "default"]
    (content,) = response["content"].values()
    schema = content["schema"] | {"components": document["components"]}
    import jsonschema  # takes two seconds, which those who only collect tests shall not wait

    jsonschema.Draft202012Validator(schema).validate(answer)
