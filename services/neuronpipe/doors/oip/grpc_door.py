"""The Open Inference Protocol over gRPC: its messages to tensors and back."""

from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn

from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.json_format import ParseDict

from neuronpipe.api.oip.v2 import open_inference_pb2 as messages
from neuronpipe.core.calls import Call, told_error
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.names import Spans
from neuronpipe.doors.oip.service import (
    NO_SHARED_MEMORY,
    SETTINGS_OF_LOGS,
    SETTINGS_OF_TRACES,
    RowSpans,
    TensorRequest,
    TensorResponse,
    TensorService,
)
from neuronpipe.doors.oip.tensors import MAX_TENSORS, GivenTensor, Parameter, shown
from neuronpipe.gateway.many import answer_stream
from neuronpipe.rpc.rpcs import Context, Rpc, RpcHandler, RpcHandlers, call_of, handlers_of, message_classes
from neuronpipe.rpc.transport import CallEnd

OIP_SERVICE = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_UNIMPLEMENTED = 12  # google.rpc.Code
_WORK = ("ModelInfer", "ModelStreamInfer")
# Rpcs of Triton's that are not in our proto, and why.
_MISSING = {
    "TraceSetting": SETTINGS_OF_TRACES,
    "LogSettings": SETTINGS_OF_LOGS,
    **{
        f"{kind}SharedMemory{verb}": NO_SHARED_MEMORY
        for kind in ("System", "Cuda")
        for verb in ("Status", "Register", "Unregister")
    },
}
# The fields of InferTensorContents by datatype; the other datatypes of our inputs have none.
_CONTENTS = {
    "BYTES": "bytes_contents",
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "UINT8": "uint_contents",
}
_SHARED_MEMORY, _CLASSIFICATION = "shared_memory_region", "classification"
_INFER = RowSpans(Spans.OIP_INFER, Spans.OIP_INFER)
_STREAM = RowSpans(Spans.OIP_STREAM, Spans.OIP_STREAM)


class OipDoor:
    """Converts messages to calls of the service and back."""

    def __init__(self, service: TensorService, max_stream_in_flight: int) -> None:
        self._service = service
        self._max_stream_in_flight = max_stream_in_flight

    def handlers(self) -> RpcHandlers:
        """The service, and Triton's rpcs that it lacks, whose handlers say why."""
        service = self._service
        told: dict[str, Callable[[Any], Any]] = {
            "ServerLive": lambda message: {"live": True},
            "ServerReady": lambda message: {"ready": service.is_ready()},
            "ModelReady": lambda message: {"ready": service.is_model_ready(message.name, message.version)},
            "ServerMetadata": lambda message: service.server_metadata(),
            "ModelMetadata": lambda message: service.model_metadata(message.name, message.version),
            "ModelConfig": lambda message: {"config": service.model_config(message.name, message.version)},
            "ModelStatistics": lambda message: service.statistics(message.name, message.version),
            "RepositoryIndex": lambda message: {"models": service.index(only_ready=message.ready)},
        }
        methods = OIP_SERVICE.methods_by_name
        handlers: dict[str, RpcHandler] = {
            "ModelInfer": self.model_infer,
            "ModelStreamInfer": self.model_stream_infer,
            "RepositoryModelLoad": self.load,
            "RepositoryModelUnload": self.unload,
            **{name: _told(methods[name], tell) for name, tell in told.items()},
        }
        return [
            *handlers_of(OIP_SERVICE, handlers, lambda method: Rpc.of(method, is_work=method.name in _WORK)),
            *(
                (Rpc(f"/{OIP_SERVICE.full_name}/{name}", name, bytes, bytes), partial(_refuse, reason))
                for name, reason in _MISSING.items()
            ),
        ]

    async def model_infer(self, message: messages.ModelInferRequest, context: Context) -> messages.ModelInferResponse:
        """ModelInfer."""
        response = messages.ModelInferResponse()
        _write(await self._service.infer(_read(message), call_of(context), _INFER), response)
        return response

    async def model_stream_infer(
        self, requests: AsyncIterable[messages.ModelInferRequest], context: Context
    ) -> AsyncIterator[messages.ModelStreamInferResponse]:
        """ModelStreamInfer."""
        answer = partial(self._answers, call_of(context))
        async for response in answer_stream(requests, answer, self._max_stream_in_flight):
            yield response

    async def load(
        self, message: messages.RepositoryModelLoadRequest, context: Context
    ) -> messages.RepositoryModelLoadResponse:
        """RepositoryModelLoad."""
        await self._service.load(message.model_name, message.parameters, call_of(context))
        return messages.RepositoryModelLoadResponse()

    async def unload(
        self, message: messages.RepositoryModelUnloadRequest, context: Context
    ) -> messages.RepositoryModelUnloadResponse:
        """RepositoryModelUnload."""
        await self._service.unload(message.model_name, call_of(context))
        return messages.RepositoryModelUnloadResponse()

    async def _answers(
        self, call: Call, message: messages.ModelInferRequest
    ) -> AsyncIterator[messages.ModelStreamInferResponse]:
        """The responses to one request of a stream. An error of its own does not end the stream."""
        try:
            async with aclosing(self._service.stream(_read(message), call, _STREAM)) as answers:
                async for answer in answers:
                    response = messages.ModelStreamInferResponse()
                    _write(answer, response.infer_response)
                    response.infer_response.parameters["triton_final_response"].bool_param = answer.is_last
                    yield response
        except Exception as error:
            response = messages.ModelStreamInferResponse(error_message=told_error(error, call).message)
            response.infer_response.id, response.infer_response.model_name = message.id, message.model_name
            response.infer_response.parameters["triton_final_response"].bool_param = True
            yield response


def _told(method: MethodDescriptor, tell: Callable[[Any], Any]) -> RpcHandler:
    _, response = message_classes(method)

    async def answer(message: Any, context: Context) -> Any:
        return ParseDict(tell(message), response())

    return answer


async def _refuse(reason: str, message: bytes, context: Context) -> NoReturn:
    raise CallEnd(_UNIMPLEMENTED, reason)


def _read(message: messages.ModelInferRequest) -> TensorRequest:
    """A request. Raises InvalidInput."""
    for name, count in (
        ("inputs", len(message.inputs)),
        ("outputs", len(message.outputs)),
        ("parameters", len(message.parameters)),
    ):
        if count > MAX_TENSORS:
            raise InvalidInput(name, f"{count} of them, the limit is {MAX_TENSORS}")
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidInput("raw_input_contents", f"{len(raw)} entries, there are {len(message.inputs)} inputs")
    inputs = [_given(tensor, raw[place] if raw else None) for place, tensor in enumerate(message.inputs)]
    for output in message.outputs:
        if _SHARED_MEMORY in output.parameters or _CLASSIFICATION in output.parameters:
            raise InvalidInput("outputs", f"{_SHARED_MEMORY} and {_CLASSIFICATION} are not supported")
    return TensorRequest(
        message.model_name,
        message.model_version,
        message.id,
        {name: _value(name, one) for name, one in message.parameters.items()},
        inputs,
        [output.name for output in message.outputs],
    )


def _given(tensor: messages.ModelInferRequest.InferInputTensor, raw: bytes | None) -> GivenTensor:
    name, shape = tensor.name, tuple(tensor.shape)
    if _SHARED_MEMORY in tensor.parameters:
        raise InvalidInput("inputs", NO_SHARED_MEMORY)
    if raw is None:
        field = _CONTENTS.get(tensor.datatype)
        return GivenTensor(name, tensor.datatype, shape, values=getattr(tensor.contents, field) if field else ())
    if tensor.HasField("contents"):
        raise InvalidInput("raw_input_contents", f"input {shown(name)} also has contents")
    return GivenTensor(name, tensor.datatype, shape, raw)


def _value(name: str, parameter: messages.InferParameter) -> Parameter:
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None:
        raise InvalidInput("parameters", f"{shown(name)} has no value")
    value: Parameter = getattr(parameter, kind)
    return value


def _write(answer: TensorResponse, response: messages.ModelInferResponse) -> None:
    """In place: a message that is handed to another's constructor would be serialized and parsed once more."""
    response.model_name, response.model_version, response.id = answer.model, answer.version, answer.request_id
    for tensor in answer.outputs:
        output = response.outputs.add()
        output.name, output.datatype = tensor.name, tensor.datatype
        output.shape.extend(tensor.shape)
        response.raw_output_contents.append(tensor.raw())
