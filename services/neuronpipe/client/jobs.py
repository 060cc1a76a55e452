"""Jobs of the asynchronous client."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.longrunning import operations_pb2
from google.protobuf import duration

from neuronpipe.api.v1.inference_pb2 import InferOutcome
from neuronpipe.api.v1.jobs_pb2 import JobMetadata, JobResult
from neuronpipe.core.errors import DeadlineExceeded, Unavailable
from neuronpipe.core.status import from_status

# The longest wait of one call; then the next call waits.
_WAIT_S = 60.0
# The pause while neither the gateway nor its Redis can report the job's state.
_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job when it was queried. `result`: None before the job has ended, and if it failed."""

    name: str
    metadata: JobMetadata
    is_done: bool
    result: JobResult | None

    @classmethod
    def of(cls, operation: operations_pb2.Operation) -> "JobStatus":
        """Reads a job from an operation. Raises the error of a job that failed as a whole."""
        if operation.HasField("error"):
            raise from_status(operation.error)
        return cls.described(operation)

    @classmethod
    def described(cls, operation: operations_pb2.Operation) -> "JobStatus":
        """Reads a job from an operation, without raising the job's error."""
        metadata, result = JobMetadata(), JobResult()
        operation.metadata.Unpack(metadata)
        has_result = operation.HasField("response") and operation.response.Unpack(result)
        return cls(operation.name, metadata, operation.done, result if has_result else None)


class AsyncJob:
    """A job of an AsyncClient. `name`: the name of its operation, by which `client.job` finds it again."""

    def __init__(self, name: str, call: Callable[..., Awaitable[Any]]) -> None:
        """`call`: AsyncClient's, which raises NeuronpipeError."""
        self.name = name
        self._call = call

    async def wait(self, timeout_s: float | None = None) -> Sequence[InferOutcome]:
        """Waits for the job's end, and returns the outcomes, in the order of the inputs; none if they are in an object.

        Raises the error of a job that failed as a whole, and DeadlineExceeded if it has not ended within `timeout_s`;
        None: no limit.
        """
        result = JobStatus.of(await self._ended(timeout_s)).result
        return result.outcomes if result else ()

    async def status(self) -> JobStatus:
        """Returns the job's current state. Raises the error of a job that failed as a whole."""
        message = operations_pb2.GetOperationRequest(name=self.name)
        return JobStatus.of(await self._call(lambda stubs: stubs.operations.GetOperation, message))

    async def cancel(self) -> None:
        """Cancels the job if it has not ended."""
        message = operations_pb2.CancelOperationRequest(name=self.name)
        await self._call(lambda stubs: stubs.operations.CancelOperation, message)

    async def delete(self) -> None:
        """Deletes the job and its result; cancels it first if it has not ended."""
        message = operations_pb2.DeleteOperationRequest(name=self.name)
        await self._call(lambda stubs: stubs.operations.DeleteOperation, message)

    async def _ended(self, timeout_s: float | None) -> operations_pb2.Operation:
        ends_s = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
        while True:
            left_s = _WAIT_S if ends_s is None else min(_WAIT_S, ends_s - asyncio.get_running_loop().time())
            timeout = duration.from_nanoseconds(int(max(0.0, left_s) * 1e9))
            message = operations_pb2.WaitOperationRequest(name=self.name, timeout=timeout)
            try:
                operation: operations_pb2.Operation = await self._call(
                    lambda stubs: stubs.operations.WaitOperation, message, max(0.0, left_s) + _WAIT_S
                )
                if operation.done:
                    return operation
            except Unavailable:  # the job outlives the gateway and its Redis
                await asyncio.sleep(_PAUSE_S)
            if ends_s is not None and asyncio.get_running_loop().time() >= ends_s:
                raise DeadlineExceeded(f"{self.name} has not ended within {timeout_s:g} s")
