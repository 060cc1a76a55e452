"""The protocol's service over stages that a test wrote, called with messages of gRPC."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any

import numpy as np

from neuronpipe.api.oip.v2.open_inference_pb2 import ModelInferRequest, ModelInferResponse, ModelStreamInferResponse
from neuronpipe.api.v1.tasks_pb2 import FinishReason, TaskInput, TaskResult
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.core.generated import TokenSink
from neuronpipe.core.items import EncodedInput, ExecuteItem, PostprocessItem, Prediction, Stages, TokenizeItem
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import Packed, TensorSets, pack_result
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.doors.oip.grpc_door import OipDoor
from neuronpipe.doors.oip.service import TensorService
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.tasks.text_generation import part_arrays, window_arrays
from tests.servers.door import models_of
from tests.suite.constants import with_constants

# What becomes of an input.
Answer = Callable[[TaskInput], TaskResult | NeuronpipeError]
_SERVICE = "/inference.GRPCInferenceService/"
_DTYPES = {"FP32": "<f4", "FP64": "<f8", "UINT32": "<u4"}


class Context:
    """A call of gRPC: no deadline, no metadata."""

    deadline_s = None
    metadata = ()


class Server:
    """Stages that keep what they are asked. A model's outputs are the ids of the tokens, or where they have no axis of
    tokens the sum of the ids, or of an image's pixels.
    """

    def __init__(self, specs: Iterable[ModelSpec], answer: Answer | None = None, **limits: Any) -> None:
        self._answer = answer or (lambda given: TaskResult())
        specs = list(specs)
        self._specs = {spec.name: spec for spec in specs}
        self.inputs: list[TaskInput] = []
        self.executed: list[ExecuteItem] = []
        self.tokenized: list[TokenizeItem] = []
        self.is_ready = True
        self.telemetry = Telemetry()
        settings = with_constants(PipelineSettings, **limits)
        models = models_of(specs, self.telemetry)
        stages = Stages(self._tokenize, self._execute, self._postprocess)
        self.gateway = Gateway(Pipeline(models, stages, settings, self.telemetry), Catalog(models))
        self.service = TensorService(self.gateway, settings, self.telemetry.meters, lambda: self.is_ready)
        self.rpcs = OipDoor(self.service, settings.max_stream_in_flight).handlers()
        self.handlers: dict[str, Any] = {rpc.path: handler for rpc, handler in self.rpcs}

    async def call(self, rpc: str, message: Any) -> Any:
        return await self.handlers[_SERVICE + rpc](message, Context())

    async def infer(self, request: ModelInferRequest) -> ModelInferResponse:
        response: ModelInferResponse = await self.call("ModelInfer", request)
        return response

    async def stream(self, requests: Iterable[ModelInferRequest]) -> list[ModelStreamInferResponse]:
        async def messages() -> AsyncIterator[ModelInferRequest]:
            for request in requests:
                yield request

        return [response async for response in self.handlers[_SERVICE + "ModelStreamInfer"](messages(), Context())]

    async def _tokenize(self, item: TokenizeItem) -> EncodedInput:
        self.tokenized.append(item)
        sequences = TensorSets(arrays=[{"input_ids": np.ones(3, np.int32)}])
        return EncodedInput(sequences, TensorSets(arrays=window_arrays([1, 1, 1])), tokens=3)

    async def _execute(self, item: ExecuteItem, sink: TokenSink | None = None) -> Prediction:
        self.executed.append(item)
        await asyncio.sleep(0)  # others come meanwhile
        spec = self._specs[item.model.name]
        outputs = [_outputs(spec, array) for array in item.sequences.arrays]
        if item.options:
            outputs = list(part_arrays([7, 6], FinishReason.FINISH_REASON_LENGTH))
        return Prediction(TensorSets(arrays=outputs), queue_ns=11, compute_ns=22, batch_size=1)

    async def _postprocess(self, item: PostprocessItem) -> Packed[TaskResult]:
        input = item.input.message
        self.inputs.append(input)
        outcome = self._answer(input)
        if isinstance(outcome, NeuronpipeError):
            raise outcome
        return pack_result(outcome)


def _outputs(spec: ModelSpec, arrays: Arrays) -> Arrays:
    numbers = next(iter(arrays.values())).astype(np.float32)
    outputs: dict[str, Array] = {}
    for output in spec.outputs:
        sizes = [axis for axis in output.axes if axis != "tokens"]
        if len(sizes) < len(output.axes):
            outputs[output.name] = np.multiply.outer(numbers, np.ones(sizes, np.float32))
        else:
            outputs[output.name] = np.full(sizes, numbers.sum(), np.float32)
    return outputs


def asks(model: str, parameters: dict[str, Any] | None = None, **inputs: Any) -> ModelInferRequest:
    """A request with inputs in raw form: arrays, or texts in lists of lists."""
    request = ModelInferRequest(model_name=model)
    for name, value in (parameters or {}).items():
        kind = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}[type(value)]
        setattr(request.parameters[name], kind, value)
    for name, value in inputs.items():
        array = np.asarray(value) if isinstance(value, np.ndarray) else np.array(value, object)
        datatype = {"int64": "INT64", "int32": "INT32", "uint8": "UINT8", "object": "BYTES"}[array.dtype.name]
        request.inputs.add(name=name, datatype=datatype, shape=array.shape)
        request.raw_input_contents.append(raw_bytes(array))
    return request


def raw_bytes(array: Any) -> bytes:
    if array.dtype != object:
        return bytes(array.tobytes())
    encoded = [text if isinstance(text, bytes) else text.encode() for text in array.ravel()]
    return b"".join(len(text).to_bytes(4, "little") + text for text in encoded)


def outputs_of(response: ModelInferResponse) -> dict[str, Any]:
    """The outputs as lists of lists, read as tritonclient does."""
    read = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            texts, at = [], 0
            while at < len(raw):
                end = at + 4 + int.from_bytes(raw[at : at + 4], "little")
                texts.append(raw[at + 4 : end].decode())
                at = end
            read[output.name] = np.array(texts, object).reshape(output.shape).tolist()
        else:
            read[output.name] = np.frombuffer(raw, _DTYPES[output.datatype]).reshape(output.shape).tolist()
    return read
