"""The asynchronous client."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Iterable, Sequence
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

import grpc

from neuronpipe.api.v1.inference_pb2 import (
    InferBatchRequest,
    InferOutcome,
    InferRequest,
    InferResponse,
    InferStreamRequest,
    InferStreamResponse,
)
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.api.v1.models_pb2 import GetModelRequest, ListModelsRequest, Model
from neuronpipe.api.v1.models_pb2_grpc import ModelServiceStub
from neuronpipe.client.task_call import TaskCall, ValueT
from neuronpipe.client.task_methods import TaskMethods
from neuronpipe.rpc.client import error_of, open_channel

ResponseT = TypeVar("ResponseT")
_StreamCall: TypeAlias = "grpc.aio.StreamStreamCall[InferStreamRequest, InferStreamResponse]"

# Inference has no side effects, so a call that no server began (UNAVAILABLE), that one refused as too much (RESOURCE_EXHAUSTED), or that
# one cut off as it stopped (CANCELLED), may be repeated. gRPC itself does it: it waits as long as the server's pushback says, and stops
# altogether while most calls fail.
_RETRIES = {
    "methodConfig": [
        {
            "name": [{"service": "neuronpipe.api.v1.InferenceService"}, {"service": "neuronpipe.api.v1.ModelService"}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "2s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED", "CANCELLED"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 100, "tokenRatio": 0.1},
}


class AsyncClient(TaskMethods):
    """Calls a gateway. Methods raise NeuronpipeError; its classes can be imported from neuronpipe.client.

    The client's `timeout_s`, in seconds and finite, is the deadline of every call but infer_stream's, retries included; None for no
    deadline. A method's `timeout_s` replaces it for one call; None leaves the client's. A deadline of 0 or less has passed already:
    gRPC ends the call at once, with DeadlineExceeded.

    `is_bulk` marks what the methods of the tasks (classify, embed and so on) send as work for which time matters less: it waits while
    interactive work does, and is refused first. A request given to infer, infer_batch or infer_stream has its own `priority`.

    Safe to share between tasks; use as `async with AsyncClient("host:50050") as client:` or call `close`.
    """

    def __init__(self, target: str, *, timeout_s: float | None = 30.0, retries: bool = True, is_bulk: bool = False) -> None:
        """`target`: a gRPC target such as "host:50050" or "dns:///gateway:50050"; calls go round all of its addresses."""
        super().__init__(is_bulk=is_bulk)
        self._timeout_s = timeout_s
        self._channel = open_channel(target, _RETRIES if retries else None)
        self._inference = InferenceServiceStub(self._channel)
        self._models = ModelServiceStub(self._channel)

    async def _call(self, call: TaskCall[ValueT]) -> ValueT:
        return call.read((await self.infer(call.request)).result)

    async def infer(self, request: InferRequest, *, timeout_s: float | None = None) -> InferResponse:
        """Runs one input of any task; the response also has the stage timings and the usage."""
        return await _result(self._inference.Infer(request, timeout=self._deadline_s(timeout_s)))

    async def infer_batch(self, requests: Iterable[InferRequest], *, timeout_s: float | None = None) -> Sequence[InferOutcome]:
        """Runs many inputs; outcomes come in the order of the requests, each a response or an error of its own."""
        call = self._inference.InferBatch(InferBatchRequest(requests=requests), timeout=self._deadline_s(timeout_s))
        return (await _result(call)).outcomes

    async def infer_stream(
        self, requests: AsyncIterable[InferRequest] | Iterable[InferRequest], *, timeout_s: float | None = None
    ) -> AsyncGenerator[InferStreamResponse, None]:
        """Runs inputs as they are yielded; answers come as they are ready, named by their request_id.

        A request without a request_id gets its place among the requests as one: "0" is the first.

        `timeout_s` is the deadline of the whole stream; None for no deadline, whatever the client's. What `requests` raises ends the
        call and is raised here.
        """
        call = self._inference.InferStream(timeout=timeout_s)
        # Not gRPC's own reading of an iterator: that goes on when the call has ended, and hides what the iterator raises.
        sending = asyncio.create_task(_send(requests, call))
        try:
            async for response in call:
                yield response
        except (asyncio.CancelledError, grpc.aio.AioRpcError) as failure:
            if sending.done() and not sending.cancelled() and (fault := sending.exception()):
                raise fault from None
            if isinstance(failure, grpc.aio.AioRpcError):
                raise error_of(failure) from failure
            raise
        finally:
            call.cancel()
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def list_models(self) -> Sequence[Model]:
        """Every version of every model."""
        return (await _result(self._models.ListModels(ListModelsRequest(), timeout=self._timeout_s))).models

    async def get_model(self, name: str, version: str = "") -> Model:
        """One model."""
        return (await _result(self._models.GetModel(GetModelRequest(name=name, version=version), timeout=self._timeout_s))).model

    async def close(self) -> None:
        """Ends all calls and closes the connections."""
        await self._channel.close()

    def _deadline_s(self, timeout_s: float | None) -> float | None:
        return self._timeout_s if timeout_s is None else timeout_s

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()


async def _result(call: Awaitable[ResponseT]) -> ResponseT:
    try:
        return await call
    except grpc.aio.AioRpcError as failure:
        raise error_of(failure) from failure


async def _send(requests: AsyncIterable[InferRequest] | Iterable[InferRequest], call: _StreamCall) -> None:
    """Sends the requests until there are no more or the call ends. Raises what reading them raises, with the call cancelled."""
    try:
        number = 0
        async for request in _each(requests):
            message = InferStreamRequest(request=request)
            message.request.request_id = request.request_id or str(number)
            number += 1
            try:
                await call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the call has ended; whoever reads it is told why
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
