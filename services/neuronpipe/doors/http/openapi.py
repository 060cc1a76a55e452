"""The document at /openapi.json, made of the routes."""

import asyncio
import re
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import TypeAdapter

from neuronpipe import __version__
from neuronpipe.core.names import ROUTE_KEY
from neuronpipe.core.task_inputs import SAMPLES
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.exchange import JSON, HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.unknown_fields import STRICT_FIELD
from neuronpipe.doors.inference import MODEL_FIELD, PRIORITY_FIELD, VERSION_FIELD

OPENAPI = Route("GET", "/openapi.json", "this document", gives=dict[str, Any], service="reflection")

_OURS, _SERVER = "neuronpipe", "Health, metrics and documents"
_DESCRIPTION = "The models of this server, by its own API and by the APIs of other servers, each in a group of its own."
_TEXT: dict[str, Any] = {"type": "string"}
_MILLISECONDS = {"type": "integer", "minimum": 0, "maximum": 999_999_999}
_HEADERS: dict[str, tuple[dict[str, Any], str]] = {
    "x-request-timeout-ms": (_MILLISECONDS, "the deadline: milliseconds from now"),
    "x-request-id": (_TEXT, "an id for the server's log; one is made where it is missing"),
    "traceparent": (_TEXT, "W3C trace context"),
    MODEL_FIELD: (_TEXT, "the model, where neither path, body nor query name one"),
    VERSION_FIELD: (_TEXT, "the model's version, a number or an alias; default: as the model's route says"),
    ROUTE_KEY: (_TEXT, "requests with the same key get the same version; default: each by its id"),
    PRIORITY_FIELD: ({"enum": ["interactive", "bulk"]}, "bulk is for work that may wait; default: interactive"),
    STRICT_FIELD: (
        {"enum": ["true", "false"]},
        "true: every field that the body does not have is an error; false: such fields are ignored, and the header "
        "x-neuronpipe-ignored of the answer lists them; default: those that change no answer are ignored",
    ),
}
_SAMPLE, _PROMPT = SAMPLES["sentence_embedding"]["text"], SAMPLES["text_generation"]["prompt"]
_QUERY, _TEXTS, _IDS = SAMPLES["rerank"]["query"], SAMPLES["rerank"]["texts"], SAMPLES["detokenization"]["token_ids"]
_MESSAGES = {"messages": [{"role": "user", "content": _PROMPT}]}
# Examples of bodies by a part of the path. The first that fits counts.
_EXAMPLES: dict[str, Any] = {
    "/v1/infer": {"model": "NAME", "input": {"sentence_embedding": {"text": _SAMPLE}}},
    "/v1/generate": {"model": "NAME", "input": {"text_generation": SAMPLES["text_generation"]}},
    "/generate": {"inputs": _PROMPT, "parameters": {"max_new_tokens": 40}},
    "/chat/completions": _MESSAGES,
    "/completions": {"prompt": _PROMPT, "max_tokens": 40},
    "/count_tokens": _MESSAGES,
    "/messages": {**_MESSAGES, "max_tokens": 40},
    **{path: {"input": _SAMPLE} for path in ("/responses", "/embeddings", "/moderations", "/classify", "/pooling")},
    "/v2/embed": {"texts": [_SAMPLE], "input_type": "search_document", "embedding_types": ["float"]},
    **{path: {"query": _QUERY, "documents": _TEXTS} for path in ("/v1/rerank", "/v2/rerank")},
    "/rerank": {"query": _QUERY, "texts": _TEXTS},
    "/similarity": {"inputs": {"source_sentence": _QUERY, "sentences": _TEXTS}},
    "/decode": {"ids": [_IDS]},
    "/detokenize": {"tokens": _IDS},
    "/score": {"text_1": _QUERY, "text_2": _TEXTS},
    "/infer": {"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [_SAMPLE]}]},
    "/": {"inputs": _SAMPLE},
}


def openapi_handlers(routes: Sequence[Route]) -> HttpHandlers:
    """Returns the route with its handler. The first request makes the document, which takes 0.2 s of CPU time."""
    turn, document = asyncio.Lock(), b""

    async def openapi_json(request: HttpRequest) -> HttpResponse:
        nonlocal document
        async with turn:
            document = document or await asyncio.to_thread(lambda: write_body(openapi((*routes, OPENAPI))))
        return HttpResponse(document)

    return [(OPENAPI, openapi_json)]


def openapi(routes: Iterable[Route]) -> dict[str, Any]:
    """Returns the document of the routes in OpenAPI 3.1, with the schemas of pydantic's types."""
    routes = list(routes)
    kinds: list[Any] = [
        ((route.key, side), "validation", TypeAdapter(kind))
        for route in routes
        for side, kind in (("takes", route.takes), ("gives", route.gives))
        if kind is not None
    ]
    schemas, shared = TypeAdapter.json_schemas(kinds, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for route in routes:
        takes, gives = (schemas.get(((route.key, side), "validation")) for side in ("takes", "gives"))
        paths.setdefault(route.shown_path, {})[route.method.lower()] = _operation(route, takes, gives)
    return {
        "openapi": "3.1.0",
        "info": {"title": "neuronpipe", "version": __version__, "description": _DESCRIPTION},
        "tags": [{"name": name} for name in dict.fromkeys([_OURS, *map(_protocol, routes), _SERVER]) if name],
        "paths": paths,
        "components": {"schemas": shared.get("$defs", {})},
    }


def _protocol(route: Route) -> str:
    """Returns the protocol under which the document lists a route: the word before the colon of its summary."""
    if route.service:
        return _SERVER
    named = re.match(r"([\w ]+?)(?:'s runtime|, \w+)?: ", route.summary)
    return named[1] if named else _OURS


def _schema(shape: Any) -> dict[str, Any]:
    """Returns the JSON Schema of an error's shape. Objects may have more fields."""
    if not isinstance(shape, dict):
        return TypeAdapter(shape).json_schema()
    properties = {name.removesuffix("?"): _schema(part) for name, part in shape.items()}
    required = [name for name in shape if not name.endswith("?")]
    return {"type": "object", "properties": properties, "required": required}


def _operation(route: Route, takes: Any, gives: Any) -> dict[str, Any]:
    parameters = [
        _parameter(name, "path", _TEXT, "", is_required=True) for name in re.findall(r"\{(\w+)\}", route.path)
    ]
    parameters += [_parameter(name, "query", _TEXT, text) for name, text in route.query.items()]
    if route.is_counted:
        parameters += [_parameter(name, "header", schema, text) for name, (schema, text) in _HEADERS.items()]
    error = {route.error_form.media_type: {"schema": _schema(route.error_form.shape)}}
    operation: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", route.key.lower()).strip("_"),
        "tags": [_protocol(route)],
        "summary": route.summary.removeprefix(f"{_protocol(route)}: "),
        "parameters": parameters,
        "responses": {
            "200": {"description": "the answer"},
            "default": {"description": "an error; docs/http.md lists the status codes", "content": error},
        },
    }
    if gives is not None:
        operation["responses"]["200"]["content"] = {JSON: {"schema": gives}}
    if takes is not None:
        example = next(body for part, body in _EXAMPLES.items() if part in route.path)
        content = {JSON: {"schema": takes, "example": example}} | {media: {} for media in route.takes_media}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _parameter(
    name: str, place: str, schema: dict[str, Any], text: str, *, is_required: bool = False
) -> dict[str, Any]:
    return {"name": name, "in": place, "required": is_required, "description": text, "schema": schema}
