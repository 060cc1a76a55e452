"""The Open Inference Protocol over gRPC: its messages to tensors and back."""

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sized
from contextlib import aclosing
from functools import partial
from typing import Any, NoReturn

from google.protobuf.json_format import ParseDict

from neuronpipe.api.oip.v2 import open_inference_pb2 as messages
from neuronpipe.core.calls import Call, to_caller_error
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.names import Spans
from neuronpipe.doors.oip import service as oip
from neuronpipe.doors.oip.options import DATA_SIZE, IS_BINARY, check_tensor_parameters
from neuronpipe.doors.oip.service import RowSpans, TensorRequest, TensorResponse, TensorService
from neuronpipe.doors.oip.tensors import MAX_TENSORS, GivenTensor, Parameter, shown
from neuronpipe.gateway.many import answer_stream
from neuronpipe.rpc.rpcs import Context, Rpc, RpcHandler, RpcHandlers, call_of, handlers_of, message_classes
from neuronpipe.rpc.transport import CallEnd

OIP_SERVICE = messages.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_UNIMPLEMENTED = 12  # google.rpc.Code
_WORK = ("ModelInfer", "ModelStreamInfer")
_MEMORY = [f"{kind}SharedMemory{verb}" for kind in ("System", "Cuda") for verb in ("Status", "Register", "Unregister")]
# Rpcs that only Triton has, and the reasons why this door does not serve them.
_MISSING = {
    "TraceSetting": oip.SETTINGS_OF_TRACES,
    "LogSettings": oip.SETTINGS_OF_LOGS,
    **dict.fromkeys(_MEMORY, oip.NO_SHARED_MEMORY),
}
# The field of InferTensorContents for each datatype. The other datatypes of our inputs have no field, and come as raw
# bytes.
_CONTENTS = {"BYTES": "bytes_contents", "INT64": "int64_contents", "INT32": "int_contents", "UINT8": "uint_contents"}
_SHARED_MEMORY, _CLASSIFICATION = "shared_memory_region", "classification"
_INFER = RowSpans(Spans.OIP_INFER, Spans.OIP_INFER)
_STREAM = RowSpans(Spans.OIP_STREAM, Spans.OIP_STREAM)


class OipDoor:
    """Converts messages to calls of the service and back."""

    def __init__(self, service: TensorService, max_stream_in_flight: int) -> None:
        self._service, self._max_stream_in_flight = service, max_stream_in_flight

    def handlers(self) -> RpcHandlers:
        """Returns the rpcs of the protocol, and Triton's rpcs that are not served, whose handlers say why."""
        service = self._service

        def load(message: messages.RepositoryModelLoadRequest, call: Call) -> Awaitable[None]:
            return service.load(message.model_name, message.parameters, call)

        def unload(message: messages.RepositoryModelUnloadRequest, call: Call) -> Awaitable[None]:
            return service.unload(message.model_name, call)

        facts: dict[str, Callable[[Any], Any]] = {
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
            "ModelInfer": self._model_infer,
            "ModelStreamInfer": self._model_stream_infer,
            "RepositoryModelLoad": partial(_control, load, messages.RepositoryModelLoadResponse()),
            "RepositoryModelUnload": partial(_control, unload, messages.RepositoryModelUnloadResponse()),
            **{name: partial(_answer_fact, fact, message_classes(methods[name])[1]) for name, fact in facts.items()},
        }
        return [
            *handlers_of(OIP_SERVICE, handlers, lambda method: Rpc.of(method, is_work=method.name in _WORK)),
            *(
                (Rpc(f"/{OIP_SERVICE.full_name}/{name}", name, bytes, bytes), partial(_refuse, reason))
                for name, reason in _MISSING.items()
            ),
        ]

    async def _model_infer(self, message: messages.ModelInferRequest, context: Context) -> messages.ModelInferResponse:
        response = messages.ModelInferResponse()
        _write(await self._service.infer(_read(message), call_of(context), _INFER), response)
        return response

    def _model_stream_infer(
        self, requests: AsyncIterable[messages.ModelInferRequest], context: Context
    ) -> AsyncIterator[messages.ModelStreamInferResponse]:
        return answer_stream(requests, partial(self._answers, call_of(context)), self._max_stream_in_flight)

    async def _answers(
        self, call: Call, message: messages.ModelInferRequest
    ) -> AsyncIterator[messages.ModelStreamInferResponse]:
        """Yields the responses to one request of a stream. An error of the request does not end the stream."""
        try:
            async with aclosing(self._service.stream(_read(message), call, _STREAM)) as answers:
                async for answer in answers:
                    response = messages.ModelStreamInferResponse()
                    _write(answer, response.infer_response)
                    response.infer_response.parameters["triton_final_response"].bool_param = answer.is_last
                    yield response
        except Exception as error:
            response = messages.ModelStreamInferResponse(error_message=to_caller_error(error, call).message)
            response.infer_response.id, response.infer_response.model_name = message.id, message.model_name
            response.infer_response.parameters["triton_final_response"].bool_param = True
            yield response


async def _answer_fact(fact: Callable[[Any], Any], response: type[Any], message: Any, context: Context) -> Any:
    return ParseDict(fact(message), response())


async def _control(
    control: Callable[[Any, Call], Awaitable[None]], response: Any, message: Any, context: Context
) -> Any:
    await control(message, call_of(context))
    return response


async def _refuse(reason: str, message: bytes, context: Context) -> NoReturn:
    raise CallEnd(_UNIMPLEMENTED, reason)


def _read(message: messages.ModelInferRequest) -> TensorRequest:
    parts: dict[str, Sized] = {"inputs": message.inputs, "outputs": message.outputs, "parameters": message.parameters}
    for name, part in parts.items():
        if len(part) > MAX_TENSORS:
            raise InvalidInput(name, f"{len(part)} of them, the limit is {MAX_TENSORS}")
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidInput("raw_input_contents", f"{len(raw)} entries, there are {len(message.inputs)} inputs")
    inputs = [_given(index, tensor, raw[index] if raw else None) for index, tensor in enumerate(message.inputs)]
    for index, output in enumerate(message.outputs):
        if _SHARED_MEMORY in output.parameters or _CLASSIFICATION in output.parameters:
            raise InvalidInput("outputs", f"{_SHARED_MEMORY} and {_CLASSIFICATION} are not supported")
        check_tensor_parameters(f"outputs[{index}]", _values(output.parameters), IS_BINARY)
    return TensorRequest(
        model=message.model_name,
        version=message.model_version,
        request_id=message.id,
        parameters=dict(_values(message.parameters)),
        inputs=inputs,
        outputs=[output.name for output in message.outputs],
    )


def _given(index: int, tensor: messages.ModelInferRequest.InferInputTensor, raw: bytes | None) -> GivenTensor:
    name, shape = tensor.name, tuple(tensor.shape)
    if _SHARED_MEMORY in tensor.parameters:
        raise InvalidInput("inputs", oip.NO_SHARED_MEMORY)
    check_tensor_parameters(f"inputs[{index}]", _values(tensor.parameters), DATA_SIZE)
    if raw is None:
        field = _CONTENTS.get(tensor.datatype)
        return GivenTensor(name, tensor.datatype, shape, values=getattr(tensor.contents, field) if field else ())
    if tensor.HasField("contents"):
        raise InvalidInput("raw_input_contents", f"input {shown(name)} also has contents")
    return GivenTensor(name, tensor.datatype, shape, raw)


def _values(parameters: Mapping[str, messages.InferParameter]) -> Iterator[tuple[str, Parameter]]:
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if kind is None:
            raise InvalidInput("parameters", f"{shown(name)} has no value")
        yield name, getattr(parameter, kind)


def _write(answer: TensorResponse, response: messages.ModelInferResponse) -> None:
    """Writes in place: a message that is passed to another's constructor would be serialized and parsed again."""
    response.model_name, response.model_version, response.id = answer.model, answer.version, answer.request_id
    for tensor in answer.outputs:
        output = response.outputs.add()
        output.name, output.datatype = tensor.name, tensor.datatype
        output.shape.extend(tensor.shape)
        response.raw_output_contents.append(tensor.raw())
