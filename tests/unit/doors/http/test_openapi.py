"""doors/http/openapi.py."""

import asyncio
from typing import Any

import pytest

from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingResult, TaskInput, TaskResult
from neuronpipe.doors.http import openapi
from tests.unit.doors.http.doubles import ROUTES, Browser
from tests.unit.model_specs import model_spec


def _answer(input: TaskInput) -> TaskResult:
    return TaskResult(sentence_embedding=SentenceEmbeddingResult(embedding=[1, 2, 3, 4]))


@pytest.fixture
def browser() -> Browser:
    return Browser([model_spec("sentence_embedding")], _answer)


@pytest.fixture
async def document(browser: Browser) -> dict[str, Any]:
    _, document = await browser.get("/openapi.json")
    return dict(document)


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


def test_every_route_is_described(document: dict[str, Any]) -> None:
    described = {f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods}
    assert described == {f"{route.method} {route.shown_path}" for route in ROUTES}
    assert document["openapi"] == "3.1.0"


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    references: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            references.extend(item for name, item in value.items() if name == "$ref")
            value = list(value.values())
        for item in value if isinstance(value, list) else ():
            collect(item)

    collect(document)
    assert references
    assert {reference.removeprefix("#/components/schemas/") for reference in references} <= set(
        document["components"]["schemas"]
    )


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
async def test_answers_and_errors_are_as_described(
    browser: Browser, document: dict[str, Any], path: str, body: Any
) -> None:
    status, answer = await browser.post(path, body)
    response = document["paths"][path]["post"]["responses"]["200" if status == 200 else "default"]
    (content,) = response["content"].values()
    schema = content["schema"] | {"components": document["components"]}
    import jsonschema  # takes two seconds, which those who only collect tests shall not wait

    jsonschema.Draft202012Validator(schema).validate(answer)
