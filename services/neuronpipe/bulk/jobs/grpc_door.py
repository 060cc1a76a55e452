"""Jobs over gRPC: JobService, and google.longrunning.Operations."""

from typing import Any

from google.longrunning import operations_pb2
from google.protobuf.empty_pb2 import Empty

from neuronpipe.api.v1 import jobs_pb2
from neuronpipe.bulk.jobs.service import Jobs
from neuronpipe.core.errors import InvalidInput
from neuronpipe.platform.process.door import Handler
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
