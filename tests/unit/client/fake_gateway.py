"""A gateway that answers streams at once and everything else when it is let."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc

from neuronpipe.api.v1.inference_pb2 import (
    GenerateResponse,
    GenerateStart,
    InferBatchRequest,
    InferBatchResponse,
    InferOutcome,
    InferRequest,
    InferResponse,
    InferStreamRequest,
    InferStreamResponse,
    StageTimings,
)
from neuronpipe.api.v1.inference_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from neuronpipe.api.v1.models_pb2 import GetModelRequest, GetModelResponse, ListModelsRequest, ListModelsResponse, Model
from neuronpipe.api.v1.models_pb2_grpc import ModelServiceServicer, add_ModelServiceServicer_to_server
from neuronpipe.api.v1.tasks_pb2 import TaskResult


class FakeGateway(InferenceServiceServicer, ModelServiceServicer):
    """Infer and InferBatch hold their calls until `answering` is set.

    Infer answers with `result`, or with an empty result of the request's task if `result` is of another task.

    A stream gets the `outcomes`, one for each request, the last one first.

    `has_begun`: an Infer came; `has_ended`: a stream ended.
    """

    def __init__(self) -> None:
        self.target = ""
        self.answering = threading.Event()
        self.has_begun = threading.Event()
        self.has_ended = threading.Event()
        self.requests: list[InferRequest] = []
        self.result = TaskResult()
        self.timings = StageTimings()
        self.outcomes: list[InferOutcome] = []
        self.models: list[Model] = []

    def Infer(self, request: InferRequest, context: grpc.ServicerContext) -> InferResponse:
        self.requests.append(request)
        self.has_begun.set()
        self.answering.wait(30)
        result, task = self.result, request.input.WhichOneof("task")
        if task and not result.HasField(task):
            result = TaskResult()
            getattr(result, task).SetInParent()
        return InferResponse(model=request.model, result=result, timings=self.timings)

    def ListModels(self, request: ListModelsRequest, context: grpc.ServicerContext) -> ListModelsResponse:
        return ListModelsResponse(models=self.models)

    def GetModel(self, request: GetModelRequest, context: grpc.ServicerContext) -> GetModelResponse:
        return GetModelResponse(model=self.models[0])

    def InferBatch(self, request: InferBatchRequest, context: grpc.ServicerContext) -> InferBatchResponse:
        self.answering.wait(30)
        return InferBatchResponse()

    def Generate(self, request: InferRequest, context: grpc.ServicerContext) -> Iterator[GenerateResponse]:
        """A start, and what Infer returns."""
        yield GenerateResponse(start=GenerateStart(model=request.model))
        yield GenerateResponse(response=self.Infer(request, context))

    def InferStream(
        self, request_iterator: Iterator[InferStreamRequest], context: grpc.ServicerContext
    ) -> Iterator[InferStreamResponse]:
        context.add_callback(self.has_ended.set)
        if self.outcomes:
            self.requests += (message.request for message in request_iterator)
            answers = zip(self.requests, self.outcomes, strict=True)
            for request, outcome in reversed(list(answers)):
                yield InferStreamResponse(request_id=request.request_id, outcome=outcome)
        for message in request_iterator:
            yield InferStreamResponse(request_id=message.request.request_id)


class _Health(grpc.GenericRpcHandler):
    """The health of a process that serves, which clients watch. The package of clients lacks its messages."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        if handler_call_details.method != "/grpc.health.v1.Health/Watch":
            return None
        return grpc.unary_stream_rpc_method_handler(self._watch)

    @staticmethod
    def _watch(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        has_ended = threading.Event()
        context.add_callback(has_ended.set)
        yield b"\x08\x01"  # HealthCheckResponse(status=SERVING)
        has_ended.wait()


@contextmanager
def byte_gateway(messages: Sequence[bytes]) -> Iterator[str]:
    """Runs a server that answers every call with these bytes and OK. Yields its target."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
            if "Stream" in handler_call_details.method:
                return grpc.stream_stream_rpc_method_handler(lambda requests, context: iter(messages))
            if "Generate" in handler_call_details.method:
                return grpc.unary_stream_rpc_method_handler(lambda request, context: iter(messages))
            return grpc.unary_unary_rpc_method_handler(lambda request, context: messages[0])

    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads, handlers=[_Health(), Handler()])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            server.stop(0).wait()


@contextmanager
def fake_gateway() -> Iterator[FakeGateway]:
    """A gateway on a free port."""
    gateway = FakeGateway()
    with ThreadPoolExecutor(16) as threads:
        server = grpc.server(threads, handlers=[_Health()])
        add_InferenceServiceServicer_to_server(gateway, server)
        add_ModelServiceServicer_to_server(gateway, server)
        gateway.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield gateway
        finally:
            gateway.answering.set()
            server.stop(0).wait()
