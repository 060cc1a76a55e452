"""Jobs as a part of a gateway: JobService and google.longrunning.Operations over gRPC, and what answers."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.empty_pb2 import Empty

from neuronpipe.api.v1 import jobs_pb2
from neuronpipe.bulk.jobs.service import Jobs
from neuronpipe.bulk.jobs.settings import JobSettings
from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.assembly import Addition
from neuronpipe.doors.http.exchange import Route
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.settings import HttpSettings, PipelineSettings
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.platform.process.door import Handler
from neuronpipe.platform.process.life import Life
from neuronpipe.rpc.rpcs import Context, by_path, call_of, rpcs_of

JOB_SERVICE = jobs_pb2.DESCRIPTOR.services_by_name["JobService"]
OPERATIONS = operations_pb2.Operation.DESCRIPTOR.file.services_by_name["Operations"]


def job_rpc_handlers(jobs: Jobs) -> dict[str, Handler]:
    """The handlers of both services, by path."""

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
        **by_path(JOB_SERVICE, SubmitInference=lambda message, context: jobs.submit(message, call_of(context))),
        **by_path(
            OPERATIONS,
            GetOperation=lambda message, context: jobs.get(message.name, call_of(context)),
            ListOperations=list_all,
            WaitOperation=wait,
            CancelOperation=cancel,
            DeleteOperation=delete,
        ),
    }


def _routes() -> Sequence[Route]:
    from neuronpipe.bulk.jobs.http import ROUTES  # what HTTP needs is imported for an HTTP door only

    return ROUTES


# What the doors take, whether jobs are set up or not.
JOBS = Addition(rpcs=(*rpcs_of(JOB_SERVICE), *rpcs_of(OPERATIONS)), routes=_routes)


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
        handlers = job_rpc_handlers(jobs)
        if http.http_listen:
            from neuronpipe.bulk.jobs.http import job_http_handlers
            from neuronpipe.doors.http.handlers import DESCRIBED
            from neuronpipe.doors.http.openapi import openapi_handlers

            handlers |= job_http_handlers(jobs) | openapi_handlers((*DESCRIBED, *_routes()))
        yield handlers
