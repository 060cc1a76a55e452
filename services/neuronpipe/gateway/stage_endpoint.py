"""The stream to one process of a stage: sends items, receives outcomes, and notices that the process is stuck."""

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterable, Mapping
from typing import Protocol

from neuronpipe.core.errors import Unavailable
from neuronpipe.core.generated import NewTokens
from neuronpipe.core.items import ModelKey
from neuronpipe.core.logs import log_warning
from neuronpipe.core.streams import Stream
from neuronpipe.gateway.stage_queue import QueuedItem
from neuronpipe.platform.process.running_time import RunningTime

# An endpoint answers within a millisecond (stages.proto). Without an answer in this time it is stuck.
_STUCK_AFTER_S = 10.0
# A retired endpoint finishes its items. If it is silent for this time, it is gone: its items go elsewhere.
_RETIRED_LIMIT_S = 60.0
# The limit for abandoned ids in one message, so that they alone never fill it.
_MAX_ABANDONED = 128


class EndpointOwner(Protocol):
    """The stage of an endpoint. `needed`, `digests`: see Coalescer."""

    service: str
    needed: frozenset[ModelKey] | None
    digests: Mapping[ModelKey, str]

    def take_items(self, endpoint: "StageEndpoint") -> list[QueuedItem]:
        """Takes the items that the endpoint sends next."""

    def recount(self) -> None:
        """Notes that the models of an endpoint changed."""

    async def retire(self, endpoint: "StageEndpoint", unread: Iterable[QueuedItem]) -> None:
        """Gives an endpoint no more items. The items that it has not read are sent elsewhere."""


class StageEndpoint:
    """The stream to one endpoint.

    - `models`: the models that the process announced last, except versions whose bundle differs from the gateway's.
    - `accepted`: the models for which the endpoint gets items.
    - `cost_tokens`: the cost of its items in flight.
    - `is_free`: the endpoint waits for items to send, and new items wake it.
    """

    def __init__(self, stage: EndpointOwner, stream: Stream) -> None:
        self._announced = stream.models
        self._differences: Mapping[ModelKey, str] = {}
        # The needed models that the process was last told.
        self._needed: frozenset[ModelKey] | None = None
        self.cost_tokens = 0
        self._stage = stage
        self._stream = stream
        self._in_flight: dict[int, QueuedItem] = {}
        self._abandoned: list[int] = []
        self._is_answered = asyncio.Event()
        # The time of a message that is not answered yet.
        self._sent_s: float | None = None
        self.is_free = False
        self._is_woken = asyncio.Event()
        self._is_retired = False
        self.compare_digests()
        self.accepted = self.models.ready

    def compare_digests(self) -> None:
        """Compares the bundles of the process with the gateway's. Each new difference is logged."""
        differences = {
            key: f"{self._stream.address} has another bundle of this version: its digest is {digest[:16]}, the gateway "
            f"has {self._stage.digests[key][:16]}"
            for key, digest in self._announced.digests.items()
            if digest != (self._stage.digests.get(key) or digest)
        }
        for (name, version), problem in sorted(differences.items() - self._differences.items()):
            log_warning(
                "a stage has another bundle of a version",
                stage=self._stage.service,
                model=name,
                version=version,
                problem=problem,
            )
        self._differences = differences
        self.models = self._announced.without(differences) if differences else self._announced

    @property
    def has_suspect(self) -> bool:
        """Whether the endpoint works on an item with which endpoints died."""
        return any(queued.is_suspect for queued in self._in_flight.values())

    def has_model(self, model: ModelKey) -> bool:
        """Returns whether the endpoint accepts items for a model."""
        return model in self.accepted

    @property
    def in_memory(self) -> frozenset[ModelKey]:
        """The loaded models of the endpoint."""
        return self.models.ready - self.models.unloaded.keys()

    def wake(self) -> None:
        """Makes the endpoint check for items to send."""
        self.is_free = False
        self._is_woken.set()

    def abandon(self, item_id: int) -> None:
        """Tells the endpoint that the caller of an item has left."""
        if self._pop_item(item_id):
            self._abandoned.append(item_id)
            self.wake()

    def give_up_items(self, kept_item_ids: Collection[int] = ()) -> list[QueuedItem]:
        """Returns the items in flight, except kept items. The endpoint no longer owns the returned items."""
        return [
            queued
            for item_id in list(self._in_flight)
            if item_id not in kept_item_ids and (queued := self._pop_item(item_id))
        ]

    async def run(self) -> None:
        """Runs until the stream is lost, or the endpoint is retired and has no more items."""
        receiving, retiring, *_ = tasks = [
            asyncio.create_task(work()) for work in (self._receive, self._retire, self._send, self._watch)
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if self._is_retired:
                await asyncio.wait([receiving, retiring], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, TimeoutError) and not self._is_retired:
                log_warning(
                    "a stage's process is stuck",
                    stage=self._stage.service,
                    limit_s=_STUCK_AFTER_S,
                    items=len(self._in_flight),
                )
            elif isinstance(result, Exception) and not isinstance(result, Unavailable | TimeoutError):
                raise result

    async def _send(self) -> None:
        """Sends items and the ids of abandoned items. A retired endpoint gets no items, and still gets the ids."""
        while True:
            needed = self._stage.needed
            if not self._is_retired and needed is not None and needed != self._needed:
                self._needed = needed
                await self._stream.tell_needed(needed)
                continue  # the endpoint may have been retired meanwhile
            taken = [] if self._is_retired else self._stage.take_items(self)
            abandoned, self._abandoned = self._abandoned[:_MAX_ABANDONED], self._abandoned[_MAX_ABANDONED:]
            if not taken and not abandoned:
                self.is_free = True
                self._is_woken.clear()
                await self._is_woken.wait()
                continue
            for queued in taken:
                queued.abandon = self.abandon
                self._in_flight[queued.item_id] = queued
                self.cost_tokens += queued.cost_tokens
            self._is_answered.clear()
            self._sent_s = time.monotonic()
            size_bytes = sum(queued.size_bytes for queued in taken)
            refused = await self._stream.send(
                [(queued.item_id, queued.item) for queued in taken], abandoned, size_bytes
            )
            for item_id, error in refused:
                self._end_item(item_id, error)
            if len(refused) < len(taken):
                await self._is_answered.wait()
            self._sent_s = None

    async def _watch(self) -> None:
        """Raises TimeoutError once the endpoint is stuck. Sending blocks where the endpoint does not read."""
        loop, unanswered = asyncio.get_running_loop(), RunningTime(_STUCK_AFTER_S)
        while unanswered.look(self._sent_s, loop.time()) < _STUCK_AFTER_S:  # noqa: ASYNC110 (nothing tells of a hang)
            await asyncio.sleep(unanswered.look_s)
        raise TimeoutError

    async def _receive(self) -> None:
        while True:
            response = await self._stream.receive()
            for item_id, outcome in response.outcomes:
                if not isinstance(outcome, NewTokens):
                    self._end_item(item_id, outcome)
                elif queued := self._in_flight.get(item_id):
                    queued.put(outcome)
            if response.models is not None:
                self._announced = response.models
                self.compare_digests()
                self._stage.recount()
            if response.kept_item_ids is not None:
                self._is_retired = True
                await self._stage.retire(self, self.give_up_items(set(response.kept_item_ids)))
            self._is_answered.set()

    async def _retire(self) -> None:
        """Retires the endpoint once its address is gone: the endpoint finishes its items and gets no more."""
        await self._stream.retired.wait()
        self._is_retired = True
        await self._stage.retire(self, ())
        self.wake()
        with contextlib.suppress(TimeoutError):
            while self._in_flight:
                async with asyncio.timeout(_RETIRED_LIMIT_S):
                    self._is_answered.clear()
                    await self._is_answered.wait()

    def _end_item(self, item_id: int, outcome: object) -> None:
        queued = self._pop_item(item_id)
        if queued:
            queued.resolve(outcome)
            if queued.is_suspect:  # the next suspect may be sent
                self.wake()

    def _pop_item(self, item_id: int) -> QueuedItem | None:
        queued = self._in_flight.pop(item_id, None)
        if queued:
            self.cost_tokens -= queued.cost_tokens
            if self._is_retired and not self._in_flight:
                self._is_answered.set()
        return queued
