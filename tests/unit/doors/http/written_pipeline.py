"""A pipeline that answers with what a test wrote down, and keeps what it was asked."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import orjson

from neuronpipe.api.v1.inference_pb2 import StageTimings, Usage
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters, Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.names import Name, Spans
from neuronpipe.core.packed import pack_result
from neuronpipe.doors.http.app import App
from neuronpipe.doors.http.exchange import HEALTH_ROUTES, HttpHandlers
from neuronpipe.doors.http.handlers import http_handlers
from neuronpipe.doors.http.openapi import openapi_handlers
from neuronpipe.doors.http.wire import Exchange, Fields, RequestHead
from neuronpipe.doors.inference import Inference
from neuronpipe.doors.oip.service import TensorService
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.requests import GeneratedPart, InferenceRequest, InferenceResult, TextEvent
from neuronpipe.gateway.settings import PipelineSettings, parse_aliases
from neuronpipe.platform.process.in_flight import InFlight
from tests.servers.door import models_of
from tests.suite.constants import with_constants

# What becomes of an input.
Answer = Callable[[TaskInput], TaskResult | NeuronpipeError]


def parts_of(text: str) -> list[TextEvent]:
    """A text as it is generated, three characters in each part."""
    return [GeneratedPart(text[at : at + 3], [1]) for at in range(0, len(text), 3)]


class WrittenPipeline:
    """Takes every input for its model's; each costs 5 tokens, of which 2 more were cut off."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[InferenceRequest] = []
        self.parts: Sequence[TextEvent] = ()  # what `generate` says before the result
        self._answer = answer

    async def infer(self, request: InferenceRequest, span: Name) -> InferenceResult:
        self.asked.append(request)
        outcome = self._answer(request.input.message)
        if isinstance(outcome, NeuronpipeError):
            raise outcome
        timings = StageTimings(
            total_ns=9_000_000,
            preprocess_ns=1_000_000,
            predict_ns=5_000_000,
            postprocess_ns=1_000_000,
            predict_queue_ns=2_000_000,
            predict_compute_ns=3_000_000,
        )
        usage = Usage(tokens=5, truncated_tokens=2)
        return InferenceResult(
            request.call.request_id, ModelKey(request.model, 1), pack_result(outcome), usage, timings
        )

    async def generate(self, request: InferenceRequest, span: Name = Spans.GENERATE) -> AsyncGenerator[TextEvent, None]:
        for part in self.parts:
            yield part
        yield await self.infer(request, span)

    @contextmanager
    def observe_together(self, call: Call, span: Name) -> Iterator[Call]:
        yield call


class RecordedExchange(Exchange):
    """A request whose body comes in `parts`, then as `receive` says; records the messages of its answer.

    The caller leaves when `receive` returns None.
    """

    def __init__(
        self,
        method: str,
        path: str,
        fields: Sequence[tuple[bytes, bytes]] = (),
        parts: Sequence[bytes] = (),
        *,
        query: bytes = b"",
        is_whole: bool = True,
        receive: Callable[[], Awaitable[bytes | None]] | None = None,
    ) -> None:
        connection: Any = SimpleNamespace(peer="a caller", is_closing=False, regulate_reading=lambda: None)
        head = RequestHead(method, path, query, fields)
        super().__init__(connection, head, keeps_alive=True, is_awaited=False)
        self.sent: list[dict[str, Any]] = []
        self._parts, self._is_whole, self._receive_more = list(parts), is_whole, receive
        self._watcher: asyncio.Task[None] | None = None

    async def _next_part(self) -> bytes:
        if not self._parts:
            await self._wait()
            raise asyncio.CancelledError
        part = self._parts.pop(0)
        self.more_body = bool(self._parts) or not self._is_whole
        return part

    async def _wait(self) -> None:
        """Returns once the caller has left."""
        if self._receive_more is None:
            await asyncio.Event().wait()
        elif await self._receive_more() is None:
            self.leave()

    def watch(self) -> None:
        super().watch()
        self._watcher = asyncio.create_task(self._wait())

    def forget(self) -> None:
        super().forget()
        if self._watcher:
            self._watcher.cancel()

    async def answer(self, status: int, fields: Fields, body: bytes) -> None:
        await self.begin(status, fields)
        self.record({"body": body})

    async def begin(self, status: int, fields: Fields) -> None:
        self.record({"status": status, "headers": list(fields)})

    async def write(self, part: bytes) -> None:
        self.record({"body": part, "more_body": True})

    async def end(self) -> None:
        self.record({"body": b""})

    def record(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


class Browser:
    """Sends requests to the application, without a network."""

    def __init__(
        self,
        specs: Iterable[ModelSpec],
        answer: Answer,
        default_models: str = "",
        max_body_bytes: int = 1 << 20,
        **limits: Any,
    ) -> None:
        self.pipeline = WrittenPipeline(answer)
        self.in_flight = InFlight("all", max_body_bytes, 4 * max_body_bytes)
        settings = with_constants(PipelineSettings, **limits)
        catalog = Catalog(models_of(specs, Telemetry(), parse_aliases(settings.model_aliases)))
        gateway = Gateway(self.pipeline, catalog)  # type: ignore[arg-type]
        inference = Inference(self.pipeline, catalog, settings, default_models)  # type: ignore[arg-type]
        tensors = TensorService(gateway, settings, Meters(), lambda: True)
        own = http_handlers(inference, tensors, Telemetry())
        described = (*HEALTH_ROUTES, *(route for route, _ in own))
        self.handlers: HttpHandlers = [*own, *openapi_handlers(described)]
        self.app = App(self.in_flight, max_body_bytes, max_input_bytes=settings.max_input_bytes)
        self.app.open(self.handlers)
        self.headers: dict[str, str] = {}

    @property
    def inputs(self) -> list[TaskInput]:
        """What the pipeline was asked."""
        return [request.input.message for request in self.pipeline.asked]

    async def post(self, path: str, body: Any, media_type: str = "application/json", **headers: str) -> tuple[int, Any]:
        """The status and the body, parsed where it is JSON."""
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        return await self.send(
            "POST", path, data, **{"content-type": media_type, "content-length": str(len(data))}, **headers
        )

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """As post."""
        return await self.send("GET", path, b"", **headers)

    async def send(self, method: str, path: str, data: bytes, **headers: str) -> tuple[int, Any]:
        """As post; the answer's headers are in `self.headers`."""
        path, _, query = path.partition("?")
        fields = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        exchange = RecordedExchange(method, path, fields, [data[:3], data[3:]], query=query.encode())
        await self.app(exchange)
        sent = exchange.sent
        self.headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        answer = b"".join(message["body"] for message in sent[1:])
        is_json = "json" in self.headers["content-type"] and "lines" not in self.headers["content-type"]
        return sent[0]["status"], orjson.loads(answer) if is_json else answer


def _refuse(given: TaskInput) -> TaskResult:
    raise AssertionError("asked")


# The routes of the HTTP door of a gateway.
ROUTES = (*HEALTH_ROUTES, *(route for route, _ in Browser([], _refuse).handlers))
