"""What a gateway says on the wire: to clients in other languages, to health probes and to reflection."""

from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferStreamRequest, InferStreamResponse
from neuronpipe.rpc.client import open_channel
from tests.callers.requests import classify

INFERENCE_SERVICE = "neuronpipe.api.v1.InferenceService"
OIP_SERVICE = "inference.GRPCInferenceService"


async def _refusal(target: str, message: bytes) -> grpc.aio.AioRpcError:
    async with open_channel(target) as channel:
        infer: Any = channel.unary_unary(f"/{INFERENCE_SERVICE}/Infer")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await infer(message)
    return caught.value


async def test_text_that_is_not_utf8_is_the_callers_fault(gateway_target: str) -> None:
    message = classify("Zürich").SerializeToString().replace("ü".encode(), b"\xff\xfe")
    refused = await _refusal(gateway_target, message)
    assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "not UTF-8" in str(refused.details())


async def test_error_carries_its_reason_and_the_field_at_fault(gateway_target: str) -> None:
    refused = await _refusal(gateway_target, classify("").SerializeToString())
    trailer = dict(refused.trailing_metadata() or ())
    status = Status.FromString(trailer["grpc-status-details-bin"])
    info, bad_request = ErrorInfo(), BadRequest()
    assert status.code == code_pb2.INVALID_ARGUMENT
    assert status.details[0].Unpack(info)
    assert status.details[1].Unpack(bad_request)
    assert (info.domain, info.reason) == ("neuronpipe", "INVALID_INPUT")
    (violation,) = bad_request.field_violations
    assert (violation.field, violation.description) == ("text", "is empty")


async def test_a_request_of_a_stream_needs_an_id(gateway_target: str) -> None:
    async with open_channel(gateway_target) as channel:
        infer_stream: Any = channel.stream_stream(f"/{INFERENCE_SERVICE}/InferStream")
        messages = [InferStreamRequest(request=classify("a")).SerializeToString()]
        answers = [InferStreamResponse.FromString(data) async for data in infer_stream(iter(messages))]
    assert [answer.outcome.error.message for answer in answers] == ["request_id: is required on a stream"]


async def test_broken_message_ends_a_stream_as_the_callers_fault_after_the_answers_to_what_came_before(
    gateway_target: str,
) -> None:
    good = [InferStreamRequest(request=classify("a", request_id=str(index))).SerializeToString() for index in range(3)]
    async with open_channel(gateway_target) as channel:
        infer_stream: Any = channel.stream_stream(f"/{INFERENCE_SERVICE}/InferStream")
        stream = infer_stream(iter([*good, b"\xff"]))
        answers = [InferStreamResponse.FromString(await stream.read()) for _ in good]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
    assert {answer.request_id for answer in answers} == {"0", "1", "2"}
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("service", ["", INFERENCE_SERVICE, "neuronpipe.api.v1.ModelService", OIP_SERVICE])
async def test_gateway_is_healthy(gateway_target: str, service: str) -> None:
    async with open_channel(gateway_target) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
    assert response.status == health_pb2.HealthCheckResponse.SERVING


async def test_health_of_an_unknown_service_is_not_found(gateway_target: str) -> None:
    async with open_channel(gateway_target) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_public_services(gateway_target: str, version: str) -> None:
    async with open_channel(gateway_target) as channel:
        reflect = channel.stream_stream(
            f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
            reflection_pb2.ServerReflectionRequest.SerializeToString,
            reflection_pb2.ServerReflectionResponse.FromString,
        )
        response: Any = await reflect(iter([reflection_pb2.ServerReflectionRequest(list_services="")])).read()
    names = {service.name for service in response.list_services_response.service}
    assert names >= {INFERENCE_SERVICE, OIP_SERVICE, "neuronpipe.api.v1.ModelService", "grpc.health.v1.Health"}


@pytest.mark.local_only
async def test_text_larger_than_a_message_may_be_is_refused(pipeline_processes: object, gateway_target: str) -> None:
    refused = await _refusal(gateway_target, classify("x" * (65 << 20)).SerializeToString())
    assert refused.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    # gRPC's own words name both sizes.
    assert str(64 << 20) in str(refused.details())


@pytest.mark.local_only
@pytest.mark.parametrize("service", ["tokenizer", "neuron-executor", "postprocessor"])
async def test_every_stage_has_health_and_reflection(
    pipeline_processes: dict[str, ServiceProcess], service: str
) -> None:
    async with open_channel(pipeline_processes[service].target) as channel:
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        listed = {service.name for service in (await call.read()).list_services_response.service}
    assert health.status == health_pb2.HealthCheckResponse.SERVING
    assert any(name.startswith("neuronpipe.api.v1.") for name in listed)


@pytest.mark.local_only
async def test_executor_holds_no_torch(pipeline_processes: dict[str, ServiceProcess]) -> None:
    maps = Path(f"/proc/{pipeline_processes['neuron-executor'].pid}/maps")
    if not maps.exists():
        pytest.skip("needs /proc to look into another process")
    assert "torch" not in maps.read_text()
