"""Jobs as a part of a gateway: JobService and google.longrunning.Operations over gRPC, and their handlers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.empty_pb2 import Empty

from neuronpipe.api.v1 import jobs_pb2
from neuronpipe.bulk.jobs.service import Jobs
from neuronpipe.bulk.jobs.settings import JobSettings
from neuronpipe.core.errors import InvalidInput
from neuronpipe.doors.assembly import Protocols
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.settings import HttpSettings, PipelineSettings
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.platform.process.life import Life
from neuronpipe.rpc.rpcs import Context, RpcHandlers, call_of, handlers_of

JOB_SERVICE = jobs_pb2.DESCRIPTOR.services_by_name["JobService"]
OPERATIONS = operations_pb2.Operation.DESCRIPTOR.file.services_by_name["Operations"]


def job_rpc_handlers(jobs: Jobs) -> RpcHandlers:

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

    operations = {
        "GetOperation": get,
        "ListOperations": list_all,
        "WaitOperation": wait,
        "CancelOperation": cancel,
        "DeleteOperation": delete,
    }
    return [*handlers_of(JOB_SERVICE, {"SubmitInference": submit}), *handlers_of(OPERATIONS, operations)]


# The gRPC services, whether jobs are set up or not.
JOB_SERVICES = [JOB_SERVICE.full_name, OPERATIONS.full_name]


@asynccontextmanager
async def running_jobs(
    settings: JobSettings,
    pipeline: PipelineSettings,
    http: HttpSettings,
    gateway: Gateway,
    tenants: Tenants | None,
    life: Life,
) -> AsyncIterator[Protocols]:
    """Runs the jobs of a gateway during the block, and yields their rpcs and routes. Raises SetupError."""
    store = None
    if settings.jobs_redis_url:
        from neuronpipe.bulk.jobs.store import JobStore  # redis-py takes 0.1 s to import

        store = JobStore(settings)
    jobs = Jobs(
        store=store,
        settings=settings,
        pipeline=pipeline,
        catalog=gateway.catalog,
        tenants=tenants,
        set_aside=life.in_flight.set_aside,
    )
    async with jobs.running():
        life.on_draining(jobs.drain)
        protocols = Protocols(job_rpc_handlers(jobs))
        if http.http_listen:
            from neuronpipe.bulk.jobs.http import job_http_handlers

            protocols = Protocols(protocols.rpcs, job_http_handlers(jobs))
        yield protocols
