"""Items of many requests to the processes of one stage, together.

Items wait in one queue. Each process of the stage (an endpoint) has a stream, which takes from the queue whenever the endpoint has
answered its last message. So nothing waits while an endpoint is free, messages grow with the load by themselves, and an endpoint that
is slow, stuck or gone takes nothing away from the others. Items that an endpoint dies with are sent to another, as stages are pure
functions. Knows no transport.
"""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.core.errors import Unavailable
from neuronpipe.core.logs import log_warning
from neuronpipe.core.metrics import Counter
from neuronpipe.core.status import from_status
from neuronpipe.core.telemetry import Events
from neuronpipe.core.tracing import Event, current_span

_BULK = Priority.PRIORITY_BULK

# The items and outcomes of three stages alike, which protobuf's types cannot say.
_Item: TypeAlias = Any
_Outcome: TypeAlias = Any

_MAX_ITEMS = 128
_MAX_BYTES = 1 << 20
# An endpoint answers within a millisecond (stages.proto); one that does not within this time is stuck.
_STUCK_AFTER_S = 10.0
# An item that so many endpoints died with may be the reason: from then on it travels without others of its kind, so that it takes none of
# them along. Not from the first on: those of a process that was killed would each have to wait for the other.
_SUSPECT_LOSSES = 2
# It is thought to be the reason, and fails.
_MAX_LOSSES = 3


class Stream(Protocol):
    """An open stream to one endpoint. Its methods raise Unavailable once it is lost."""

    async def send(self, items: Sequence[_Item], abandoned_item_ids: Sequence[int]) -> None:
        """Sends one message."""

    async def receive(self) -> tuple[Sequence[_Outcome], Sequence[int] | None]:
        """The outcomes of the next message, of which there may be none; and from an endpoint that reads no more what it still works on."""


class _Waiting:
    """An item until its outcome is there."""

    __slots__ = ("deadline_s", "endpoint", "future", "is_returned", "item", "losses", "retries")

    def __init__(self, item: _Item, future: "asyncio.Future[_Outcome]") -> None:
        self.item = item
        self.future = future
        self.deadline_s = time.monotonic() + item.context.remaining_ns / 1e9 if item.context.remaining_ns else None
        self.endpoint: _Endpoint | None = None
        self.losses = 0
        self.is_returned = False
        self.retries: list[Event] = []


class Coalescer:
    """One stage behind all of its endpoints. The instance is the stage function; `serve` gives it an endpoint."""

    def __init__(self, service: str, report: Callable[[bool], Awaitable[None]], retried: Counter | None = None) -> None:
        """`report` is told when the first endpoint comes and when the last one goes; `retried` counts items that are sent again."""
        self.service = service
        self._retried = retried or Counter()
        self._report = report
        self._interactive: deque[_Waiting] = deque()
        self._bulk: deque[_Waiting] = deque()
        self._suspects: deque[_Waiting] = deque()
        self._endpoints: set[_Endpoint] = set()
        self._item_ids = itertools.count(1)
        self._is_reported = False

    async def __call__(self, item: _Item) -> Any:
        """The item's value. Raises the errors that the stage does, and Unavailable. Whoever leaves (cancel) takes the item along."""
        if not self._endpoints:
            raise self._unreachable()
        waiting = _Waiting(item, asyncio.get_running_loop().create_future())
        item.context.item_id = next(self._item_ids)
        (self._bulk if item.context.priority == _BULK else self._interactive).append(waiting)
        self._wake_one()
        try:
            outcome = await waiting.future
        finally:
            if waiting.future.cancelled() and waiting.endpoint:
                waiting.endpoint.abandon(item.context.item_id)
            if waiting.retries and (span := current_span()):
                span.events.extend(waiting.retries)
        kind = outcome.WhichOneof("outcome")
        if kind == "error":
            raise from_status(outcome.error)
        return getattr(outcome, kind)

    async def serve(self, stream: Stream) -> None:
        """Sends items over the stream until it is lost. Then whoever waits for one of its outcomes is served by another."""
        endpoint = _Endpoint(self, stream)
        self._endpoints.add(endpoint)
        try:
            await self._report_change()
            await endpoint.run()
        finally:
            for waiting in endpoint.in_flight.values():
                waiting.losses += 1
            self._remove(endpoint, list(endpoint.in_flight.values()))
            await self._report_change()

    async def retire(self, endpoint: "_Endpoint", unread: list[_Waiting]) -> None:
        """Gives an endpoint nothing more to do; what it has not read is sent elsewhere."""
        self._remove(endpoint, unread)
        await self._report_change()

    async def _report_change(self) -> None:
        if self._is_reported != bool(self._endpoints):
            self._is_reported = bool(self._endpoints)
            await self._report(self._is_reported)

    def _remove(self, endpoint: "_Endpoint", left: list[_Waiting]) -> None:
        self._endpoints.discard(endpoint)
        for waiting in reversed(left):  # each goes to the front
            waiting.endpoint = None
            waiting.is_returned = True
            if waiting.losses >= _MAX_LOSSES:
                self._fail(waiting)
            elif waiting.losses >= _SUSPECT_LOSSES:
                self._suspects.appendleft(waiting)
            elif waiting.item.context.priority == _BULK:
                self._bulk.appendleft(waiting)
            else:
                self._interactive.appendleft(waiting)
        if not self._endpoints:
            for queue in (self._suspects, self._interactive, self._bulk):
                for waiting in queue:
                    self._fail(waiting)
                queue.clear()
        self._wake_one()

    def _fail(self, waiting: _Waiting) -> None:
        if not waiting.future.done():
            waiting.future.set_exception(self._unreachable())

    def _unreachable(self) -> Unavailable:
        return Unavailable(f"the {self.service} service cannot be reached")

    def _wake_one(self) -> None:
        """Lets the endpoint with the least to do take from the queue, of those that can."""
        has_others = self._interactive or self._bulk
        free = [endpoint for endpoint in self._endpoints if endpoint.is_free and (has_others or not endpoint.has_suspect)]
        if free:
            min(free, key=lambda endpoint: len(endpoint.in_flight)).wake()

    def take(self, endpoint: "_Endpoint") -> list[_Waiting]:
        """An endpoint's share of what waits and is still wanted, interactive items first."""
        share = min(_MAX_ITEMS, -(-(len(self._interactive) + len(self._bulk)) // len(self._endpoints)))
        taken: list[_Waiting] = []
        size_bytes = 0
        for queue, most in (
            (self._suspects, 1 if self._suspects and not endpoint.has_suspect else 0),
            (self._interactive, share),
            (self._bulk, share),
        ):
            while queue and len(taken) < most and size_bytes < _MAX_BYTES:
                waiting = queue.popleft()
                if waiting.future.done():
                    continue
                if waiting.deadline_s is not None:
                    # Its caller's timer ends it; an item on its way must only not look like one without a deadline.
                    waiting.item.context.remaining_ns = max(1, int((waiting.deadline_s - time.monotonic()) * 1e9))
                if waiting.is_returned:
                    waiting.is_returned = False
                    waiting.retries.append(Event(Events.RETRIED, time.monotonic_ns()))
                    self._retried.add()
                size_bytes += waiting.item.ByteSize()
                taken.append(waiting)
        if self._interactive or self._bulk or self._suspects:
            self._wake_one()
        return taken


class _Endpoint:
    """One endpoint's stream."""

    def __init__(self, coalescer: Coalescer, stream: Stream) -> None:
        self._coalescer = coalescer
        self._stream = stream
        self._abandoned: list[int] = []
        self._is_answered = asyncio.Event()
        self._turn: asyncio.Future[None] | None = None
        self._is_retired = False
        self.in_flight: dict[int, _Waiting] = {}

    @property
    def is_free(self) -> bool:
        """Whether it waits for something to send."""
        return self._turn is not None and not self._turn.done()

    @property
    def has_suspect(self) -> bool:
        """Whether it works on an item that endpoints died with."""
        return any(waiting.losses >= _SUSPECT_LOSSES for waiting in self.in_flight.values())

    def wake(self) -> None:
        """Lets it look for something to send."""
        if self._turn and not self._turn.done():
            self._turn.set_result(None)

    def abandon(self, item_id: int) -> None:
        """Tells the endpoint that nobody waits for an item any more."""
        if self.in_flight.pop(item_id, None):
            self._abandoned.append(item_id)
            self.wake()

    async def run(self) -> None:
        """Until the stream is lost."""
        receiving = asyncio.create_task(self._receive())
        sending = asyncio.create_task(self._send())
        try:
            await asyncio.wait([receiving, sending], return_when=asyncio.FIRST_COMPLETED)
            if self._is_retired:
                await asyncio.wait([receiving])
        finally:
            for task in (receiving, sending):
                task.cancel()
            results = await asyncio.gather(receiving, sending, return_exceptions=True)
        for result in results:
            if isinstance(result, TimeoutError) and not self._is_retired:
                log_warning("a stage's process is stuck", stage=self._coalescer.service, limit_s=_STUCK_AFTER_S, items=len(self.in_flight))
            elif isinstance(result, Exception) and not isinstance(result, Unavailable | TimeoutError):
                raise result

    async def _send(self) -> None:
        while not self._is_retired:
            taken = self._coalescer.take(self)
            abandoned, self._abandoned = self._abandoned, []
            if not taken and not abandoned:
                self._turn = asyncio.get_running_loop().create_future()
                await self._turn
                continue
            for waiting in taken:
                waiting.endpoint = self
                self.in_flight[waiting.item.context.item_id] = waiting
            self._is_answered.clear()
            async with asyncio.timeout(_STUCK_AFTER_S):  # sending, too, waits once the endpoint reads no more
                await self._stream.send([waiting.item for waiting in taken], abandoned)
                if taken:
                    await self._is_answered.wait()

    async def _receive(self) -> None:
        while True:
            outcomes, kept_ids = await self._stream.receive()
            for outcome in outcomes:
                waiting = self.in_flight.pop(outcome.item_id, None)
                if waiting and not waiting.future.done():
                    waiting.future.set_result(outcome)
                if waiting and waiting.losses >= _SUSPECT_LOSSES:  # the next one's turn
                    self.wake()
            if kept_ids is not None:
                self._is_retired = True
                kept = set(kept_ids)
                await self._coalescer.retire(self, [self.in_flight.pop(item_id) for item_id in list(self.in_flight) if item_id not in kept])
            self._is_answered.set()
