"""The stage's side of its stream: receives items, and sends outcomes as they are ready (stages.proto).

A generating item has an outcome with new tokens for each step, and a last outcome like any other item.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Self, TypeAlias

from neuronpipe.api.forward.v1 import stages_pb2 as wire
from neuronpipe.api.v1 import stages_pb2
from neuronpipe.core.attributes import attributes_of, priority_word
from neuronpipe.core.calls import Call, to_caller_error
from neuronpipe.core.errors import NeuronpipeError, Overloaded, Unavailable
from neuronpipe.core.generated import NewTokens
from neuronpipe.core.items import ExecuteItem, StageItem
from neuronpipe.core.metrics import Histogram, Telemetry
from neuronpipe.core.names import EXECUTOR, POSTPROCESSOR, TOKENIZER, Attributes, Metrics
from neuronpipe.core.status import to_status
from neuronpipe.core.streams import AnnouncedModels
from neuronpipe.core.tracing import Span, enter_span, status_name
from neuronpipe.platform.process.in_flight import LARGE_BYTES, InFlight
from neuronpipe.rpc.codecs import Codec, ExecuteCodec, PostprocessCodec, TokenizeCodec, read_models, write_announcement
from neuronpipe.rpc.rpcs import Rpc

# The messages, items and values of all three stages. They have no common type.
_Message: TypeAlias = Any
# For an item that generates, a function also takes a TokenSink.
StageFunction: TypeAlias = Callable[..., Awaitable[Any]]

# A message is answered after this long even if nothing is ready, because the gateway holds new items back until then.
_ANSWER_AFTER_S = 0.001
# Last resort behind the gateways' admission control: the limit for items of one stream without a sent outcome.
_MAX_ITEMS = 16_384
# The largest message of outcomes, so that a long message does not delay the messages behind it.
_MAX_RESPONSE_BYTES = 1 << 20
# The limit for outcomes that wait to be sent. Above it, no more items are read.
_MAX_UNSENT_BYTES = 16 << 20
# The size of an outcome without its value.
_OUTCOME_BYTES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class StageRpc(Rpc):
    """The rpc of a stage, the name of the stage's service, and the codec of its messages (neuronpipe.forward.v1)."""

    service_name: str
    codec: Codec[Any, Any]


def _stage_rpc(service_name: str, service: str, codec: Codec[Any, Any]) -> StageRpc:
    (method,) = stages_pb2.DESCRIPTOR.services_by_name[service].methods
    return StageRpc.of(method, wire.DESCRIPTOR, is_trusted=True, service_name=service_name, codec=codec)


TOKENIZE = _stage_rpc(TOKENIZER, "TokenizerService", TokenizeCodec())
EXECUTE = _stage_rpc(EXECUTOR, "NeuronExecutorService", ExecuteCodec())
POSTPROCESS = _stage_rpc(POSTPROCESSOR, "PostprocessorService", PostprocessCodec())


class ItemObserver:
    """Observes the items of one rpc: their durations, and spans for items of sampled requests."""

    def __init__(self, method: str, telemetry: Telemetry) -> None:
        self.method = method
        self.tracer = telemetry.tracer
        self.in_flight = 0
        self._meters = telemetry.meters
        self._by_status: dict[str, Histogram] = {}
        telemetry.meters.gauge(Metrics.ITEMS_IN_FLIGHT, lambda: self.in_flight, method)

    def durations(self, status: str) -> Histogram:
        """Returns the histogram of durations of items that ended with a status."""
        histogram = self._by_status.get(status)
        return histogram or self._by_status.setdefault(
            status, self._meters.histogram(Metrics.ITEM_DURATION, self.method, status)
        )


class ItemObservation:
    """The observation of the work on one item, for as long as the block runs.

    `value`: what the stage returned. `trace`: the span to which the stage's work belongs, which is the new span of the
    item, or else the item's own span.
    """

    __slots__ = ("_item", "_observer", "_span", "_started_ns", "trace", "value")

    def __init__(self, observer: ItemObserver, item: StageItem) -> None:
        self._observer = observer
        self._item = item
        self._span: Span | None = None
        self._started_ns = time.monotonic_ns()
        self.trace = parent = item.work.trace
        self.value: object = None
        observer.in_flight += 1
        if parent and parent.is_sampled and observer.tracer.is_on:  # the gateway has decided
            self._span = span = Span(observer.method, parent.child(), parent, self._started_ns, kind="server")
            self.trace = span.context
            enter_span(span)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        ended_ns = time.monotonic_ns()
        observer, item, span = self._observer, self._item, self._span
        observer.in_flight -= 1
        status = status_name(error)
        observer.durations(status).record(ended_ns - self._started_ns, span.context if span else None)
        if span:
            span.ended_ns = ended_ns
            span.attributes |= {
                Attributes.RPC_SYSTEM: "grpc",
                Attributes.RPC_METHOD: observer.method,
                Attributes.RPC_STATUS: status,
                Attributes.MODEL: item.model.name,
                Attributes.VERSION: str(item.model.version),
                Attributes.REQUEST_ID: item.call.request_id,
                Attributes.PRIORITY: priority_word(item.call.priority),
                **attributes_of(self.value),
            }
            if error:
                span.fail(error, ended_ns)
            observer.tracer.record(span)


@dataclass(eq=False)
class StageMethod:
    """The method of a gRPC service, made from a stage function: (requests, context) -> answers.

    - `at_once`: returns an item's value without waiting where it can, otherwise None. Such an item needs no task, which
      would take longer than decoding a token.
    - `models`: the models for which gateways send items.
    - `max_message_bytes`: the largest message that the server accepts.
    - `leaves_unavailable`: whether items that raise Unavailable get no outcome, because the process is about to end.
      When the stream ends, the gateway sends such items to another process, or ends them with an error if there is
      none.
    - `in_flight`: the process's requests in flight. When the process drains, the stream begins no more items and ends
      after its last item; until then gateways still say which items they abandon.
    """

    rpc: StageRpc
    stage: StageFunction
    telemetry: Telemetry
    _: KW_ONLY
    models: AnnouncedModels
    at_once: Callable[[Any], Any] | None = None
    max_message_bytes: int = 0
    leaves_unavailable: bool = False
    in_flight: InFlight | None = None

    def __post_init__(self) -> None:
        self.observer = ItemObserver(self.rpc.path.removeprefix("/"), self.telemetry)

    def __call__(self, requests: AsyncIterator[_Message], context: object) -> AsyncIterator[_Message]:
        return _ItemStream(self).answer(requests)


class _FinishedItem(NamedTuple):
    """The outcome of an item: the stage's value or an error."""

    item_id: int
    outcome: Any
    size_bytes: int


class _OutcomesOfItem:
    """The sink of the tokens of one text: each step is an outcome of its item."""

    __slots__ = ("_item_id", "_stream")

    def __init__(self, stream: "_ItemStream", item_id: int) -> None:
        self._stream, self._item_id = stream, item_id

    def put(self, tokens: NewTokens) -> None:
        """See TokenSink."""
        self._stream.finish(self._item_id, tokens)


@dataclass(eq=False)
class _ItemStream:
    """The stream of one gateway."""

    method: StageMethod

    def __post_init__(self) -> None:
        self._codec = self.method.rpc.codec
        self._running: dict[int, asyncio.Task[None]] = {}
        # Outcomes that wait for a message, and the number of outcomes that wait or are being sent.
        self._finished: deque[_FinishedItem] = deque()
        self._unsent = self._unsent_bytes = 0
        self._has_sent, self._is_due = asyncio.Event(), asyncio.Event()
        self._answer_at: asyncio.TimerHandle | None = None
        self._announces = True
        self._loop = asyncio.get_running_loop()
        # Done when the process drains.
        self._stopping: asyncio.Future[Any] = self._loop.create_future()

    async def answer(self, requests: AsyncIterator[_Message]) -> AsyncIterator[_Message]:
        """Sends outcomes until the gateway ends the stream, or until reading from the stream raises.

        Items that were read before an error, or before the process drains, are still answered.
        """
        models, in_flight = self.method.models, self.method.in_flight
        unwatch = models.changes.watch(self._announce)
        models.needs.set(self, None)  # until the gateway says which models it needs
        reading: asyncio.Task[None] | None = None
        is_draining = False
        try:
            yield self._new_response()
            reading = asyncio.create_task(self._read(requests))
            if in_flight:
                self._stopping = asyncio.create_task(in_flight.draining.wait())
            for ending in (reading, self._stopping):
                ending.add_done_callback(lambda task: self._is_due.set())
            while self._finished or self._running or not (reading.done() or self._stopping.done()):
                await self._is_due.wait()
                self._is_due.clear()
                has_ended = reading.done() or self._stopping.done()
                begins_draining = has_ended and not is_draining and bool(self._running or self._finished)
                if not (self._finished or self._answer_at or self._announces or begins_draining):
                    continue
                response = self._new_response()
                sent = self._write_finished(response)
                if begins_draining and (unanswered_ids := [*self._running, *(item.item_id for item in self._finished)]):
                    is_draining = True
                    response.draining.item_ids.extend(unanswered_ids)
                if self._answer_at:
                    self._answer_at.cancel()
                    self._answer_at = None
                yield response
                self._unsent -= len(sent)
                self._unsent_bytes -= sum([finished.size_bytes for finished in sent])
                self._has_sent.set()
                if self._finished:
                    self._is_due.set()
            if in_flight and not reading.done():
                raise in_flight.stopping()
            await reading
        finally:
            unwatch()
            models.needs.forget(self)
            tasks = [*([reading] if reading else ()), self._stopping, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[_Message]) -> None:
        async for request in requests:
            if request.HasField("needed"):
                self.method.models.needs.set(self, read_models(request.needed))
            # Slices, because in upb iterating over a repeated field takes a microsecond more.
            for item_id in request.abandoned_item_ids[:]:
                if task := self._running.pop(item_id, None):
                    task.cancel()
            if self._stopping.done():  # the gateway sends these items elsewhere
                self._is_due.set()  # the last item may have been abandoned, so that the stream can end
                continue
            messages = request.items[:]
            for message in messages:
                self._begin(message)
            if messages and not self._answer_at:
                self._answer_at = self._loop.call_later(_ANSWER_AFTER_S, self._is_due.set)
            # The gateway reads outcomes more slowly than it sends items.
            while self._unsent_bytes > _MAX_UNSENT_BYTES:
                self._has_sent.clear()
                await self._has_sent.wait()

    def _begin(self, message: _Message) -> None:
        item_id = message.context.item_id
        try:
            if len(self._running) + self._unsent >= _MAX_ITEMS:
                raise Overloaded(f"{_MAX_ITEMS} items in one stream, the limit", retry_after_s=1)
            item = self._codec.read_item(message)
            if not self._ran_at_once(item_id, item):
                self._running[item_id] = self._loop.create_task(self._run(item_id, item))
        except Exception as error:
            self.finish(item_id, to_caller_error(error, Call(message.context.request_id)))

    def _ran_at_once(self, item_id: int, item: Any) -> bool:
        """Runs an item without a task, if it can. Items with spans of their own have tasks, which have contexts."""
        if not self.method.at_once or (item.work.trace and item.work.trace.is_sampled):
            return False
        started_ns, error = time.monotonic_ns(), None
        try:
            if (value := self.method.at_once(item)) is None:
                return False
            self.finish(item_id, value, value.size_bytes)
        except Exception as fault:
            error = fault
            self.finish(item_id, to_caller_error(fault, item.call))
        self.method.observer.durations(status_name(error)).record(time.monotonic_ns() - started_ns, None)
        return True

    async def _run(self, item_id: int, item: Any) -> None:
        try:
            with ItemObservation(self.method.observer, item) as observation:
                if observation.trace is not item.work.trace:
                    item = item._replace(work=item.work._replace(trace=observation.trace))
                if isinstance(item, ExecuteItem) and item.options:
                    value = await self.method.stage(item, _OutcomesOfItem(self, item_id))
                else:
                    value = await self.method.stage(item)
                observation.value = value
                size_bytes = value.size_bytes
                if size_bytes >= LARGE_BYTES:
                    size_bytes = await asyncio.to_thread(self._codec.pack, value)
            self.finish(item_id, value, size_bytes)
        except Exception as error:
            if self.method.leaves_unavailable and isinstance(error, Unavailable):
                self._is_due.set()  # the item may have been the last item, so that the stream can end
            else:
                self.finish(item_id, to_caller_error(error, item.call._replace(trace=item.work.trace)))
        finally:
            self._running.pop(item_id, None)

    def finish(self, item_id: int, outcome: object, size_bytes: int = 0) -> None:
        """Adds an outcome of an item to the next message."""
        self._finished.append(_FinishedItem(item_id, outcome, size_bytes + _OUTCOME_BYTES))
        self._unsent += 1
        self._unsent_bytes += size_bytes + _OUTCOME_BYTES
        self._is_due.set()

    def _announce(self) -> None:
        self._announces = True
        self._is_due.set()

    def _new_response(self) -> _Message:
        """Returns a message that is empty, except for an announcement that is due."""
        response = self.method.rpc.response_class()
        if self._announces:
            write_announcement(self.method.models.announced, self.method.max_message_bytes, response.announcement)
        self._announces = False
        return response

    def _write_finished(self, response: _Message) -> list[_FinishedItem]:
        """Fills a message with finished outcomes, at least one if any is finished, and returns them."""
        sent: list[_FinishedItem] = []
        size_bytes = 0
        while self._finished and (not sent or size_bytes + self._finished[0].size_bytes <= _MAX_RESPONSE_BYTES):
            finished = self._finished.popleft()
            message = response.outcomes.add()
            message.item_id = finished.item_id
            if isinstance(finished.outcome, NeuronpipeError):
                message.error.CopyFrom(to_status(finished.outcome))
            else:
                self._codec.write_value(finished.outcome, message)
            sent.append(finished)
            size_bytes += finished.size_bytes
        return sent
