"""null in a body means "not given", for each optional field of each HTTP door: as clients write fields they do not set.

Made of /openapi.json's schemas, so a new field of a new door is covered by itself.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from pydantic import TypeAdapter

from neuronpipe.bulk.jobs.http import ROUTES as JOB_ROUTES
from neuronpipe.doors.http.bodies import check_body
from neuronpipe.doors.http.handlers import ROUTES
from neuronpipe.doors.http.openapi import openapi

_ROUTES = [route for route in (*ROUTES, *JOB_ROUTES) if route.takes]
_DOCUMENT = openapi(_ROUTES)
_SCHEMAS: Mapping[str, Any] = _DOCUMENT["components"]["schemas"]
# A message may hold itself.
_MAX_DEPTH = 5


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    while "$ref" in schema:
        schema = _SCHEMAS[schema["$ref"].rpartition("/")[2]]
    return schema


def _forms(schema: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    schema = _resolved(schema)
    return [_resolved(form) for form in schema.get("anyOf", [schema])]


def _least(schema: Mapping[str, Any]) -> Any:
    """The least value of a schema: of an object with the fields alone that it must have."""
    [schema, *_] = _forms(schema)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    if "default" in schema:
        return schema["default"]
    match schema.get("type"):
        case "object":
            return {name: _least(schema["properties"][name]) for name in schema.get("required", ())}
        case "array":
            return [_least(schema["items"])] * schema.get("minItems", 1)
        case "integer" | "number":
            return schema.get("minimum", 0)
        case "boolean":
            return True
        case "string":
            return "1" if "pattern" in schema else ""
    return None


def _with_nulls(schema: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, Any, Any]]:
    """Each optional field by its path, with a body in which it is null, and with one in which it is missing."""
    for form in _forms(schema):
        if form.get("type") == "array" and depth < _MAX_DEPTH:
            for path, null, missing in _with_nulls(form["items"], depth + 1):
                yield f"[]{path}", [null], [missing]
        if "properties" not in form:
            continue
        least = _least(form)
        for name, field in form["properties"].items():
            if name not in form.get("required", ()):
                yield f".{name}", least | {name: None}, least
            if depth < _MAX_DEPTH:
                for path, null, missing in _with_nulls(field, depth + 1):
                    yield f".{name}{path}", least | {name: null}, least | {name: missing}


_CASES = {
    f"{route.key} {path}": (route, null, missing)
    for route in _ROUTES
    for path, null, missing in _with_nulls(
        _DOCUMENT["paths"][route.shown_path][route.method.lower()]["requestBody"]["content"]["application/json"][
            "schema"
        ]
    )
}


def test_the_cases_have_the_doors_and_the_depth() -> None:
    assert {route.key for route in _ROUTES} == {route.key for route, _, _ in _CASES.values()}
    for name in (
        "POST /v1/embeddings .encoding_format",
        "POST /v1/chat/completions .stream_options.include_usage",
        "POST /embed .normalize",
        "POST /rerank .return_text",
        "POST /generate .parameters",
        "POST /models/{name} .parameters.aggregation_strategy",
        "POST /v1/infer .input.text_generation.options.top_k",
        "POST /v1/jobs .notification_url",
        "POST /v2/models/{model}{/form}/infer .outputs",
    ):
        assert name in _CASES


@pytest.mark.parametrize("route", _ROUTES, ids=lambda route: route.key)
def test_null_is_not_given(route: Any) -> None:
    reader = TypeAdapter(route.takes)
    for name, (of_route, null, missing) in _CASES.items():
        if of_route is route:
            assert check_body(reader, null) == check_body(reader, missing), name
