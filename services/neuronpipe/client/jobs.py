"""Jobs as the asynchronous client has them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
from google.longrunning import operations_pb2
from google.protobuf.duration_pb2 import Duration

from neuronpipe.api.v1.inference_pb2 import InferOutcome
from neuronpipe.api.v1.jobs_pb2 import JobMetadata, JobResult, SubmitInferenceRequest
from neuronpipe.core.errors import DeadlineExceeded, Unavailable
from neuronpipe.core.status import from_status
from neuronpipe.rpc.client import Connection, error_of

# Of one call that waits; then the next one does.
_WAIT_S = 60.0
_PAGE = 100
# While neither the gateway nor its Redis can say how a job is.
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job as it was when it was asked for. `result`: None before it has ended, and where it failed."""

    name: str
    metadata: JobMetadata
    is_done: bool
    result: JobResult | None

    @classmethod
    def of(cls, operation: operations_pb2.Operation) -> "JobStatus":
        """What an operation says. Raises the error of a job that failed as a whole."""
        if operation.HasField("error"):
            raise from_status(operation.error)
        return cls.described(operation)

    @classmethod
    def described(cls, operation: operations_pb2.Operation) -> "JobStatus":
        """The same, without raising."""
        metadata, result = JobMetadata(), JobResult()
        operation.metadata.Unpack(metadata)
        has_result = operation.HasField("response") and operation.response.Unpack(result)
        return cls(operation.name, metadata, operation.done, result if has_result else None)


class JobCalls:
    """The calls about jobs, of an asynchronous client. They raise NeuronpipeError."""

    def __init__(
        self, connection: Connection[Any], metadata: Sequence[tuple[str, str]], timeout_s: float | None
    ) -> None:
        self._connection = connection
        self._metadata = metadata
        self._timeout_s = timeout_s

    async def submit(self, message: SubmitInferenceRequest) -> operations_pb2.Operation:
        """Submits a job."""
        return await self._call(lambda stubs: stubs.jobs.SubmitInference, message)

    async def get(self, name: str) -> operations_pb2.Operation:
        """A job."""
        return await self._call(
            lambda stubs: stubs.operations.GetOperation, operations_pb2.GetOperationRequest(name=name)
        )

    async def list_all(self, limit: int) -> list[operations_pb2.Operation]:
        """The newest jobs of the caller, at most `limit`."""
        found: list[operations_pb2.Operation] = []
        token = ""
        while len(found) < limit:
            message = operations_pb2.ListOperationsRequest(page_size=min(_PAGE, limit - len(found)), page_token=token)
            page = await self._call(lambda stubs: stubs.operations.ListOperations, message)
            found += page.operations
            token = page.next_page_token
            if not token:
                break
        return found

    async def wait(self, name: str, timeout_s: float | None) -> operations_pb2.Operation:
        """A job that has ended. Raises DeadlineExceeded where it has not within `timeout_s`; None waits on."""
        ends_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while True:
            left_s = _WAIT_S if ends_s is None else min(_WAIT_S, ends_s - asyncio.get_running_loop().time())
            message = operations_pb2.WaitOperationRequest(name=name, timeout=Duration())
            message.timeout.FromNanoseconds(int(max(0.0, left_s) * 1e9))
            try:
                operation = await self._call(
                    lambda stubs: stubs.operations.WaitOperation, message, timeout_s=max(0.0, left_s) + _WAIT_S
                )
                if operation.done:
                    return operation
            except Unavailable:  # the job outlives the gateway and its Redis
                await asyncio.sleep(_PAUSE_S)
            if ends_s is not None and asyncio.get_running_loop().time() >= ends_s:
                raise DeadlineExceeded(f"{name} has not ended within {timeout_s:g} s")

    async def cancel(self, name: str) -> None:
        """Cancels a job."""
        message = operations_pb2.CancelOperationRequest(name=name)
        await self._call(lambda stubs: stubs.operations.CancelOperation, message)

    async def delete(self, name: str) -> None:
        """Deletes a job and its result."""
        message = operations_pb2.DeleteOperationRequest(name=name)
        await self._call(lambda stubs: stubs.operations.DeleteOperation, message)

    async def _call(
        self, method: Callable[[Any], Callable[..., Any]], message: Any, timeout_s: float | None = None
    ) -> Any:
        with self._connection.use() as stubs:
            call = method(stubs)(message, timeout=timeout_s or self._timeout_s, metadata=self._metadata)
            try:
                return await call
            except grpc.aio.AioRpcError as failure:
                raise error_of(failure, call.time_remaining()) from failure


class AsyncJob:
    """A job of an AsyncClient. `name`: of its operation, by which it is found again (`client.job`)."""

    def __init__(self, name: str, calls: JobCalls) -> None:
        self.name = name
        self._calls = calls

    async def wait(self, timeout_s: float | None = None) -> Sequence[InferOutcome]:
        """The outcomes, in the order of the inputs, once it has ended; none where they are in an object.

        Raises the error of a job that failed as a whole, and DeadlineExceeded where it has not ended within
        `timeout_s`; None waits on.
        """
        result = JobStatus.of(await self._calls.wait(self.name, timeout_s)).result
        return result.outcomes if result else ()

    async def status(self) -> JobStatus:
        """What is known of it now. Raises the error of a job that failed as a whole."""
        return JobStatus.of(await self._calls.get(self.name))

    async def cancel(self) -> None:
        """Cancels it where it has not ended."""
        await self._calls.cancel(self.name)

    async def delete(self) -> None:
        """Deletes it and its result; cancels it first where it has not ended."""
        await self._calls.delete(self.name)
