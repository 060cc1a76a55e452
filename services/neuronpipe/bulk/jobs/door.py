"""Jobs as a part of a gateway: JobService and Operations over gRPC, routes over HTTP, and what answers."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.empty_pb2 import Empty
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from neuronpipe.api.v1 import jobs_pb2
from neuronpipe.api.v1.jobs_pb2 import SubmitInferenceRequest
from neuronpipe.bulk.jobs.job import Invocation
from neuronpipe.bulk.jobs.service import Jobs
from neuronpipe.bulk.jobs.settings import JobSettings
from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.assembly import Addition
from neuronpipe.doors.http.bodies import write_body
from neuronpipe.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse, Route
from neuronpipe.doors.http.messages import message_body
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.settings import HttpSettings, PipelineSettings
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.platform.process.door import Handler
from neuronpipe.platform.process.life import Life
from neuronpipe.rpc.rpcs import Context, Rpc, by_path, call_of, rpcs_of

JOB_SERVICE = jobs_pb2.DESCRIPTOR.services_by_name["JobService"]
OPERATIONS = operations_pb2.Operation.DESCRIPTOR.file.services_by_name["Operations"]


def job_rpcs() -> list[Rpc]:
    """The rpcs of both services."""
    return [*rpcs_of(JOB_SERVICE), *rpcs_of(OPERATIONS)]


def job_rpc_handlers(jobs: Jobs) -> dict[str, Handler]:
    """The handlers, by path."""

    async def submit(message: jobs_pb2.SubmitInferenceRequest, context: Context) -> Any:
        return await jobs.submit(message, call_of(context))

    async def get(message: operations_pb2.GetOperationRequest, context: Context) -> Any:
        return await jobs.get(message.name, call_of(context))

    async def list_all(message: operations_pb2.ListOperationsRequest, context: Context) -> Any:
        if message.filter:
            raise InvalidInput("filter", "is not supported; all operations of the caller are listed")
        return await jobs.list_jobs(message.page_size, message.page_token, call_of(context))

    async def wait(message: operations_pb2.WaitOperationRequest, context: Context) -> Any:
        timeout_s = message.timeout.ToNanoseconds() / 1e9 if message.HasField("timeout") else None
        return await jobs.wait(message.name, timeout_s, call_of(context))

    async def cancel(message: operations_pb2.CancelOperationRequest, context: Context) -> Empty:
        await jobs.cancel(message.name, call_of(context))
        return Empty()

    async def delete(message: operations_pb2.DeleteOperationRequest, context: Context) -> Empty:
        await jobs.delete(message.name, call_of(context))
        return Empty()

    return {
        **by_path(JOB_SERVICE, SubmitInference=submit),
        **by_path(
            OPERATIONS,
            GetOperation=get,
            ListOperations=list_all,
            WaitOperation=wait,
            CancelOperation=cancel,
            DeleteOperation=delete,
        ),
    }


def _routes() -> Sequence[Route]:
    from neuronpipe.bulk.jobs.door import ROUTES  # what HTTP needs is imported for an HTTP door only

    return ROUTES


# What the doors take, whether jobs are set up or not.
JOBS = Addition(rpcs=tuple(job_rpcs()), routes=_routes)


@asynccontextmanager
async def running_jobs(
    settings: JobSettings,
    pipeline: PipelineSettings,
    http: HttpSettings,
    gateway: Gateway,
    tenants: Tenants | None,
    life: Life,
) -> AsyncIterator[dict[str, Handler]]:
    """The handlers of jobs. Raises SetupError."""
    store = None
    if settings.jobs_redis_url:
        from neuronpipe.bulk.jobs.store import JobStore  # redis-py takes 0.1 s to import

        store = JobStore(settings)
    jobs = Jobs(store, settings, pipeline, gateway.catalog, tenants, life.in_flight.set_aside)
    async with jobs.running():
        life.on_draining(jobs.drain)
        handlers: dict[str, Handler] = dict(job_rpc_handlers(jobs))
        if http.http_listen:
            from neuronpipe.bulk.jobs.door import job_http_handlers
            from neuronpipe.doors.http.handlers import DESCRIBED
            from neuronpipe.doors.http.openapi import openapi_handlers

            handlers |= job_http_handlers(jobs) | openapi_handlers((*DESCRIBED, *_routes()))
        yield handlers


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
ROUTES = (SUBMIT, LIST, GET, CANCEL, INVOKE)
_AMAZON = "x-amzn-sagemaker-"


def job_http_handlers(jobs: Jobs) -> dict[str, HttpHandler]:
    """The handlers, by route."""

    async def submit(request: HttpRequest) -> HttpResponse:
        submitted = await request.make(lambda: SubmitInferenceRequest(**request.body.arguments()))
        operation = await jobs.submit(submitted, request.call)
        location = (b"location", f"/v1/{operation.name}".encode())
        return HttpResponse(await _written(operation), status=202, headers=[location])

    async def list_all(request: HttpRequest) -> HttpResponse:
        size = _number("page_size", request.parameter("page_size"))
        found = await jobs.list_jobs(int(size), request.parameter("page_token"), request.call)
        return HttpResponse(await _written(found))

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
            return request.headers.get(f"{_AMAZON}{name}".encode(), b"").decode("latin-1")

        id = header("inferenceid") or secrets.token_hex(16)
        limits = SubmitInferenceRequest(
            request_id=id,
            time_to_live_s=int(_number("RequestTTLSeconds", header("requestttlseconds"))),
            work_limit_s=int(_number("InvocationTimeoutSeconds", header("invocationtimeoutseconds"))),
        )
        invocation = await jobs.invoke(
            Invocation(
                endpoint=request.names["name"],
                input_uri=header("inputlocation"),
                content_type=header("content-type") or "application/json",
                accept=header("accept") or "application/json",
            ),
            limits,
            request.call,
        )
        places = {"outputlocation": invocation.output_uri, "failurelocation": invocation.failure_uri}
        headers = [(f"{_AMAZON}{name}".encode(), uri.encode()) for name, uri in places.items()]
        return HttpResponse(write_body({"InferenceId": id}), status=202, headers=headers)

    return {SUBMIT.key: submit, LIST.key: list_all, GET.key: get, CANCEL.key: cancel, INVOKE.key: invoke}


async def _written(answer: Message) -> bytes:
    """In a thread: of a job's results, json_format takes seconds."""
    return await asyncio.to_thread(lambda: write_body(MessageToDict(answer, preserving_proto_field_name=True)))


def _number(name: str, text: str) -> float:
    """A number from 0; 0 for none. Raises InvalidInput."""
    if not text:
        return 0.0
    if not (text.isascii() and text.replace(".", "", 1).isdigit()) or len(text) > 9:
        raise InvalidInput(name, "must be a number from 0")
    return float(text)
