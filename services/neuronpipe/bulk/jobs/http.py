"""Jobs over HTTP: our own messages in JSON, and SageMaker's InvokeEndpointAsync."""

import asyncio
import secrets
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from neuronpipe.api.v1.jobs_pb2 import SubmitInferenceRequest
from neuronpipe.bulk.jobs.job import Invocation
from neuronpipe.bulk.jobs.service import Jobs
from neuronpipe.core.errors import AlreadyExists, InvalidInput
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.exchange import HttpHandlers, HttpRequest, HttpResponse, Route, read_header
from neuronpipe.doors.http.messages import message_body

_OPERATION = dict[str, Any]
_MAX_WAIT_S = 60.0
SUBMIT = Route(
    "POST",
    "/v1/jobs",
    "neuronpipe: submits a job, and answers 202 with its operation",
    message_body(SubmitInferenceRequest.DESCRIPTOR),
    _OPERATION,
)
LIST = Route(
    "GET",
    "/v1/jobs",
    "neuronpipe: the caller's jobs, the newest first",
    gives=dict[str, Any],
    query={"page_size": "how many, at most 1000; default: 100", "page_token": "next_page_token of the answer before"},
)
GET = Route(
    "GET",
    "/v1/jobs/{id}",
    "neuronpipe: a job as an operation, with its result once it has ended",
    gives=_OPERATION,
    query={"wait_s": f"seconds to wait for its end, at most {_MAX_WAIT_S:g}; default: 0"},
)
CANCEL = Route(
    "POST", "/v1/jobs/{id}/cancel", "neuronpipe: cancels a job that has not ended", gives=_OPERATION, is_raw=True
)
INVOKE = Route(
    "POST",
    "/endpoints/{name}/async-invocations",
    "SageMaker's runtime: InvokeEndpointAsync, of an object that is a body of /endpoints/{name}/invocations",
    gives=dict[str, Any],
    is_raw=True,
    takes_media=("application/octet-stream", "application/x-amz-json-1.1"),
)
_AMAZON = "X-Amzn-SageMaker-"
# Fields of SubmitInferenceRequest → the headers of SageMaker's clients, for errors.
_HEADERS = {
    "request_id": f"{_AMAZON}InferenceId",
    "time_to_live_s": f"{_AMAZON}RequestTTLSeconds",
    "work_limit_s": f"{_AMAZON}InvocationTimeoutSeconds",
}


def job_http_handlers(jobs: Jobs) -> HttpHandlers:

    async def submit(request: HttpRequest) -> HttpResponse:
        submitted = await request.make(lambda: SubmitInferenceRequest(**request.body.arguments()))
        operation = await jobs.submit(submitted, request.call)
        location = (b"location", f"/v1/{operation.name}".encode())
        return HttpResponse(await _written(operation), status=202, headers=[location])

    async def list_all(request: HttpRequest) -> HttpResponse:
        size = _whole_number("page_size", request.parameter("page_size"))
        listed = await jobs.list_jobs(size, request.parameter("page_token"), request.call)
        return HttpResponse(await _written(listed))

    async def get(request: HttpRequest) -> HttpResponse:
        name, wait_s = f"jobs/{request.names['id']}", _number("wait_s", request.parameter("wait_s"))
        if wait_s:
            return HttpResponse(await _written(await jobs.wait(name, min(wait_s, _MAX_WAIT_S), request.call)))
        return HttpResponse(await _written(await jobs.get(name, request.call)))

    async def cancel(request: HttpRequest) -> HttpResponse:
        name = f"jobs/{request.names['id']}"
        await jobs.cancel(name, request.call)
        return HttpResponse(await _written(await jobs.get(name, request.call)))

    async def invoke(request: HttpRequest) -> HttpResponse:
        def header(name: str) -> str:
            return read_header(request.headers, name.lower().encode())

        def seconds(field: str) -> int:
            return _whole_number(_HEADERS[field], header(_HEADERS[field]), 1)

        id = header(_HEADERS["request_id"]) or secrets.token_hex(16)
        ttl_s, limit_s = seconds("time_to_live_s"), seconds("work_limit_s")
        timing = SubmitInferenceRequest(request_id=id, time_to_live_s=ttl_s, work_limit_s=limit_s)
        invocation = Invocation(
            endpoint=request.names["name"],
            input_uri=header(f"{_AMAZON}InputLocation"),
            content_type=header(f"{_AMAZON}Content-Type") or "application/json",
            accept=header(f"{_AMAZON}Accept") or "application/json",
        )
        try:
            invocation = await jobs.invoke(invocation, timing, request.call)
        except InvalidInput as error:
            raise InvalidInput(_HEADERS.get(error.field, error.field), error.problem, error.mentions) from error
        except AlreadyExists as error:
            raise AlreadyExists(error.message.replace("request_id", _HEADERS["request_id"])) from error
        places = {"OutputLocation": invocation.output_uri, "FailureLocation": invocation.failure_uri}
        headers = [(f"{_AMAZON}{name}".lower().encode(), uri.encode()) for name, uri in places.items()]
        return HttpResponse(write_body({"InferenceId": id}), status=202, headers=headers)

    return [(SUBMIT, submit), (LIST, list_all), (GET, get), (CANCEL, cancel), (INVOKE, invoke)]


async def _written(answer: Message) -> bytes:
    """Writes a message as JSON, in a thread: json_format takes seconds for the results of a job."""
    return await asyncio.to_thread(lambda: write_body(MessageToDict(answer, preserving_proto_field_name=True)))


def _number(name: str, text: str) -> float:
    """Parses a number from 0 on; 0 for an empty text. Raises InvalidInput."""
    if not text:
        return 0.0
    if not (text.isascii() and text.replace(".", "", 1).isdigit()) or len(text) > 9:
        raise InvalidInput(name, "must be a number from 0")
    return float(text)


def _whole_number(name: str, text: str, least: int = 0) -> int:
    """Parses a whole number; 0 for an empty text. Raises InvalidInput."""
    if not text:
        return 0
    if not (text.isascii() and text.isdigit()) or len(text) > 9 or int(text) < least:
        raise InvalidInput(name, f"must be a whole number from {least}")
    return int(text)
