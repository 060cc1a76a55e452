"""The Open Inference Protocol over HTTP, in JSON and with the extension for binary tensors."""

import asyncio
import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field, TypeAdapter

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.names import Spans
from neuronpipe.doors.http.bodies import (
    Answer,
    Body,
    Many,
    check_body,
    read_base64,
    read_json,
    without_nulls,
    write_body,
)
from neuronpipe.doors.http.exchange import JSON, HttpHandler, HttpHandlers, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.problems import OIP_ERROR, Refused
from neuronpipe.doors.oip.service import (
    NO_SHARED_MEMORY,
    SETTINGS_OF_LOGS,
    SETTINGS_OF_TRACES,
    RowSpans,
    TensorRequest,
    TensorResponse,
    TensorService,
)
from neuronpipe.doors.oip.tensors import BYTES, MAX_TENSORS, GivenTensor

HEADER_LENGTH = b"inference-header-content-length"
_BINARY = "application/octet-stream"
# Elements of all outputs, which a thread writes.
_LARGE = 1 << 16
# Largest JSON before binary tensors.
_MAX_HEAD_BYTES = 8 << 20
_SPANS = RowSpans(Spans.HTTP_REQUEST, Spans.HTTP_BATCH, Spans.HTTP_REQUEST)
# Parameters of tensors.
_DATA_SIZE, _IS_BINARY, _ARE_BINARY = "binary_data_size", "binary_data", "binary_data_output"
_UNSUPPORTED = ("shared_memory_region", "classification")

_Parameters = Annotated[
    Mapping[str, bool | int | float | str], Field(max_length=MAX_TENSORS), BeforeValidator(without_nulls)
]
_NO_PARAMETERS: _Parameters = {}


class Input(Body):
    name: str
    shape: list[int]
    datatype: str
    parameters: _Parameters = _NO_PARAMETERS
    data: list[Any] | None = None


class Output(Body):
    name: str
    parameters: _Parameters = _NO_PARAMETERS


class Infer(Body):
    id: str = ""
    parameters: _Parameters = _NO_PARAMETERS
    inputs: Annotated[Many[Input], Field(max_length=MAX_TENSORS)]
    outputs: Annotated[Many[Output], Field(max_length=MAX_TENSORS)] | None = None


class GivenOutput(Answer):
    name: str
    shape: list[int]
    datatype: str
    parameters: _Parameters = _NO_PARAMETERS
    data: list[Any] | None = None


class Inferred(Answer):
    model_name: str
    model_version: str
    id: str = ""
    outputs: list[GivenOutput]


class Index(Body):
    ready: bool = False


class Control(Body):
    parameters: _Parameters = _NO_PARAMETERS


_INFER, _INDEX, _CONTROL = TypeAdapter(Infer), TypeAdapter(Index), TypeAdapter(Control)
# NAME/raw is two segments.
_MODEL = "/v2/models/{model}{/form}"
_VERSIONED = _MODEL + "/versions/{version}"


def _of_model(method: str, end: str, summary: str, gives: Any = dict[str, Any], **fields: Any) -> tuple[Route, Route]:
    """The routes with and without a version. The former goes first, because a model's name may have a slash."""
    one, other = (
        Route(method, path + end, f"OIP: {summary}", gives=gives, error_form=OIP_ERROR, **fields)
        for path in (_VERSIONED, _MODEL)
    )
    return one, other


def _get(path: str, summary: str, gives: Any = dict[str, Any]) -> Route:
    return Route("GET", path, f"OIP: {summary}", gives=gives, error_form=OIP_ERROR)


SERVER = _get("/v2", "the server")
STATISTICS = _get("/v2/models/stats", "statistics of all models")
READY = _of_model("GET", "/ready", "200 while the model can be run")
CONFIG = _of_model("GET", "/config", "the model in Triton's words")
MODEL_STATISTICS = _of_model("GET", "/stats", "statistics of the model")
INFER = _of_model("POST", "/infer", "run rows", Inferred, takes=Infer, is_raw=True, takes_media=(_BINARY,))
METADATA = _of_model("GET", "", "the model's inputs and outputs")
INDEX = Route("POST", "/v2/repository/index", "OIP: the models", None, list[Any], OIP_ERROR, is_raw=True)
LOAD, UNLOAD = (
    Route("POST", f"/v2/repository/models/{{model}}{{/form}}/{verb}", f"OIP: {told}", error_form=OIP_ERROR, is_raw=True)
    for verb, told in (("load", "serve the model"), ("unload", "serve the model no more"))
)
# Paths that only Triton has, and the reasons why this door lacks them.
_MISSING = {
    "/v2/systemsharedmemory/status": NO_SHARED_MEMORY,
    "/v2/cudasharedmemory/status": NO_SHARED_MEMORY,
    "/v2/trace/setting": SETTINGS_OF_TRACES,
    "/v2/logging": SETTINGS_OF_LOGS,
}


class OipHttpDoor:
    """Converts the protocol's bodies to calls of the service and back."""

    def __init__(self, service: TensorService) -> None:
        self._service = service

    def handlers(self) -> HttpHandlers:
        """The routes with their handlers."""
        return [
            (SERVER, self.server),
            (STATISTICS, self.statistics),
            *((route, self.ready) for route in READY),
            *((route, self.config) for route in CONFIG),
            *((route, self.model_statistics) for route in MODEL_STATISTICS),
            *((route, self.infer) for route in INFER),
            *((route, self.metadata) for route in METADATA),
            (INDEX, self.index),
            (LOAD, self.load),
            (UNLOAD, self.unload),
            *((_missing(path), _refuse(reason)) for path, reason in _MISSING.items()),
        ]

    async def server(self, request: HttpRequest) -> HttpResponse:
        """GET /v2."""
        return _json(self._service.server_metadata())

    async def statistics(self, request: HttpRequest) -> HttpResponse:
        """GET /v2/models/stats."""
        return _json(self._service.statistics("", ""))

    async def index(self, request: HttpRequest) -> HttpResponse:
        """POST /v2/repository/index."""
        asked = check_body(_INDEX, read_json(request.body or b"{}"))
        return _json(self._service.index(only_ready=asked.ready))

    async def load(self, request: HttpRequest) -> HttpResponse:
        """POST /v2/repository/models/…/load."""
        asked = check_body(_CONTROL, read_json(request.body or b"{}"))
        await self._service.load(_model(request)[0], asked.parameters, request.call)
        return HttpResponse(b"")

    async def unload(self, request: HttpRequest) -> HttpResponse:
        """POST /v2/repository/models/…/unload."""
        await self._service.unload(_model(request)[0], request.call)
        return HttpResponse(b"")

    async def ready(self, request: HttpRequest) -> HttpResponse:
        """GET /v2/models/…/ready."""
        name, version = _model(request)
        is_ready = self._service.is_model_ready(name, version)
        return HttpResponse(write_body({"name": name, "ready": is_ready}), status=200 if is_ready else 503)

    async def config(self, request: HttpRequest) -> HttpResponse:
        """GET /v2/models/…/config."""
        return _json(self._service.model_config(*_model(request)))

    async def model_statistics(self, request: HttpRequest) -> HttpResponse:
        """GET /v2/models/…/stats."""
        return _json(self._service.statistics(*_model(request)))

    async def metadata(self, request: HttpRequest) -> HttpResponse:
        """GET /v2/models/…."""
        return _json(self._service.model_metadata(*_model(request)))

    async def infer(self, request: HttpRequest) -> HttpResponse:
        """POST /v2/models/…/infer."""
        body, inputs = await request.make(partial(_read, request))
        outputs = [output.name for output in body.outputs or ()]
        asked = TensorRequest(*_model(request), body.id, body.parameters, inputs, outputs)
        response = await self._service.infer(asked, request.call, _SPANS)
        if sum(math.prod(tensor.shape) for tensor in response.outputs) > _LARGE:
            return await asyncio.to_thread(_answer, body, response)
        return _answer(body, response)


def _missing(path: str) -> Route:
    return Route("GET", path, "OIP: not served", error_form=OIP_ERROR, is_raw=True)


def _refuse(reason: str) -> HttpHandler:
    async def refuse(request: HttpRequest) -> HttpResponse:
        raise Refused(501, "not_implemented", f"not served: {reason}")

    return refuse


def _model(request: HttpRequest) -> tuple[str, str]:
    """The name and the version in a path."""
    names = request.names
    return f"{names['model']}/{names['form']}" if names.get("form") else names["model"], names.get("version") or ""


def _json(value: Any) -> HttpResponse:
    return HttpResponse(write_body(value))


def _read(request: HttpRequest) -> tuple[Infer, list[GivenTensor]]:
    """The body's JSON, checked, and the tensors. Raises InvalidInput."""
    data: bytes = request.body
    length = request.headers.get(HEADER_LENGTH)
    if length is None and request.media_type == _BINARY:
        raise InvalidInput(HEADER_LENGTH.decode(), "is missing: how many bytes of the body are JSON")
    if length is not None and not (length.isdigit() and len(length) < 20 and int(length) <= len(data)):
        raise InvalidInput(HEADER_LENGTH.decode(), f"must be a number of bytes, at most {len(data)} as in the body")
    end = len(data) if length is None else int(length)
    if length is not None and end > _MAX_HEAD_BYTES:
        raise InvalidInput(HEADER_LENGTH.decode(), f"{end} bytes of JSON, the limit is {_MAX_HEAD_BYTES}")
    body: Infer = check_body(_INFER, read_json(data[:end]))
    inputs = []
    for place, one in enumerate(body.inputs):
        field = f"inputs[{place}]"
        size = one.parameters.get(_DATA_SIZE)
        if any(name in one.parameters for name in _UNSUPPORTED):
            raise InvalidInput(f"{field}.parameters", "shared memory is not supported")
        if size is None:
            if one.data is None:
                raise InvalidInput(field, f"has neither data nor parameters.{_DATA_SIZE}")
            inputs.append(GivenTensor(one.name, one.datatype, tuple(one.shape), values=_values(field, one)))
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= len(data) - end:
            left = len(data) - end
            raise InvalidInput(f"{field}.parameters.{_DATA_SIZE}", f"must be a number of bytes, {left} are left")
        if one.data is not None:
            raise InvalidInput(field, f"has both data and parameters.{_DATA_SIZE}")
        inputs.append(GivenTensor(one.name, one.datatype, tuple(one.shape), data[end : end + size]))
        end += size
    if end != len(data):
        raise InvalidInput("body", f"{len(data) - end} bytes more than its inputs take")
    if any(name in one.parameters for one in body.outputs or () for name in _UNSUPPORTED):
        raise InvalidInput("outputs", f"{' and '.join(_UNSUPPORTED)} are not supported")
    return body, inputs


def _values(field: str, one: Input) -> list[Any]:
    """The elements in JSON. Bytes that are no text come in Base64."""
    values = one.data or []
    if one.datatype != BYTES or one.parameters.get("content_type") != "base64":
        return values
    try:
        return [read_base64(value) for value in values]
    except (TypeError, ValueError):
        raise InvalidInput(f"{field}.data", "is no list of texts in Base64") from None


def _answer(body: Infer, response: TensorResponse) -> HttpResponse:
    wishes = {one.name: one.parameters.get(_IS_BINARY) for one in body.outputs or ()}
    outputs, tensors = [], []
    for tensor in response.outputs:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        wish = wishes.get(tensor.name)
        if wish if wish is not None else body.parameters.get(_ARE_BINARY):
            tensors.append(tensor.raw())
            output["parameters"] = {_DATA_SIZE: len(tensors[-1])}
        else:
            output["data"] = np.ravel(tensor.values) if tensor.datatype != BYTES else tensor.values
        outputs.append(output)
    answer = {"model_name": response.model, "model_version": response.version, "outputs": outputs}
    head = write_body(answer | {"id": response.request_id} if response.request_id else answer)
    if not tensors:
        return HttpResponse(head, JSON)
    return HttpResponse(b"".join((head, *tensors)), _BINARY, [(HEADER_LENGTH, b"%d" % len(head))])
