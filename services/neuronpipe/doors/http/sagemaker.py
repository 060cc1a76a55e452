"""SageMaker's invocations: Hugging Face's bodies in JSON, texts as CSV or JSON Lines for batch transforms, or our own
InferRequest as protobuf, which is answered by an InferResponse.
"""

import csv
import io
from functools import partial
from itertools import islice
from typing import Any

from google.protobuf.message import DecodeError

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.names import Spans
from neuronpipe.core.parsing import parse
from neuronpipe.doors.http.bodies import LINE_BYTES, check_values, read_json, without_nulls, write_body
from neuronpipe.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse
from neuronpipe.doors.http.huggingface import IMAGES, MODEL_PARAMETER, answer_body, post, read_request
from neuronpipe.doors.http.native import response_message, to_inference_request
from neuronpipe.doors.http.problems import TEI_ERROR
from neuronpipe.doors.inference import Inference, ModelChoice
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.pipeline import Pipeline

_CSV = "text/csv"
_LINES = ("application/jsonlines", "application/x-ndjson")
# Of endpoints of many models.
_TARGET_HEADER = b"x-amzn-sagemaker-target-model"
_PROTOBUF = "application/x-protobuf"
# Of CSV: more fields than any input has.
_MAX_COLUMNS = 64
_MEDIA = (*IMAGES, _CSV, *_LINES, _PROTOBUF)
INVOCATIONS = post("/invocations", "SageMaker: a model's task", _MEDIA, TEI_ERROR, query=MODEL_PARAMETER)
# As clients of SageMaker call an endpoint; SageMaker itself calls the container's /invocations.
ENDPOINT = post(
    "/endpoints/{name}/invocations", "SageMaker's runtime: the task of the model called so", _MEDIA, TEI_ERROR
)
ROUTES = (INVOCATIONS, ENDPOINT)


def sagemaker_handlers(
    inference: Inference, models: ModelChoice, catalog: Catalog, pipeline: Pipeline
) -> dict[str, HttpHandler]:
    """The handler, by route."""

    async def invocations(request: HttpRequest) -> HttpResponse:
        if request.media_type == _PROTOBUF:
            message = await request.make(partial(_read_message, request.body))
            result = await pipeline.infer(to_inference_request(request.call, message), Spans.HTTP_REQUEST)
            return HttpResponse(response_message(result, result.result.message).SerializeToString(), _PROTOBUF)
        target = request.headers.get(_TARGET_HEADER, b"").decode("latin-1")
        spec = catalog.spec(*models.choose(request.model(target or request.names.get("name", ""))))
        if request.media_type != _CSV and request.media_type not in _LINES:
            value = await request.make(partial(read_request, request, spec, inference.max_input_bytes))
            return HttpResponse(write_body(await answer_body(inference, request, spec, value)))
        read = _read_csv if request.media_type == _CSV else _read_lines
        value = await request.make(partial(read, request.body, inference.max_inputs))
        answer = await answer_body(inference, request, spec, value)
        accepted = request.headers.get(b"accept", b"").decode("latin-1")
        if request.media_type in _LINES or any(media in accepted for media in _LINES):
            return HttpResponse(b"".join(write_body(one) + b"\n" for one in answer), _LINES[0])
        return HttpResponse(write_body(answer))

    return {INVOCATIONS.key: invocations, ENDPOINT.key: invocations}


def _read_message(data: bytes) -> InferRequest:
    """Raises InvalidInput."""
    try:
        return parse(InferRequest, data)
    except DecodeError:
        raise InvalidInput("body", "is no InferRequest of neuronpipe.api.v1") from None


def _read_csv(data: bytes, max_inputs: int) -> Any:
    """The rows under a heading: a column `inputs`, or one for each field of an input (question, context).

    Raises InvalidInput.
    """
    check_values(data, LINE_BYTES)
    try:
        reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        if len(reader.fieldnames or ()) > _MAX_COLUMNS:
            raise InvalidInput(
                "body", f"its heading has {len(reader.fieldnames or ())} columns, at most {_MAX_COLUMNS}"
            )
        rows = list(islice(reader, max_inputs + 1))  # one more is one too many
    except UnicodeDecodeError:
        raise InvalidInput("body", "is no UTF-8") from None
    except csv.Error:
        raise InvalidInput("body", "is no valid CSV") from None
    for index, row in enumerate(rows):
        if None in row or None in row.values():
            raise InvalidInput(f"inputs[{index}]", "has another number of columns than the heading")
    if rows and "inputs" in rows[0]:
        return {"inputs": [row["inputs"] for row in rows]}
    return {"inputs": rows}


def _read_lines(data: bytes, max_inputs: int) -> Any:
    """The inputs of all lines, each {"inputs": …}, and the parameters of the first, which all must share.

    Raises InvalidInput.
    """
    check_values(data, LINE_BYTES)
    inputs: list[Any] = []
    shared: Any = None
    for number, line in enumerate(io.BytesIO(data), 1):
        if not line.strip():
            continue
        if len(inputs) > max_inputs:  # one too many
            break
        try:
            value = without_nulls(read_json(line))
        except InvalidInput:
            raise InvalidInput(f"line {number}", "is no valid JSON in UTF-8") from None
        if not isinstance(value, dict) or "inputs" not in value:
            raise InvalidInput(f"line {number}", "must be an object with `inputs`")
        inputs.append(value.pop("inputs"))
        if shared is None:
            shared = value
        elif value != shared:
            raise InvalidInput(f"line {number}", "has other parameters than the first line")
    return {**(shared or {}), "inputs": inputs}
