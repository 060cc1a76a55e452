"""rpc/client.py: what a failed call to a stage means."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2
from google.rpc.status_pb2 import Status

from neuronpipe.api.v1.stages_pb2 import ExecuteRequest, PostprocessRequest, TokenizeOutcome, TokenizeRequest, TokenizeResponse
from neuronpipe.api.v1.stages_pb2_grpc import TokenizerServiceServicer, add_TokenizerServiceServicer_to_server
from neuronpipe.core.errors import InternalError, NeuronpipeError, Unavailable
from neuronpipe.core.stages import Stages
from neuronpipe.core.status import to_status
from neuronpipe.rpc.client import remote_stages
from tests.unit.every_error import EVERY_ERROR

# Nothing listens on the discard port.
_NOWHERE = "127.0.0.1:9"
Answer = Callable[["grpc.aio.ServicerContext[Any, Any]"], Awaitable[TokenizeResponse]]


class _Tokenizer(TokenizerServiceServicer):
    """A tokenizer that answers as a test says: not one of ours, which always sends details."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def Tokenize(self, request: TokenizeRequest, context: Any) -> TokenizeResponse:
        return await self._answer(context)


@asynccontextmanager
async def _stages(answer: Answer) -> AsyncIterator[Stages]:
    server = grpc.aio.server()
    add_TokenizerServiceServicer_to_server(_Tokenizer(answer), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with remote_stages(f"127.0.0.1:{port}", _NOWHERE, _NOWHERE) as (stages, _):
            yield stages
    finally:
        await server.stop(0)


def _aborting(code: grpc.StatusCode, message: str, status: Status | None = None) -> Answer:
    async def answer(context: "grpc.aio.ServicerContext[Any, Any]") -> TokenizeResponse:
        trailers = () if status is None else (("grpc-status-details-bin", status.SerializeToString()),)
        await context.abort(code, message, trailers)
        raise AssertionError("abort raises")

    return answer


async def test_a_stages_response_comes_through() -> None:
    async def answer(context: "grpc.aio.ServicerContext[Any, Any]") -> TokenizeResponse:
        return TokenizeResponse(outcomes=[TokenizeOutcome()])

    async with _stages(answer) as stages:
        assert len((await stages.tokenize(TokenizeRequest())).outcomes) == 1


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_an_error_of_a_service_of_ours_is_that_error(error: NeuronpipeError) -> None:
    status = to_status(error)
    code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
    async with _stages(_aborting(code, error.message, status)) as stages:
        with pytest.raises(type(error)) as caught:
            await stages.tokenize(TokenizeRequest())
    assert vars(caught.value) == vars(error)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED], ids=lambda code: code.name)
async def test_a_service_that_went_away_is_unavailable_by_its_name(code: grpc.StatusCode) -> None:
    async with _stages(_aborting(code, "socket closed")) as stages:
        with pytest.raises(Unavailable, match=r"^the tokenizer service cannot be reached$"):
            await stages.tokenize(TokenizeRequest())


@pytest.mark.parametrize(
    ("service", "call"),
    [
        ("tokenizer", lambda stages: stages.tokenize(TokenizeRequest())),
        ("neuron-executor", lambda stages: stages.execute(ExecuteRequest())),
        ("postprocessor", lambda stages: stages.postprocess(PostprocessRequest())),
    ],
    ids=["tokenizer", "neuron-executor", "postprocessor"],
)
async def test_a_service_that_is_not_there_is_unavailable_by_its_name(service: str, call: Callable[[Stages], Awaitable[object]]) -> None:
    async with remote_stages(_NOWHERE, _NOWHERE, _NOWHERE) as (stages, _):
        with pytest.raises(Unavailable, match=rf"^the {service} service cannot be reached$"):
            await call(stages)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNKNOWN, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNIMPLEMENTED])
async def test_any_other_failure_between_services_is_internal_and_keeps_its_text_to_itself(code: grpc.StatusCode) -> None:
    async with _stages(_aborting(code, "the secret")) as stages:
        with pytest.raises(InternalError, match=rf"^the tokenizer service failed with {code.name}$"):
            await stages.tokenize(TokenizeRequest())


async def test_leaving_a_stage_cancels_its_call() -> None:
    began, cancelled = asyncio.Event(), asyncio.Event()

    async def answer(context: "grpc.aio.ServicerContext[Any, Any]") -> TokenizeResponse:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError("not reached")

    async with _stages(answer) as stages:
        call = asyncio.ensure_future(stages.tokenize(TokenizeRequest()))
        await began.wait()
        call.cancel()
        await asyncio.wait_for(cancelled.wait(), 10)


def test_a_status_code_of_grpc_is_one_of_google_rpc() -> None:
    assert {code.value[0] for code in grpc.StatusCode} == set(code_pb2.Code.values())
