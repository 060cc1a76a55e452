"""rpc/door.py over a real connection: what becomes of errors, and of calls that come too early or too late."""

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc

from neuronpipe.api.v1 import inference_pb2
from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse, InferStreamRequest, InferStreamResponse
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceStub
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InternalError, InvalidInput, ModelNotFound, NeuronpipeError, Overloaded, SetupError
from neuronpipe.core.settings import fields_of
from neuronpipe.core.status import CODES, from_status
from neuronpipe.core.tracing import SpanContext
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.life import Life
from neuronpipe.platform.process.settings import CALLERS_CONNECTION_AGE_S, ProcessSettings
from neuronpipe.rpc import client as rpc_client
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.http2 import server as http2_server
from neuronpipe.rpc.rpcs import Context, Rpc, RpcHandler, RpcHandlers, call_of
from neuronpipe.serve.settings import AllSettings, PipelineProcessSettings
from neuronpipe.stages.settings import NeuronExecutorSettings, PostprocessorSettings, TokenizerSettings
from tests.suite.constants import with_constants
from tests.unit.every_error import EVERY_ERROR

_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
# InferRequest with field 1, model, of one byte that is not UTF-8.
_NOT_UTF8 = b"\x0a\x01\xff"
# Field 1, said to be five bytes long, with one.
_BROKEN = b"\x0a\x05a"
_LIMIT_S = 10


@dataclass
class _System:
    address: str
    life: Life
    door: GrpcDoor
    channel: Any  # the stubs of grpc.aio know no calls without serializers, which this test needs to send bytes

    @property
    def stub(self) -> Any:
        return InferenceServiceStub(self.channel)


def _settings(listen: str = "127.0.0.1:0", **changes: Any) -> ProcessSettings:
    given: dict[str, Any] = {"listen": listen, "max_connection_age_s": CALLERS_CONNECTION_AGE_S} | changes
    return with_constants(ProcessSettings, **given)


def _door(settings: ProcessSettings) -> GrpcDoor:
    return GrpcDoor(settings, [_SERVICE.full_name])


def _life(settings: ProcessSettings) -> Life:
    return Life("gateway", settings, [_door(settings)])


def _some(handlers: Mapping[str, RpcHandler]) -> RpcHandlers:
    """Rpcs of the service with their handlers."""
    return [(Rpc.of(_SERVICE.methods_by_name[name], is_work=True), handler) for name, handler in handlers.items()]


@asynccontextmanager
async def _listening(caplog: pytest.LogCaptureFixture, **changes: Any) -> AsyncIterator[_System]:
    """A server that listens and does not take calls yet."""
    settings = _settings(**changes)
    door = _door(settings)
    life = Life("gateway", settings, [door])
    with caplog.at_level(logging.INFO, logger="neuronpipe"):
        await life.listen()
    address = caplog.records[-1].__dict__["fields"]["address"]  # the log is how an operator learns of the port
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            yield _System(address, life, door, channel)
        finally:
            await life.stop()


@asynccontextmanager
async def _serving(
    caplog: pytest.LogCaptureFixture, handlers: Mapping[str, RpcHandler], **changes: Any
) -> AsyncIterator[_System]:
    async with _listening(caplog, **changes) as system:
        system.life.open(partial(system.door.open, _some(handlers)))
        yield system


def _raising(fault: Exception) -> RpcHandler:
    async def raising(request: object, context: Context) -> InferResponse:
        raise fault

    return raising


def _raising_stream(fault: Exception) -> RpcHandler:
    async def raising(
        requests: AsyncIterator[InferStreamRequest], context: Context
    ) -> AsyncIterator[InferStreamResponse]:
        async for request in requests:
            yield InferStreamResponse(request_id=request.request.request_id)
            raise fault

    return raising


async def _failure(call: Awaitable[object]) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def _infer(system: _System, request: InferRequest | None = None) -> object:
    return await system.stub.Infer(request or InferRequest(), timeout=10)


async def _infer_stream(system: _System) -> object:
    return [answer async for answer in system.stub.InferStream(iter([InferStreamRequest()]), timeout=10)]


each_kind_of_call = pytest.mark.parametrize("call", [_infer, _infer_stream], ids=["unary", "stream"])
Kind = Callable[[_System], Awaitable[object]]


def _failing(fault: Exception) -> Mapping[str, RpcHandler]:
    return {"Infer": _raising(fault), "InferStream": _raising_stream(fault)}


def _status(failure: grpc.aio.AioRpcError) -> Status:
    (packed,) = [value for key, value in failure.trailing_metadata() or () if key == "grpc-status-details-bin"]
    assert isinstance(packed, bytes)
    return Status.FromString(packed)


@each_kind_of_call
@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_an_error_ends_a_call_with_its_code_its_message_and_its_details(
    caplog: pytest.LogCaptureFixture, call: Kind, error: NeuronpipeError
) -> None:
    async with _serving(caplog, _failing(error)) as system:
        failure = await _failure(call(system))
    assert (failure.code().value[0], failure.details()) == (CODES[type(error)], error.message)
    back = from_status(_status(failure))
    assert (type(back), vars(back)) == (type(error), vars(error))


@each_kind_of_call
async def test_an_overload_says_to_grpc_and_callers_when_to_retry(caplog: pytest.LogCaptureFixture, call: Kind) -> None:
    async with _serving(caplog, _failing(Overloaded("full", 1.5))) as system:
        failure = await _failure(call(system))
    assert dict(failure.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "1500"
    retry_info = RetryInfo()
    assert any(detail.Unpack(retry_info) for detail in _status(failure).details)
    assert retry_info.retry_delay.ToMilliseconds() == 1500


async def test_an_overload_without_an_estimate_is_not_retried_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async with _serving(caplog, _failing(Overloaded("full", 0.0))) as system:
        failure = await _failure(_infer(system))
    assert int(dict(failure.trailing_metadata() or ())["grpc-retry-pushback-ms"]) >= 1


async def test_an_error_that_is_no_overload_says_nothing_of_coming_back(caplog: pytest.LogCaptureFixture) -> None:
    async with _serving(caplog, _failing(ModelNotFound("no"))) as system:
        failure = await _failure(_infer(system))
    assert "grpc-retry-pushback-ms" not in dict(failure.trailing_metadata() or ())


@each_kind_of_call
async def test_a_fault_is_internal_and_keeps_its_text_to_the_log(caplog: pytest.LogCaptureFixture, call: Kind) -> None:
    async with _serving(caplog, _failing(RuntimeError("the secret"))) as system:
        failure = await _failure(call(system))
    assert failure.code() is grpc.StatusCode.INTERNAL
    assert isinstance(from_status(_status(failure)), InternalError)
    assert "secret" not in str(failure)
    assert "RuntimeError: the secret" in caplog.text


@pytest.mark.parametrize("letter", ["x", "é", "😀"])
async def test_an_error_too_long_for_grpcs_trailers_arrives(caplog: pytest.LogCaptureFixture, letter: str) -> None:
    # A client takes 8 KiB of trailers, and calls anything longer RESOURCE_EXHAUSTED, which it retries.
    async with _serving(caplog, _failing(InvalidInput("text", letter * 20_000))) as system:
        failure = await _failure(_infer(system))
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(from_status(_status(failure)), InvalidInput)
    assert str(failure.details()).startswith(f"text: {letter}")


@pytest.mark.parametrize("data", [_NOT_UTF8, _BROKEN], ids=["not UTF-8", "broken"])
async def test_an_unreadable_message_is_the_callers_fault(caplog: pytest.LogCaptureFixture, data: bytes) -> None:
    async with _serving(caplog, _failing(AssertionError("called"))) as system:
        failure = await _failure(system.channel.unary_unary(f"/{_SERVICE.full_name}/Infer")(data, timeout=10))
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    bad_request = BadRequest()
    assert any(detail.Unpack(bad_request) for detail in _status(failure).details)
    assert bad_request.field_violations[0].field == "request"


async def test_an_unreadable_message_ends_its_stream_as_the_callers_fault(caplog: pytest.LogCaptureFixture) -> None:
    good = InferStreamRequest(request=InferRequest(request_id="a")).SerializeToString()
    async with _serving(caplog, {"InferStream": _echo}) as system:
        call = system.channel.stream_stream(f"/{_SERVICE.full_name}/InferStream")(iter([good, _BROKEN]), timeout=10)
        assert InferStreamResponse.FromString(await call.read()).request_id == "a"
        failure = await _failure(call.read())
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_message_larger_than_the_limit_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with _serving(caplog, _failing(AssertionError("called")), max_message_bytes=2000) as system:
        failure = await _failure(_infer(system, InferRequest(model="x" * 2000)))
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@each_kind_of_call
async def test_a_call_before_the_service_is_ready_is_unavailable(caplog: pytest.LogCaptureFixture, call: Kind) -> None:
    async with _listening(caplog) as system:
        failure = await _failure(call(system))
    assert (failure.code(), failure.details()) == (grpc.StatusCode.UNAVAILABLE, "the gateway service is starting")


@each_kind_of_call
async def test_a_call_beyond_the_limit_of_calls_is_an_overload(
    caplog: pytest.LogCaptureFixture, call: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.platform.process.life.InFlight", partial(InFlight, max_calls=1))
    began, released = asyncio.Event(), asyncio.Event()
    async with _serving(caplog, {**_failing(AssertionError("called")), "Infer": _holding(began, released)}) as system:
        first = asyncio.create_task(_infer(system))
        await began.wait()
        failure = await _failure(call(system))
        released.set()
        await first
    assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def _holding(began: asyncio.Event, released: asyncio.Event) -> RpcHandler:
    async def holding(request: InferRequest, context: Context) -> InferResponse:
        began.set()
        await released.wait()
        return InferResponse(request_id="done")

    return holding


async def test_draining_lets_a_call_in_flight_finish(caplog: pytest.LogCaptureFixture) -> None:
    began, released = asyncio.Event(), asyncio.Event()
    async with _serving(caplog, {"Infer": _holding(began, released)}) as system:
        call = asyncio.create_task(_infer(system))
        await began.wait()
        draining = asyncio.create_task(system.life.drain(10))
        await asyncio.sleep(0.02)  # nothing happens
        assert not draining.done()
        released.set()
        await draining
        await system.life.stop()
        assert await call == InferResponse(request_id="done")


async def test_a_call_that_comes_while_draining_is_answered(caplog: pytest.LogCaptureFixture) -> None:
    began, released = asyncio.Event(), asyncio.Event()
    async with _serving(caplog, {"Infer": _holding(began, released)}) as system:
        call = asyncio.create_task(_infer(system))
        await began.wait()
        draining = asyncio.create_task(system.life.drain(10))
        await asyncio.sleep(0)
        late = asyncio.create_task(_infer(system))
        await asyncio.sleep(0.02)
        released.set()
        await asyncio.gather(draining, call)
        assert await late == InferResponse(request_id="done")


@pytest.mark.parametrize("calls", [0, 3])
async def test_draining_an_idle_server_takes_no_time(caplog: pytest.LogCaptureFixture, calls: int) -> None:
    async with _serving(caplog, _failing(ModelNotFound("no"))) as system:
        for _ in range(calls):
            await _failure(_infer(system))
        await asyncio.wait_for(system.life.drain(3600), 5)


async def test_draining_waits_no_longer_than_the_grace(caplog: pytest.LogCaptureFixture) -> None:
    began = asyncio.Event()
    async with _serving(caplog, {"Infer": _holding(began, asyncio.Event())}) as system:
        call = asyncio.create_task(_infer(system))
        await began.wait()
        await asyncio.wait_for(system.life.drain(0.01), 5)
        await system.life.stop()
        await _failure(call)


async def _health(system: _System, service: str) -> "health_pb2.HealthCheckResponse.ServingStatus":
    request = health_pb2.HealthCheckRequest(service=service)
    response = await health_pb2_grpc.HealthStub(system.channel).Check(request, timeout=10)
    return response.status


@pytest.mark.parametrize("service", ["", _SERVICE.full_name], ids=["process", "service"])
async def test_health_is_serving_from_ready_until_draining(caplog: pytest.LogCaptureFixture, service: str) -> None:
    statuses, began, may_end = [], asyncio.Event(), asyncio.Event()
    async with _listening(caplog) as system:
        statuses.append(await _health(system, service))
        system.life.open(partial(system.door.open, _some({"Infer": _holding(began, may_end)})))
        statuses.append(await _health(system, service))
        call = system.stub.Infer(InferRequest(), timeout=10)
        await began.wait()
        draining = asyncio.create_task(system.life.drain(10))
        await asyncio.sleep(0)
        statuses.append(await _health(system, service))
        may_end.set()
        await call
        await draining
    serving, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert statuses == [not_serving, serving, not_serving]


async def test_a_caller_who_leaves_a_stream_ends_its_method(caplog: pytest.LogCaptureFixture) -> None:
    ended = asyncio.Event()

    async def endless(
        requests: AsyncIterator[InferStreamRequest], context: Context
    ) -> AsyncIterator[InferStreamResponse]:
        try:
            yield InferStreamResponse(request_id=(await anext(requests)).request.request_id)
            await asyncio.Event().wait()
        finally:
            ended.set()

    async with _serving(caplog, {"InferStream": endless}) as system:
        call = system.stub.InferStream(iter([InferStreamRequest()]), timeout=10)
        await call.read()
        call.cancel()
        await asyncio.wait_for(ended.wait(), 10)


async def _seen_call(caplog: pytest.LogCaptureFixture, **options: Any) -> Call:
    seen = []

    async def infer(request: InferRequest, context: Context) -> InferResponse:
        seen.append(call_of(context))
        return InferResponse()

    async with _serving(caplog, {"Infer": infer}) as system:
        await system.stub.Infer(InferRequest(), **options)
    return seen[0]


async def test_a_calls_deadline_is_put_on_this_processs_clock(caplog: pytest.LogCaptureFixture) -> None:
    before_s = time.monotonic()
    deadline_s = (await _seen_call(caplog, timeout=60)).deadline_s
    assert deadline_s is not None
    # A minute, as the client's clock read it; a tenth of a second is for gRPC, which rounds to milliseconds.
    assert before_s + 59.9 < deadline_s < time.monotonic() + 60.1


async def test_a_call_without_a_deadline_has_none(caplog: pytest.LogCaptureFixture) -> None:
    assert (await _seen_call(caplog)).deadline_s is None


async def test_a_calls_trace_context_is_read(caplog: pytest.LogCaptureFixture) -> None:
    metadata = (("traceparent", f"00-{0xAA:032x}-{0xBB:016x}-01"), ("tracestate", "v=1"), ("other", "x"))
    call = await _seen_call(caplog, metadata=metadata)
    assert call.trace == SpanContext(0xAA, 0xBB, True, "v=1")


async def test_a_port_in_use_is_named_with_the_reason() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        life = _life(_settings(address))
        with pytest.raises(SetupError, match=rf"^--listen: cannot listen on {address}: Address already in use$"):
            await life.listen()
        await life.stop()


@pytest.mark.parametrize("is_taken", [False, True])
async def test_a_door_that_listens_when_it_is_open_refuses_connections_until_then(
    caplog: pytest.LogCaptureFixture, is_taken: bool
) -> None:
    door = GrpcDoor(_settings(), [_SERVICE.full_name], listens_when_open=True)
    life = Life("gateway", _settings(), [door])
    await life.listen()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", door.port)
    with socket.socket() as taker:
        if is_taken:  # Linux lets a socket have an address on which another does not listen
            taker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taker.bind(("127.0.0.1", door.port))
            taker.listen()
            with pytest.raises(SetupError, match=f"^--listen: cannot listen on {_settings().listen}: Address already"):
                life.open(partial(door.open, []))
        else:
            with caplog.at_level(logging.INFO, logger="neuronpipe"):
                life.open(partial(door.open, _some({"Infer": _empty})))
            assert [record.message for record in caplog.records] == ["listening", "ready"]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{door.port}") as channel:
                await InferenceServiceStub(channel).Infer(InferRequest(), timeout=_LIMIT_S)
    await life.stop()


# 192.0.2.0/24 is set aside for documentation (RFC 5737), .invalid for names that do not exist (RFC 2606).
@pytest.mark.parametrize("address", ["192.0.2.1:50050", "name.invalid:50050", "name..invalid:50050"])
async def test_an_address_that_cannot_be_used_is_named(address: str) -> None:
    life = _life(_settings(address))
    with pytest.raises(SetupError, match=rf"^--listen: cannot listen on {address}: ."):
        await life.listen()
    await life.stop()


async def test_draining_ends_an_idle_stream_after_its_answers(caplog: pytest.LogCaptureFixture) -> None:
    async with _serving(caplog, {"InferStream": _echo}) as system:
        call = system.stub.InferStream(timeout=10)
        await call.write(InferStreamRequest(request=InferRequest(request_id="before")))
        answer = await call.read()
        # The grace is long; an idle stream that held it would run into the test's own limit.
        await asyncio.wait_for(system.life.drain(60), 10)

        assert answer.request_id == "before"
        failure = await _failure(call.read())
        assert (failure.code(), failure.details()) == (grpc.StatusCode.UNAVAILABLE, "the gateway service is stopping")


async def test_draining_waits_until_a_large_answer_has_left(caplog: pytest.LogCaptureFixture) -> None:
    size = 3 << 20
    began = asyncio.Event()

    async def infer(request: InferRequest, context: Context) -> InferResponse:
        began.set()
        return InferResponse(model="x" * size)

    async with _serving(caplog, {"Infer": infer}) as system:
        call = asyncio.ensure_future(system.stub.Infer(InferRequest(), timeout=30))
        await began.wait()
        await system.life.drain(30)

        assert len((await call).model) == size


async def test_a_watch_of_the_health_does_not_hold_up_the_end(caplog: pytest.LogCaptureFixture) -> None:
    async with _serving(caplog, {}) as system:
        watch = health_pb2_grpc.HealthStub(system.channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()

        await asyncio.wait_for(system.life.drain(60), 10)


async def test_a_channel_that_pings_while_idle_is_not_cut_off(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A second is as often as gRPC pings. A server cuts off at the third ping too many.
    monkeypatch.setattr(rpc_client, "_PING_INTERVAL_MS", rpc_client._PING_INTERVAL_MS // 20)

    async with _serving(caplog, {}) as system, rpc_client.open_channel(system.address) as channel:
        await channel.channel_ready()

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 6)


async def test_a_connection_whose_caller_vanished_is_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_server, "_KEEPALIVE_S", 1.0)
    monkeypatch.setattr(http2_server, "_PING_LIMIT_S", 0.5)
    async with _serving(caplog, {}) as system:
        host, _, port = system.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        # The preface and empty settings of HTTP/2 (RFC 9113, 3.4 and 6.5); then the caller answers nothing any more.
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00")
        async with asyncio.timeout(_LIMIT_S):
            with contextlib.suppress(ConnectionResetError):
                while await reader.read(1 << 16):
                    pass
        writer.close()


async def _echo(requests: AsyncIterator[InferStreamRequest], context: Context) -> AsyncIterator[InferStreamResponse]:
    async for request in requests:
        yield InferStreamResponse(request_id=request.request.request_id)


async def _empty(request: InferRequest, context: Context) -> InferResponse:
    return InferResponse()


async def test_callers_are_asked_to_connect_again_and_no_call_fails(caplog: pytest.LogCaptureFixture) -> None:
    connections = set()

    async def infer(request: InferRequest, context: Context) -> InferResponse:
        connections.add(context.peer)
        return InferResponse()

    async with _serving(caplog, {"Infer": infer}, max_connection_age_s=0.5) as system:
        async with asyncio.timeout(_LIMIT_S):
            while len(connections) < 3:  # a call that failed would raise
                await asyncio.gather(*(_infer(system) for _ in range(10)))


async def test_a_stream_outlives_the_age_of_its_connection_until_the_grace(caplog: pytest.LogCaptureFixture) -> None:
    ages = {"max_connection_age_s": 0.3, "max_connection_age_grace_s": 60}
    async with _serving(caplog, {"InferStream": _echo}, **ages) as system:
        stream = system.stub.InferStream(timeout=60)
        await stream.write(InferStreamRequest(request=InferRequest(request_id="before")))
        assert (await stream.read()).request_id == "before"
        async with asyncio.timeout(_LIMIT_S):
            await system.channel.wait_for_state_change(
                grpc.ChannelConnectivity.READY
            )  # the server asked it to connect again
        await stream.write(InferStreamRequest(request=InferRequest(request_id="after")))
        assert (await stream.read()).request_id == "after"
        stream.cancel()


def test_callers_connect_again_from_time_to_time_and_gateways_keep_their_streams_to_stages() -> None:
    gateways = (PipelineProcessSettings, AllSettings)
    ages_s = {kind: fields_of(kind)["max_connection_age_s"].default for kind in gateways}
    assert all(0 < age_s <= 600 for age_s in ages_s.values())
    stages = (TokenizerSettings, NeuronExecutorSettings, PostprocessorSettings)
    assert [fields_of(kind)["max_connection_age_s"].default for kind in stages] == [0, 0, 0]


async def test_a_connection_without_an_age_stays(caplog: pytest.LogCaptureFixture) -> None:
    async with _serving(caplog, {"Infer": _empty}, max_connection_age_s=0) as system:
        await _infer(system)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(system.channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 1)


async def test_a_call_is_refused_before_its_message_is_read(caplog: pytest.LogCaptureFixture) -> None:
    async with _listening(caplog) as system:
        # A caller that begins a call and sends no message.
        silent = system.channel.stream_stream(f"/{_SERVICE.full_name}/Infer")(timeout=_LIMIT_S)
        failure = await _failure(silent.read())
    assert (failure.code(), failure.details()) == (grpc.StatusCode.UNAVAILABLE, "the gateway service is starting")


@pytest.mark.parametrize("method", ["Infer", "Generate"])
async def test_a_call_for_which_there_is_no_room_is_refused_before_its_message_is_read(
    caplog: pytest.LogCaptureFixture, method: str
) -> None:
    asked: list[float | None] = []

    def check_room(remaining_s: float | None) -> None:
        asked.append(remaining_s)
        raise Overloaded("no room", retry_after_s=1)

    async with _serving(caplog, {"Infer": _empty, "Generate": _echo}) as system:
        system.life.in_flight.add_check(check_room)
        silent = system.channel.stream_stream(f"/{_SERVICE.full_name}/{method}")(timeout=_LIMIT_S)
        failure = await _failure(silent.read())
    assert (failure.code(), failure.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
    assert asked[0]
    assert 0 < asked[0] < _LIMIT_S + 1  # gRPC rounds up


async def test_a_call_without_a_message_is_the_callers_fault(caplog: pytest.LogCaptureFixture) -> None:
    async with _serving(caplog, {"Infer": _empty}) as system:
        call = system.channel.stream_stream(f"/{_SERVICE.full_name}/Infer")(iter([]), timeout=_LIMIT_S)
        assert (await _failure(call.read())).code() is grpc.StatusCode.INVALID_ARGUMENT


def _rpc(name: str, **streaming: bool) -> Rpc:
    return Rpc(
        f"/test.Numbers/{name}", "test.Number", decode=int, encode=lambda number: str(number).encode(), **streaming
    )


async def _double(number: int, context: Context) -> int:
    return 2 * number


async def _count(number: int, context: Context) -> AsyncIterator[int]:
    for counted in range(number):
        yield counted


async def _sum(numbers: AsyncIterator[int], context: Context) -> int:
    return sum([number async for number in numbers])


async def _running_sum(numbers: AsyncIterator[int], context: Context) -> AsyncIterator[int]:
    total = 0
    async for number in numbers:
        total += number
        yield total


_NUMBERS: RpcHandlers = [
    (_rpc("Double"), _double),
    (_rpc("Count", server_streaming=True), _count),
    (_rpc("Sum", client_streaming=True), _sum),
    (_rpc("RunningSum", client_streaming=True, server_streaming=True), _running_sum),
]


@asynccontextmanager
async def _channel_to(
    caplog: pytest.LogCaptureFixture, services: Sequence[str], handlers: RpcHandlers
) -> AsyncIterator[Any]:
    """A channel to a door with these services and handlers."""
    door = GrpcDoor(_settings(), services)
    life = Life("gateway", _settings(), [door])
    with caplog.at_level(logging.INFO, logger="neuronpipe"):
        await life.listen()
    life.open(partial(door.open, handlers))
    async with grpc.aio.insecure_channel(caplog.records[-1].__dict__["fields"]["address"]) as channel:
        yield channel
    await life.stop()


async def test_all_four_kinds_of_rpcs_are_answered_at_every_door_of_a_process(caplog: pytest.LogCaptureFixture) -> None:
    doors = [GrpcDoor(_settings(), ["test.Numbers"]) for _ in range(2)]
    life = Life("gateway", _settings(), doors)
    with caplog.at_level(logging.INFO, logger="neuronpipe"):
        await life.listen()
    addresses = [record.__dict__["fields"]["address"] for record in caplog.records if record.message == "listening"]

    def open_doors() -> None:
        for door in doors:
            door.open(_NUMBERS)

    life.open(open_doors)
    assert len(set(addresses)) == 2
    for address in addresses:
        async with grpc.aio.insecure_channel(address) as opened:
            channel: Any = opened
            assert await channel.unary_unary("/test.Numbers/Double")(b"21", timeout=_LIMIT_S) == b"42"
            found = [message async for message in channel.unary_stream("/test.Numbers/Count")(b"3", timeout=_LIMIT_S)]
            assert found == [b"0", b"1", b"2"]
            assert await channel.stream_unary("/test.Numbers/Sum")(iter([b"1", b"2"]), timeout=_LIMIT_S) == b"3"
            sums = channel.stream_stream("/test.Numbers/RunningSum")(iter([b"1", b"2"]), timeout=_LIMIT_S)
            assert [message async for message in sums] == [b"1", b"3"]
    await life.stop()


async def test_an_rpc_of_another_path_is_unimplemented(caplog: pytest.LogCaptureFixture) -> None:
    async with _serving(caplog, {"Infer": _empty}) as system:
        failure = await _failure(system.channel.unary_unary("/other.Service/Infer")(b"", timeout=_LIMIT_S))
    assert failure.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_methods_of_one_name_in_two_services_have_their_own_handlers(caplog: pytest.LogCaptureFixture) -> None:
    async def halve(number: int, context: Context) -> int:
        return number // 2

    renamed = replace(_rpc("Double"), path="/test.Others/Double")
    handlers: RpcHandlers = [(_rpc("Double"), _double), (renamed, halve)]
    async with _channel_to(caplog, ["test.Numbers", "test.Others"], handlers) as channel:
        answers = [
            await channel.unary_unary(f"/test.{service}/Double")(b"8", timeout=_LIMIT_S)
            for service in ("Numbers", "Others")
        ]
    assert answers == [b"16", b"4"]


async def test_a_message_class_of_the_same_wire_format_replaces_descriptors(caplog: pytest.LogCaptureFixture) -> None:
    rpc = replace(Rpc.of(_SERVICE.methods_by_name["Infer"]), decode=bytes)
    seen = []

    async def infer(request: bytes, context: Context) -> InferResponse:
        seen.append(request)
        return InferResponse()

    async with _channel_to(caplog, [_SERVICE.full_name], [(rpc, infer)]) as channel:
        await InferenceServiceStub(channel).Infer(InferRequest(model="a"), timeout=_LIMIT_S)
    assert seen == [b"\x0a\x01a"]  # field 1, one byte long


async def test_one_connection_does_not_take_all_calls_of_a_process(caplog: pytest.LogCaptureFixture) -> None:
    began, released = asyncio.Event(), asyncio.Event()
    handlers = {"Infer": _holding(began, released), "InferStream": _echo}
    async with _serving(caplog, handlers, max_connection_calls=2) as system:
        held = [asyncio.create_task(_infer(system)) for _ in range(5)]
        await began.wait()
        assert system.life.in_flight.count <= 2
        async with grpc.aio.insecure_channel(system.address, options=[("grpc.use_local_subchannel_pool", 1)]) as fresh:
            stream = InferenceServiceStub(fresh).InferStream(iter([InferStreamRequest()]), timeout=_LIMIT_S)
            assert [answer async for answer in stream] == [InferStreamResponse()]
        assert system.life.in_flight.count <= 2
        released.set()
        await asyncio.gather(*held)
