"""SageMaker's invocations: bodies of Hugging Face, OpenAI or Cohere in JSON, whole or as events, texts as CSV or JSON
Lines for batch transforms, or our own InferRequest as protobuf, which is answered by an InferResponse.
"""

import csv
import io
import re
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from google.protobuf.message import DecodeError
from pydantic import TypeAdapter

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.names import Spans
from neuronpipe.core.parsing import parse
from neuronpipe.doors.http.bodies import LINE_BYTES, check_body, check_values, read_json, without_nulls, write_body
from neuronpipe.doors.http.exchange import JSON, HttpHandlers, HttpRequest, HttpResponse
from neuronpipe.doors.http.huggingface import IMAGES, MODEL_PARAMETER, answer_body, answer_request, post
from neuronpipe.doors.http.native import response_message, to_inference_request
from neuronpipe.doors.http.openai import EMBEDDINGS
from neuronpipe.doors.http.openai_text import CHAT, COMPLETIONS
from neuronpipe.doors.http.problems import TEI_ERROR
from neuronpipe.doors.http.rerank import V2
from neuronpipe.doors.inference import Inference, ModelChoice
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.pipeline import Pipeline

_CSV = "text/csv"
_LINES = ("application/jsonlines", "application/x-ndjson")
# The header of endpoints of many models.
_TARGET_HEADER = b"x-amzn-sagemaker-target-model"
_PROTOBUF = "application/x-protobuf"
# Most columns of CSV: more fields than any input has.
_MAX_COLUMNS = 64
# A field that only one protocol's body has, and the route that it is for.
_OTHERS = {"messages": CHAT, "prompt": COMPLETIONS, "input": EMBEDDINGS, "documents": V2}
_MARK = re.compile(rb'"(?:%s)"\s*:' % "|".join(_OTHERS).encode())
_MEDIA = (*IMAGES, _CSV, *_LINES, _PROTOBUF)
INVOCATIONS = post("/invocations", "SageMaker: a model's task", _MEDIA, TEI_ERROR, query=MODEL_PARAMETER)
# As clients of SageMaker call an endpoint; SageMaker itself calls the container's /invocations.
ENDPOINT = post(
    "/endpoints/{name}/invocations", "SageMaker's runtime: the task of the model called so", _MEDIA, TEI_ERROR
)


def sagemaker_handlers(
    inference: Inference,
    models: ModelChoice,
    catalog: Catalog,
    pipeline: Pipeline,
    others: HttpHandlers,
) -> HttpHandlers:
    """The routes with their handlers. `others`: OpenAI's and Cohere's routes with theirs."""
    handlers = {route.key: handler for route, handler in others}
    kinds = {route.key: TypeAdapter[Any](route.takes) for route in _OTHERS.values()}

    def other_body(data: bytes, model: str) -> tuple[str, Any] | None:
        """The route that a body is for, and its value; None for one of Hugging Face. Raises InvalidInput."""
        value = read_json(data, inference.max_input_bytes)
        if not isinstance(value, dict) or "inputs" in value:
            return None
        key = next((route.key for field, route in _OTHERS.items() if field in value), None)
        return (key, check_body(kinds[key], value | ({"model": model} if model else {}))) if key else None

    async def invocations(request: HttpRequest) -> HttpResponse:
        if request.media_type == _PROTOBUF:
            message = await request.make(partial(_read_message, request.body))
            result = await pipeline.infer(to_inference_request(request.call, message), Spans.HTTP_REQUEST)
            return HttpResponse(response_message(result, result.result.message).SerializeToString(), _PROTOBUF)
        name = request.headers.get(_TARGET_HEADER, b"").decode("latin-1") or request.names.get("name", "")
        may_be_other = request.media_type in ("", JSON) and _MARK.search(request.body)
        if may_be_other and (other := await request.make(partial(other_body, request.body, name))):
            key, body = other
            return await handlers[key](replace(request, body=body))
        spec = catalog.spec(*models.choose(request.model(name)))
        if request.media_type != _CSV and request.media_type not in _LINES:
            return await answer_request(inference, request, spec)
        read = _read_csv if request.media_type == _CSV else _read_lines
        value = await request.make(partial(read, request.body, inference.max_inputs))
        if value.get("stream"):
            raise InvalidInput("stream", "is for one text, whose body is JSON")
        answer = await answer_body(inference, request, spec, value)
        accepted = request.headers.get(b"accept", b"").decode("latin-1")
        if request.media_type in _LINES or any(media in accepted for media in _LINES):
            return HttpResponse(b"".join(write_body(one) + b"\n" for one in answer), _LINES[0])
        return HttpResponse(write_body(answer))

    return [(INVOCATIONS, invocations), (ENDPOINT, invocations)]


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
