"""The asynchronous client."""

import asyncio
import uuid
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias, TypeVar, Unpack

import grpc
from google.longrunning.operations_pb2 import ListOperationsRequest
from google.longrunning.operations_pb2_grpc import OperationsStub

from neuronpipe.api.v1.inference_pb2 import (
    GenerateResponse,
    InferBatchRequest,
    InferOutcome,
    InferRequest,
    InferResponse,
    InferStreamRequest,
    InferStreamResponse,
)
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.api.v1.jobs_pb2 import JobPriority, SubmitInferenceRequest
from neuronpipe.api.v1.jobs_pb2_grpc import JobServiceStub
from neuronpipe.api.v1.models_pb2 import GetModelRequest, ListModelsRequest, Model
from neuronpipe.api.v1.models_pb2_grpc import ModelServiceStub
from neuronpipe.api.v1.tasks_pb2 import Truncation
from neuronpipe.client.jobs import AsyncJob, JobStatus
from neuronpipe.client.task_call import Messages, TaskCall, ValueT, generation_request
from neuronpipe.client.task_methods import TaskMethods
from neuronpipe.core.addresses import check_target
from neuronpipe.core.errors import InternalError, SetupError
from neuronpipe.core.generation_options import GenerationFields
from neuronpipe.core.names import ROUTE_KEY
from neuronpipe.platform.tls import TlsFiles
from neuronpipe.rpc.client import ServiceConnection, error_of, key_metadata, undamaged

if TYPE_CHECKING:  # the types of stubs of a grpc.aio channel
    from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceAsyncStub
    from neuronpipe.api.v1.jobs_pb2_grpc import JobServiceAsyncStub
    from neuronpipe.api.v1.models_pb2_grpc import ModelServiceAsyncStub

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
_StreamCall: TypeAlias = "grpc.aio.StreamStreamCall[InferStreamRequest, InferStreamResponse]"

# Inference has no side effects, so calls may be repeated: if no server began a call (UNAVAILABLE), if a server refused
# it because of overload (RESOURCE_EXHAUSTED), or if a stopping server ended it (CANCELLED). gRPC itself retries: it
# waits for the time of the server's pushback, and stops retrying while most calls fail. A job has an id of its
# caller's and may be submitted again, but not if there are too many jobs: the pushback is longer than most deadlines.
_BACKOFF = {"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "2s", "backoffMultiplier": 2}
RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "neuronpipe.api.v1.InferenceService"}, {"service": "neuronpipe.api.v1.ModelService"}],
            "retryPolicy": {**_BACKOFF, "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"]},
        },
        {
            "name": [{"service": "neuronpipe.api.v1.JobService"}, {"service": "google.longrunning.Operations"}],
            "retryPolicy": {**_BACKOFF, "retryableStatusCodes": ["UNAVAILABLE", "CANCELLED"]},
        },
    ],
    "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
    # The channel watches the health of each server's process: calls go to other servers as soon as one begins to stop.
    "healthCheckConfig": {"serviceName": ""},
}


# Maximum number of jobs in one page of a list.
_PAGE = 100


class _Stubs(NamedTuple):
    inference: "InferenceServiceAsyncStub"
    models: "ModelServiceAsyncStub"
    jobs: "JobServiceAsyncStub"
    operations: Any

    @classmethod
    def of(cls, channel: grpc.aio.Channel) -> "_Stubs":
        return cls(
            InferenceServiceStub(channel), ModelServiceStub(channel), JobServiceStub(channel), OperationsStub(channel)
        )


class AsyncClient(TaskMethods):
    """Calls a gateway. Methods raise NeuronpipeError; its classes can be imported from neuronpipe.client.

    The client's `timeout_s`, in seconds and finite, is the deadline of every call except infer_stream, retries
    included; None for no deadline. A method's `timeout_s` replaces it for one call; None keeps the client's. A deadline
    of 0 or less has passed already: gRPC ends the call at once, with DeadlineExceeded.

    `is_bulk` gives the requests of the task methods (classify, embed and so on) bulk priority: they wait behind
    interactive requests, and are refused first. A request given to infer, infer_batch or infer_stream has its own
    `priority`.

    Safe to share between tasks; use as `async with AsyncClient("host:50050") as client:` or call `close`.
    """

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = 30.0,
        retries: bool = True,
        is_bulk: bool = False,
        tls: TlsFiles | None = None,
        api_key: str | None = None,
        route_key: str = "",
    ) -> None:
        """Connects to a gateway when it is first called.

        `target`: a gRPC target such as "host:50050" or "dns:///gateway:50050"; calls are balanced over all of its
        addresses (round-robin). Raises SetupError for a target without a port.

        `tls`: files for an encrypted connection, reloaded when they change; without `ca`, gRPC's default authorities
        count. Raises SetupError if the files cannot be used.

        `api_key`: an API key or a token (JWT), sent with every call; None: the variable NEURONPIPE_API_KEY, if it is
        set. Raises SetupError if the key is invalid.

        `route_key`: if requests are distributed over versions of a model, all requests of this client get the same
        version; ASCII. Empty: the version is chosen for each request, by its id.
        """
        super().__init__(is_bulk=is_bulk)
        self._timeout_s = timeout_s
        try:
            check_target(target)
        except ValueError as error:
            raise SetupError(f"target: {error}") from None
        key = key_metadata(api_key, target=target, is_encrypted=tls is not None)
        self._metadata = [*key, *([(ROUTE_KEY, route_key)] if route_key else ())]
        self._connection = ServiceConnection(target, _Stubs.of, RETRIES if retries else None, tls)

    async def _call(self, call: TaskCall[ValueT]) -> ValueT:
        return call.read((await self.infer(call.request)).result)

    async def infer(self, request: InferRequest, *, timeout_s: float | None = None) -> InferResponse:
        """Runs one input of any task; the response also has the stage timings and the usage."""
        return await self._unary(lambda stubs: stubs.inference.Infer, request, timeout_s)

    async def infer_batch(
        self, requests: Iterable[InferRequest], *, timeout_s: float | None = None
    ) -> Sequence[InferOutcome]:
        """Runs many inputs. Outcomes are in the order of the requests; each is a response or an error."""
        message = InferBatchRequest(requests=requests)
        return (await self._unary(lambda stubs: stubs.inference.InferBatch, message, timeout_s)).outcomes

    async def infer_stream(
        self, requests: AsyncIterable[InferRequest] | Iterable[InferRequest], *, timeout_s: float | None = None
    ) -> AsyncGenerator[InferStreamResponse, None]:
        """Runs inputs as they are yielded, and yields answers as they are ready, identified by their request_id.

        A request without a request_id gets its position among the requests: "0" is the first.

        `timeout_s` is the deadline of the whole stream; None for no deadline, regardless of the client's. An error of
        `requests` ends the call and is raised here. Client reads `requests` in a thread of its own: it must not block.
        """
        with self._connection.use() as stubs:
            call = stubs.inference.InferStream(timeout=timeout_s, metadata=self._metadata)
            # gRPC's own reading of an iterator continues after the end of the call, and hides the iterator's errors.
            sending = asyncio.create_task(_send(requests, call))
            try:
                async for response in call:
                    yield undamaged(response)
            except (asyncio.CancelledError, grpc.aio.AioRpcError) as failure:
                if sending.done() and not sending.cancelled() and (fault := sending.exception()):
                    raise fault from None
                if isinstance(failure, grpc.aio.AioRpcError):
                    raise error_of(failure, call.time_remaining()) from failure
                raise
            finally:
                call.cancel()
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    def generate(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        truncation: "Truncation.ValueType" = Truncation.TRUNCATION_ERROR,
        version: str = "",
        timeout_s: float | None = None,
        **options: Unpack[GenerationFields],
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Continues a prompt, or messages of a chat, and yields the text in parts: a start, chunks, and a response with
        the whole text.

        `chunk.text` is empty in all messages except chunks. `options` are the fields of GenerationOptions. To end the
        call early, close the generator.
        """
        request = generation_request(
            "text_generation",
            model,
            {"prompt": prompt, "messages": messages},
            options,
            truncation=truncation,
            version=version,
            priority=self._priority,
        )
        return self.stream(request, timeout_s=timeout_s)

    async def stream(
        self, request: InferRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerateResponse, None]:
        """Generates as `generate` does, for a request of any task that generates.

        Raises InternalError if the answer ends before the whole text has come.
        """
        with self._connection.use() as stubs:
            deadline_s = self._deadline_s(timeout_s)
            call = stubs.inference.Generate(request, timeout=deadline_s, metadata=self._metadata)
            is_whole = False
            try:
                async for response in call:
                    is_whole = undamaged(response).HasField("response")
                    yield response
                if not is_whole:
                    raise InternalError("the server's answer ended before the whole text came")
            except grpc.aio.AioRpcError as failure:
                raise error_of(failure, call.time_remaining()) from failure
            finally:
                call.cancel()

    async def submit(
        self,
        requests: Iterable[InferRequest] = (),
        *,
        input_uri: str = "",
        output_uri: str = "",
        request_id: str = "",
        time_to_live_s: int = 0,
        work_limit_s: int = 0,
        priority: "JobPriority.ValueType" = JobPriority.JOB_PRIORITY_NORMAL,
        notification_url: str = "",
    ) -> AsyncJob:
        """Submits a job of requests, or of the object `input_uri`; the job outlives this client.

        The other arguments are the fields of SubmitInferenceRequest (jobs.proto). Submitting again with the
        same `request_id` returns the same job. The default is a random id, so that a retry of this call makes no second
        job.
        """
        message = SubmitInferenceRequest(
            requests=requests,
            input_uri=input_uri,
            output_uri=output_uri,
            request_id=request_id or uuid.uuid4().hex,
            time_to_live_s=time_to_live_s,
            work_limit_s=work_limit_s,
            priority=priority,
            notification_url=notification_url,
        )
        return self.job((await self._unary(lambda stubs: stubs.jobs.SubmitInference, message)).name)

    def job(self, name: str) -> AsyncJob:
        """Returns a job that was submitted before, by the name of its operation."""
        return AsyncJob(name, self._unary)

    async def list_jobs(self, limit: int = 100) -> Sequence[JobStatus]:
        """Lists the caller's jobs, the newest first."""
        statuses: list[JobStatus] = []
        token = ""
        while len(statuses) < limit:
            message = ListOperationsRequest(page_size=min(_PAGE, limit - len(statuses)), page_token=token)
            page = await self._unary(lambda stubs: stubs.operations.ListOperations, message)
            statuses += map(JobStatus.described, page.operations)
            token = page.next_page_token
            if not token:
                break
        return statuses

    async def list_models(self) -> Sequence[Model]:
        """Lists every version of every model."""
        return (await self._unary(lambda stubs: stubs.models.ListModels, ListModelsRequest())).models

    async def get_model(self, name: str, version: str = "") -> Model:
        """Returns the description of a model."""
        message = GetModelRequest(name=name, version=version)
        return (await self._unary(lambda stubs: stubs.models.GetModel, message)).model

    async def close(self) -> None:
        """Ends all calls and closes the connections."""
        await self._connection.close()

    async def _unary(
        self,
        method: "Callable[[_Stubs], grpc.aio.UnaryUnaryMultiCallable[RequestT, ResponseT]]",
        message: RequestT,
        timeout_s: float | None = None,
    ) -> ResponseT:
        with self._connection.use() as stubs:
            call = method(stubs)(message, timeout=self._deadline_s(timeout_s), metadata=self._metadata)
            try:
                return undamaged(await call)
            except grpc.aio.AioRpcError as failure:
                raise error_of(failure, call.time_remaining()) from failure

    def _deadline_s(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _send(requests: AsyncIterable[InferRequest] | Iterable[InferRequest], call: _StreamCall) -> None:
    """Sends the requests until there are no more or the call ends.

    If reading the requests raises, the call is cancelled, and the error is raised here.
    """
    try:
        number = 0
        async for request in _each(requests):
            message = InferStreamRequest(request=request)
            message.request.request_id = request.request_id or str(number)
            number += 1
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the call has ended; the reader gets its error
                return
    except Exception:
        call.cancel()
        raise
    await call.done_writing()


async def _each(requests: AsyncIterable[InferRequest] | Iterable[InferRequest]) -> AsyncIterator[InferRequest]:
    if isinstance(requests, AsyncIterable):
        async for request in requests:
            yield request
    else:
        for request in requests:
            yield request
