"""neuronpipe.api.v1 over gRPC: InferenceService and ModelService.

Inputs and results stay bytes where no stage of this process parses or makes them.
"""

import sys
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

from google.protobuf.descriptor import MethodDescriptor

from neuronpipe.api.forward.v1 import inference_pb2 as wire
from neuronpipe.api.v1 import inference_pb2, models_pb2
from neuronpipe.api.v1.inference_pb2 import GenerateStart
from neuronpipe.api.v1.models_pb2 import GetModelRequest, GetModelResponse, ListModelsRequest, ListModelsResponse
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from neuronpipe.core.packed import Packed
from neuronpipe.core.status import to_status
from neuronpipe.core.tracing import new_request_id
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.many import infer_batch, infer_stream
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.requests import GeneratedPart, InferenceOutcome, InferenceRequest, InferenceResult, TextEvent
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.rpc.rpcs import Rpc, RpcHandler, RpcHandlers, call_of, handlers_of

INFERENCE_SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
MODEL_SERVICE = models_pb2.DESCRIPTOR.services_by_name["ModelService"]


class NativeDoor:
    """Converts messages to calls of the pipeline and back."""

    def __init__(self, pipeline: Pipeline, catalog: Catalog, settings: PipelineSettings) -> None:
        self._pipeline, self._catalog, self._settings = pipeline, catalog, settings

    def handlers(self) -> RpcHandlers:
        """Returns the rpcs of both services."""

        def on(answer: Callable[[Any, Call], Awaitable[Any] | AsyncIterator[Any]]) -> RpcHandler:
            return lambda message, context: answer(message, call_of(context))

        inference = {
            "Infer": on(self.infer),
            "InferBatch": on(self.infer_batch),
            "InferStream": on(self.infer_stream),
            "Generate": on(self.generate),
        }
        models = {"ListModels": on(self.list_models), "GetModel": on(self.get_model)}
        return [*handlers_of(INFERENCE_SERVICE, inference, self._rpc), *handlers_of(MODEL_SERVICE, models)]

    def _rpc(self, method: MethodDescriptor) -> Rpc:
        """Returns an rpc of InferenceService. The texts and images of a batch or a stream have limits of their own."""
        has_one_input = method.name in ("Infer", "Generate")
        limit = max(self._settings.max_input_bytes, self._settings.max_image_bytes) if has_one_input else sys.maxsize
        return Rpc.of(method, wire.DESCRIPTOR, is_work=True, max_text_bytes=limit)

    async def infer(self, message: wire.InferRequest, call: Call) -> wire.InferResponse:
        response = wire.InferResponse()
        _write_result(await self._pipeline.infer(_read_request(message, call)), response)
        return response

    async def infer_batch(self, message: wire.InferBatchRequest, call: Call) -> wire.InferBatchResponse:
        """Answers InferBatch. Results beyond the limit of a response become errors."""
        count, limit = len(message.requests), self._settings.max_batch_items
        if not 1 <= count <= limit:
            raise InvalidInput("requests", f"{count} requests, a batch takes 1 to {limit}")
        outcomes = await infer_batch(
            self._pipeline, call, lambda shared: (_read_request(request, shared) for request in message.requests)
        )
        return _batch_response(outcomes, self._settings.max_batch_response_bytes)

    async def infer_stream(
        self, messages: AsyncIterable[wire.InferStreamRequest], call: Call
    ) -> AsyncIterator[wire.InferStreamResponse]:
        requests = (_read_request(message.request, call, is_id_required=True) async for message in messages)
        async for request_id, outcome in infer_stream(self._pipeline, requests, self._settings.max_stream_in_flight):
            response = wire.InferStreamResponse(request_id=request_id)
            _write_outcome(outcome, response.outcome)
            yield response

    async def generate(self, message: wire.InferRequest, call: Call) -> AsyncIterator[wire.GenerateResponse]:
        request = _read_request(message, call)
        async with aclosing(self._pipeline.generate(request)) as events:
            async for event in events:
                response = wire.GenerateResponse()
                _write_event(event, response)
                yield response

    async def list_models(self, message: ListModelsRequest, call: Call) -> ListModelsResponse:
        return self._catalog.list_models()

    async def get_model(self, message: GetModelRequest, call: Call) -> GetModelResponse:
        return self._catalog.get_model(message)


def _read_request(message: wire.InferRequest, call: Call, *, is_id_required: bool = False) -> InferenceRequest:
    request_id = message.request_id or ("" if is_id_required else new_request_id())
    return InferenceRequest(
        call.for_request(request_id, message.priority),
        message.model,
        message.version,
        Packed(TaskInput, data=message.input),
        message.cache_control,
    )


def _write_event(event: TextEvent, response: wire.GenerateResponse) -> None:
    if isinstance(event, GenerateStart):
        response.start.CopyFrom(event)
    elif isinstance(event, GeneratedPart):
        response.chunk.text, response.chunk.sequence = event.text, event.sequence
        response.chunk.token_ids.extend(event.token_ids)
        response.chunk.logprobs.extend(event.logprobs)
    else:
        _write_result(event, response.response)


def _write_result(result: InferenceResult, response: wire.InferResponse) -> None:
    """Writes in place: a message that is passed to another's constructor would be serialized and parsed again."""
    response.model, response.version = result.model.name, str(result.model.version)
    response.request_id = result.request_id
    response.result = result.result.data
    response.usage.CopyFrom(result.usage)
    response.timings.CopyFrom(result.timings)


def _write_outcome(outcome: InferenceOutcome, message: wire.InferOutcome) -> None:
    if isinstance(outcome, NeuronpipeError):
        message.error.CopyFrom(to_status(outcome))
    else:
        _write_result(outcome, message.response)


def _batch_response(outcomes: Iterable[InferenceOutcome], limit: int) -> wire.InferBatchResponse:
    """Returns the outcomes. Outcomes that would make the response larger than `limit` bytes become errors."""
    response, size_bytes = wire.InferBatchResponse(), 0
    for outcome in outcomes:
        message = response.outcomes.add()
        _write_outcome(outcome, message)
        outcome_bytes = message.ByteSize()
        if size_bytes + outcome_bytes <= limit:
            size_bytes += outcome_bytes
        else:
            problem = (
                f"the results are too large for one response, the limit is {limit} bytes; send fewer at once, "
                "or over a stream"
            )
            _write_outcome(InvalidInput("requests", problem), message)
    return response
