"""The Open Inference Protocol over HTTP, in JSON and with the extension for binary tensors."""

import asyncio
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, NotRequired

import numpy as np
from pydantic import BeforeValidator, Field, TypeAdapter

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.names import Spans
from neuronpipe.doors.http.bodies import check_body, read_base64, read_json, write_body
from neuronpipe.doors.http.body_types import Body, Many, without_nulls
from neuronpipe.doors.http.exchange import JSON, Answers, HttpRequest, HttpResponse, Route, named
from neuronpipe.doors.http.problems import OIP_ERROR, RequestRefused
from neuronpipe.doors.oip import service as oip
from neuronpipe.doors.oip.options import (
    BASE64,
    CONTENT_TYPE,
    CONTENT_TYPES,
    DATA_SIZE,
    IS_BINARY,
    check_tensor_parameters,
)
from neuronpipe.doors.oip.service import RowSpans, TensorRequest, TensorResponse, TensorService
from neuronpipe.doors.oip.tensors import BYTES, MAX_TENSORS, GivenTensor, shown

HEADER_LENGTH = b"inference-header-content-length"
_BINARY = "application/octet-stream"
# Maximum number of elements of all outputs that are written on the event loop.
_LARGE = 1 << 16
# Maximum size of the JSON that precedes binary tensors.
_MAX_HEAD_BYTES = 8 << 20
_SPANS = RowSpans(Spans.HTTP_REQUEST, Spans.HTTP_BATCH, Spans.HTTP_REQUEST)
_ARE_BINARY = "binary_data_output"
_SHARED_MEMORY = "shared_memory_region"
_UNSUPPORTED = (_SHARED_MEMORY, "classification")

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


class Index(Body):
    ready: bool = False


class Control(Body):
    parameters: _Parameters = _NO_PARAMETERS


_INFER, _INDEX, _CONTROL = TypeAdapter(Infer), TypeAdapter(Index), TypeAdapter(Control)
_OUTPUT: Any = named(
    "GivenOutput",
    name=str,
    shape=list[int],
    datatype=str,
    parameters=NotRequired[_Parameters],
    data=NotRequired[list[Any] | None],
)
_INFERRED = named("Inferred", model_name=str, model_version=str, id=NotRequired[str], outputs=list[_OUTPUT])
# Paths that only Triton has, and the reasons why this door does not serve them.
_MISSING = {
    "/v2/systemsharedmemory/status": oip.NO_SHARED_MEMORY,
    "/v2/cudasharedmemory/status": oip.NO_SHARED_MEMORY,
    "/v2/trace/setting": oip.SETTINGS_OF_TRACES,
    "/v2/logging": oip.SETTINGS_OF_LOGS,
}


def _json(value: Any, status: int = 200) -> HttpResponse:
    return HttpResponse(write_body(value), status=status)


async def _tell(service: TensorService, request: HttpRequest, fact: Callable[..., Any]) -> HttpResponse:
    """Answers with a fact about a model. `fact`: a method of the service, for the name and the version of the model."""
    return _json(fact(service, *_model(request)))


async def _ready(service: TensorService, request: HttpRequest) -> HttpResponse:
    name, version = _model(request)
    is_ready = service.is_model_ready(name, version)
    return _json({"name": name, "ready": is_ready}, 200 if is_ready else 503)


async def _index(service: TensorService, request: HttpRequest) -> HttpResponse:
    body: Index = check_body(_INDEX, read_json(request.body or b"{}"))
    return _json(service.index(only_ready=body.ready))


async def _load(service: TensorService, request: HttpRequest) -> HttpResponse:
    body: Control = check_body(_CONTROL, read_json(request.body or b"{}"))
    await service.load(_model(request)[0], body.parameters, request.call)
    return HttpResponse(b"")


async def _unload(service: TensorService, request: HttpRequest) -> HttpResponse:
    await service.unload(_model(request)[0], request.call)
    return HttpResponse(b"")


async def _refuse(service: TensorService, request: HttpRequest, reason: str) -> HttpResponse:
    raise RequestRefused(501, "not_implemented", f"not served: {reason}")


async def _infer(service: TensorService, request: HttpRequest) -> HttpResponse:
    body, inputs = await request.make(partial(_read, request))
    outputs = [output.name for output in body.outputs or ()]
    tensors = TensorRequest(*_model(request), body.id, body.parameters, inputs, outputs)
    response = await service.infer(tensors, request.call, _SPANS)
    if sum(math.prod(tensor.shape) for tensor in response.outputs) > _LARGE:
        return await asyncio.to_thread(_answer, body, response)
    return _answer(body, response)


_get = partial(Route, "GET", gives=dict[str, Any], error_form=OIP_ERROR)
_post = partial(Route, "POST", error_form=OIP_ERROR, is_raw=True)
_run = partial(_post, takes=Infer, gives=_INFERRED, takes_media=(_BINARY,))
# The name of a model may have two segments, as NAME/raw.
_MODEL, _CONTROLLED = "/v2/models/{model}{/form}", "/v2/repository/models/{model}{/form}"
ANSWERS: Answers[TensorService] = [
    (_get("/v2", "OIP: the server"), partial(_tell, fact=lambda service, *_: service.server_metadata())),
    (_get("/v2/models/stats", "OIP: statistics of all models"), partial(_tell, fact=TensorService.statistics)),
    # The path with a version goes first, because a model's name may have a slash.
    *(
        (make(path + end, summary), answer)
        for make, end, summary, answer in (
            (_get, "/ready", "OIP: 200 while the model can be run", _ready),
            (_get, "/config", "OIP: the model in Triton's words", partial(_tell, fact=TensorService.model_config)),
            (_get, "/stats", "OIP: statistics of the model", partial(_tell, fact=TensorService.statistics)),
            (_run, "/infer", "OIP: run rows", _infer),
            (_get, "", "OIP: the model's inputs and outputs", partial(_tell, fact=TensorService.model_metadata)),
        )
        for path in (f"{_MODEL}/versions/{{version}}", _MODEL)
    ),
    (_post("/v2/repository/index", "OIP: the models", gives=list[Any]), _index),
    (_post(f"{_CONTROLLED}/load", "OIP: serve the model"), _load),
    (_post(f"{_CONTROLLED}/unload", "OIP: serve the model no more"), _unload),
    *(
        (Route("GET", path, "OIP: not served", error_form=OIP_ERROR, is_raw=True), partial(_refuse, reason=reason))
        for path, reason in _MISSING.items()
    ),
]


def _model(request: HttpRequest) -> tuple[str, str]:
    """Returns the name and the version of a model in a path; empty if the path has none."""
    name, form, version = (request.names.get(part) or "" for part in ("model", "form", "version"))
    return f"{name}/{form}" if form else name, version


def _read(request: HttpRequest) -> tuple[Infer, list[GivenTensor]]:
    """Returns the body's JSON, checked, and the tensors. Raises InvalidInput."""
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
    for index, tensor in enumerate(body.inputs):
        field = f"inputs[{index}]"
        if _SHARED_MEMORY in tensor.parameters:
            raise InvalidInput(f"{field}.parameters", "shared memory is not supported")
        check_tensor_parameters(field, tensor.parameters.items(), DATA_SIZE, (*CONTENT_TYPES, BASE64))
        described = tensor.name, tensor.datatype, tuple(tensor.shape)
        size, remaining_bytes = tensor.parameters.get(DATA_SIZE), len(data) - end
        if size is None:
            if tensor.data is None:
                raise InvalidInput(field, f"has neither data nor parameters.{DATA_SIZE}")
            inputs.append(GivenTensor(*described, values=_values(field, tensor)))
            continue
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= remaining_bytes:
            raise InvalidInput(
                f"{field}.parameters.{DATA_SIZE}", f"must be a number of bytes, {remaining_bytes} are left"
            )
        if tensor.data is not None:
            raise InvalidInput(field, f"has both data and parameters.{DATA_SIZE}")
        inputs.append(GivenTensor(*described, data[end : end + size]))
        end += size
    if end != len(data):
        raise InvalidInput("body", f"{len(data) - end} bytes more than its inputs take")
    if any(name in output.parameters for output in body.outputs or () for name in _UNSUPPORTED):
        raise InvalidInput("outputs", f"{' and '.join(_UNSUPPORTED)} are not supported")
    _check_is_boolean("", _ARE_BINARY, body.parameters)
    for index, output in enumerate(body.outputs or ()):
        check_tensor_parameters(f"outputs[{index}]", output.parameters.items(), IS_BINARY)
        _check_is_boolean(f"outputs[{index}].", IS_BINARY, output.parameters)
    return body, inputs


def _check_is_boolean(place: str, name: str, parameters: _Parameters) -> None:
    """Raises InvalidInput for another value: a text "false" would count as true."""
    if not isinstance(value := parameters.get(name, False), bool):
        raise InvalidInput(f"{place}parameters.{name}", f"{shown(value)}, must be true or false")


def _values(field: str, tensor: Input) -> list[Any]:
    """Returns the elements in JSON. Bytes that are no text come in Base64."""
    values = tensor.data or []
    if tensor.datatype != BYTES or tensor.parameters.get(CONTENT_TYPE) != BASE64:
        return values
    try:
        return [read_base64(value) for value in values]
    except (TypeError, ValueError):
        raise InvalidInput(f"{field}.data", "is no list of texts in Base64") from None


def _answer(body: Infer, response: TensorResponse) -> HttpResponse:
    wishes = {output.name: output.parameters.get(IS_BINARY) for output in body.outputs or ()}
    outputs, tensors = [], []
    for tensor in response.outputs:
        output: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        wish = wishes.get(tensor.name)
        if wish if wish is not None else body.parameters.get(_ARE_BINARY):
            tensors.append(tensor.raw())
            output["parameters"] = {DATA_SIZE: len(tensors[-1])}
        else:
            output["data"] = np.ravel(tensor.values) if tensor.datatype != BYTES else tensor.values
        outputs.append(output)
    answer = {"model_name": response.model, "model_version": response.version, "outputs": outputs}
    head = write_body(answer | {"id": response.request_id} if response.request_id else answer)
    if not tensors:
        return HttpResponse(head, JSON)
    return HttpResponse(b"".join((head, *tensors)), _BINARY, [(HEADER_LENGTH, b"%d" % len(head))])
