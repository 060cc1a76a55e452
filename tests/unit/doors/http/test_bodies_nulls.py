"""What clients write in their own way, for each optional field of each HTTP door: null means "not given", as they write
fields that they do not set, and 5.0 is 5, as languages write it that have one kind of number.

Made of /openapi.json's schemas, so a new field of a new door is covered by itself.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from pydantic import TypeAdapter

from neuronpipe.bulk.jobs.http import job_http_handlers
from neuronpipe.doors.http.bodies import check_body
from neuronpipe.doors.http.openapi import openapi
from tests.unit.doors.http.written_pipeline import ROUTES

_jobs: Any = None
_JOB_ROUTES = [route for route, _ in job_http_handlers(_jobs)]

_ROUTES = [route for route in (*ROUTES, *_JOB_ROUTES) if route.takes]
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
    return [_resolved(form) for form in schema.get("anyOf", schema.get("oneOf", [schema]))]


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


# Of the least body, an optional field's name and its schema: a body as a client may write it, and what it stands for.
_Pair = Callable[[Any, str, Mapping[str, Any]], tuple[Any, Any] | None]


def _with_null(least: Any, name: str, field: Mapping[str, Any]) -> tuple[Any, Any]:
    return least | {name: None}, least


def _with_fraction(least: Any, name: str, field: Mapping[str, Any]) -> tuple[Any, Any] | None:
    for form in _forms(field):
        if form.get("type") == "integer" and not {"const", "enum"} & {*form}:
            whole = form.get("minimum", 0)
            return least | {name: float(whole)}, least | {name: whole}
    return None


def _pairs(schema: Mapping[str, Any], pair: _Pair, depth: int = 0) -> Iterator[tuple[str, Any, Any]]:
    """Of each optional field its path and its pair."""
    for form in _forms(schema):
        if form.get("type") == "array" and depth < _MAX_DEPTH:
            for path, written, meant in _pairs(form["items"], pair, depth + 1):
                yield f"[]{path}", [written], [meant]
        if "properties" not in form:
            continue
        least = _least(form)
        for name, field in form["properties"].items():
            if name not in form.get("required", ()) and (found := pair(least, name, field)):
                yield f".{name}", *found
            if depth < _MAX_DEPTH:
                for path, written, meant in _pairs(field, pair, depth + 1):
                    yield f".{name}{path}", least | {name: written}, least | {name: meant}


def _cases(pair: _Pair) -> dict[str, tuple[Any, Any, Any]]:
    found = {}
    for route in _ROUTES:
        operation = _DOCUMENT["paths"][route.shown_path][route.method.lower()]
        for path, *bodies in _pairs(operation["requestBody"]["content"]["application/json"]["schema"], pair):
            found[f"{route.key} {path}"] = (route, *bodies)
    return found


_NULLS, _FRACTIONS = _cases(_with_null), _cases(_with_fraction)


def test_the_cases_have_the_doors_and_the_depth() -> None:
    assert {route.key for route in _ROUTES} == {route.key for route, _, _ in _NULLS.values()}
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
        assert name in _NULLS
    for name in (
        "POST /v1/chat/completions .seed",
        "POST /v1/embeddings .dimensions",
        "POST /generate .parameters.seed",
        "POST /models/{name} .parameters.max_length",
        "POST /v1/infer .input.text_generation.options.max_new_tokens",
    ):
        assert name in _FRACTIONS


@pytest.mark.parametrize("route", _ROUTES, ids=lambda route: route.key)
def test_null_is_not_given(route: Any) -> None:
    _check_pairs(route, _NULLS)


@pytest.mark.parametrize("route", _ROUTES, ids=lambda route: route.key)
def test_a_whole_number_may_be_written_with_a_fraction(route: Any) -> None:
    _check_pairs(route, _FRACTIONS)


def _check_pairs(route: Any, cases: Mapping[str, tuple[Any, Any, Any]]) -> None:
    reader = TypeAdapter(route.takes)
    for name, (of_route, written, meant) in cases.items():
        if of_route is route:
            assert check_body(reader, written) == check_body(reader, meant), name
