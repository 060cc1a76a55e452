"""SageMaker's invocations, in JSON, as CSV or JSON Lines for batch transforms, or as protobuf.

Bodies in JSON have the form of Hugging Face, OpenAI or Cohere, whole or as events. A protobuf body is our own
InferRequest, which an InferResponse answers.
"""

import csv
import io
import re
from collections.abc import Sequence
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
from neuronpipe.doors.http.bodies import check_body, read_json, write_body
from neuronpipe.doors.http.body_types import without_nulls
from neuronpipe.doors.http.exchange import JSON, Answers, HttpRequest, HttpResponse, read_header
from neuronpipe.doors.http.huggingface import IMAGES, MODEL_PARAMETER, answer_body, answer_request, post
from neuronpipe.doors.http.json_limits import LINE_BYTES, check_values
from neuronpipe.doors.http.native import response_message, to_inference_request
from neuronpipe.doors.http.openai import EMBEDDINGS, embeddings
from neuronpipe.doors.http.openai_text import CHAT, COMPLETIONS, chat, completions
from neuronpipe.doors.http.problems import TEI_ERROR
from neuronpipe.doors.http.rerank import V2, cohere
from neuronpipe.doors.inference import Inference

_CSV = "text/csv"
_LINES = ("application/jsonlines", "application/x-ndjson")
# The header of endpoints of many models.
_TARGET_HEADER = b"x-amzn-sagemaker-target-model"
_PROTOBUF = "application/x-protobuf"
# Maximum number of columns of CSV: more fields than any input has.
_MAX_COLUMNS = 64
# Maximum number of characters of a field of CSV: the limits of bodies and inputs are lower.
_MAX_FIELD = 1 << 30
# Maximum number of characters of a column's name in an error.
_SHOWN = 200
# A field that only one protocol's body has → the type of the body, and the function that answers it.
_OTHERS = {
    field: (TypeAdapter[Any](route.takes), answer)
    for field, route, answer in (
        ("messages", CHAT, chat),
        ("prompt", COMPLETIONS, completions),
        ("input", EMBEDDINGS, embeddings),
        ("documents", V2, cohere),
    )
}
_MARK = re.compile(rb'"(?:%s)"\s*:' % "|".join(_OTHERS).encode())
_post = partial(post, takes_media=(*IMAGES, _CSV, *_LINES, _PROTOBUF), error_form=TEI_ERROR)
INVOCATIONS = _post("/invocations", "SageMaker: a model's task", query=MODEL_PARAMETER)
# Clients of SageMaker call an endpoint by this path; SageMaker itself calls the container's /invocations.
ENDPOINT = _post("/endpoints/{name}/invocations", "SageMaker's runtime: the task of the model called so")


async def _invocations(inference: Inference, request: HttpRequest) -> HttpResponse:
    if request.media_type == _PROTOBUF:
        message = await request.make(partial(_read_message, request.body))
        result = await inference.pipeline.infer(to_inference_request(request.call, message), Spans.HTTP_REQUEST)
        return HttpResponse(response_message(result, result.result.message).SerializeToString(), _PROTOBUF)
    name = read_header(request.headers, _TARGET_HEADER) or request.names.get("name", "")
    if request.media_type in ("", JSON):
        read = partial(_read_other, request.body, name, inference.settings.max_input_bytes)
        if other := await request.make(read):
            answer_other, body = other
            response: HttpResponse = await answer_other(inference, replace(request, body=body))
            return response
    spec = inference.spec(inference.choose(request.model(name)))
    if request.media_type != _CSV and request.media_type not in _LINES:
        return await answer_request(inference, request, spec)
    read_rows = _read_csv if request.media_type == _CSV else _read_lines
    value = await request.make(partial(read_rows, request.body, inference.settings.max_http_inputs))
    if value.get("stream"):
        raise InvalidInput("stream", "is for one text, whose body is JSON")
    answers = await answer_body(inference, request, spec, value)
    accepted = read_header(request.headers, b"accept")
    if request.media_type in _LINES or any(media in accepted for media in _LINES):
        return HttpResponse(b"".join(write_body(answer) + b"\n" for answer in answers), _LINES[0])
    return HttpResponse(write_body(answers))


ANSWERS: Answers[Inference] = [(INVOCATIONS, _invocations), (ENDPOINT, _invocations)]


def _read_other(data: bytes, model: str, max_input_bytes: int) -> tuple[Any, Any] | None:
    """Returns the handler of another protocol and the parsed body; None if the body is in Hugging Face's form.

    Raises InvalidInput.
    """
    value = read_json(data, max_input_bytes) if _MARK.search(data) else None
    if not isinstance(value, dict) or "inputs" in value:
        return None
    for field, (takes, answer) in _OTHERS.items():
        if field in value:
            return answer, check_body(takes, value | ({"model": model} if model else {}))
    return None


def _read_message(data: bytes) -> InferRequest:
    try:
        return parse(InferRequest, data)
    except DecodeError:
        raise InvalidInput("body", "is no InferRequest of neuronpipe.api.v1") from None


def _read_csv(data: bytes, max_inputs: int) -> Any:
    """Returns the rows below a heading: a column `inputs`, or a column for each field of an input (question, context).

    Raises InvalidInput.
    """
    check_values(data, LINE_BYTES)
    csv.field_size_limit(_MAX_FIELD)  # a limit of the module, 128 KiB by default
    try:
        reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""), strict=True)
        _check_heading(reader.fieldnames or ())
        rows = list(islice(reader, max_inputs + 1))  # a row above the limit, for the error
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


def _check_heading(columns: Sequence[str]) -> None:
    """Raises InvalidInput for a heading with too many columns, or with a column twice, because one would be lost."""
    if len(columns) > _MAX_COLUMNS:
        raise InvalidInput("body", f"its heading has {len(columns)} columns, at most {_MAX_COLUMNS}")
    for place, column in enumerate(columns):
        if column in columns[:place]:
            raise InvalidInput("body", f"its heading has the column `{column[:_SHOWN]}` twice")


def _read_lines(data: bytes, max_inputs: int) -> Any:
    """Returns the inputs of all lines, each {"inputs": …}, and the parameters, which all lines must share.

    Raises InvalidInput.
    """
    check_values(data, LINE_BYTES)
    inputs: list[Any] = []
    shared: Any = None
    for number, line in enumerate(io.BytesIO(data), 1):
        if not line.strip():
            continue
        if len(inputs) > max_inputs:  # for the error
            break
        try:
            value = without_nulls(read_json(line))
        except InvalidInput as error:
            # Without the place in the line, which is in line 1 for the parser.
            raise InvalidInput(f"line {number}", error.problem.partition(": line ")[0]) from None
        if not isinstance(value, dict) or "inputs" not in value:
            raise InvalidInput(f"line {number}", "must be an object with `inputs`")
        inputs.append(value.pop("inputs"))
        if shared is None:
            shared = value
        elif value != shared:
            raise InvalidInput(f"line {number}", "has other parameters than the first line")
    return {**(shared or {}), "inputs": inputs}
