"""Sends the items of many requests together to the processes of one stage.

Items wait in one queue. Each process of the stage (an endpoint) has a stream, which takes from the queue whenever the
endpoint has answered its last message. So no item waits while an endpoint is free, messages grow with the load, and an
endpoint that is slow, stuck or gone does not affect the others. An item is sent only to endpoints that have its model.
If an endpoint dies, its items are sent to another, because stages are pure functions. Two kinds of items end with an
error instead: an item that has tokens of a text already, which its caller may have read, and an item with which several
endpoints died (`_MAX_LOSSES`). The coalescer knows no transport.
"""

import itertools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from neuronpipe.core import metrics
from neuronpipe.core.changes import Changes
from neuronpipe.core.errors import NeuronpipeError, Unavailable
from neuronpipe.core.generated import NewTokens, TokenSink
from neuronpipe.core.items import ModelKey, StageItem
from neuronpipe.core.names import Events
from neuronpipe.core.streams import Preparation, Stream
from neuronpipe.core.tracing import SpanEvent, current_span
from neuronpipe.gateway.held_items import HeldItems
from neuronpipe.gateway.stage_endpoint import StageEndpoint
from neuronpipe.gateway.stage_queue import QueuedItem, StageQueue

# If this many endpoints died with an item, the item is considered the reason, and fails.
_MAX_LOSSES = 3


class Coalescer:
    """One stage with all of its endpoints, which `serve` adds. `send` and `generate` are stage functions."""

    def __init__(
        self,
        service: str,
        report: Callable[[bool], Awaitable[None]],
        retried: metrics.Counter | None = None,
        held_items: HeldItems | None = None,
    ) -> None:
        """`report` is called when the first endpoint comes and when the last endpoint goes. `retried` counts items that
        are sent again. `held_items`: the limits for items whose model no endpoint has; None: such items fail.
        """
        self.service = service
        self._retried = retried or metrics.Counter()
        self._report = report
        self._held_items = held_items or HeldItems()
        self._held_items.stops.watch(self.recount)
        self._queue = StageQueue()
        self._endpoints: set[StageEndpoint] = set()
        # The number of endpoints that accept items for a model.
        self._accepting: Counter[ModelKey] = Counter()
        self._item_ids = itertools.count(1)
        self._is_reported = False
        # The models that items may be sent for; None until `set_needed` says so.
        self.needed: frozenset[ModelKey] | None = None
        # The digests of the gateway's bundles.
        self.digests: Mapping[ModelKey, str] = {}
        self.changes = Changes()  # the endpoints' models

    async def send(self, item: StageItem, sink: TokenSink | None = None) -> Any:
        """Returns the item's value. The tokens of a text are put into the sink as they come. If the caller cancels,
        the item is also cancelled.

        Raises the errors of the stage, Unavailable, and Overloaded where too many items are held.
        """
        queued = QueuedItem(next(self._item_ids), item, sink)
        if not self._accepting[item.model]:
            self._hold(queued)
        self._queue.append(queued)
        self._wake_one()
        try:
            outcome = await queued.future
        finally:
            if queued.future.cancelled():
                self._queue.remove(queued)
                if queued.abandon:
                    queued.abandon(queued.item_id)
            if queued.held:
                self._release(queued, is_sent=False)
            if queued.events and (span := current_span()):
                span.events.extend(queued.events)
        if isinstance(outcome, NeuronpipeError):
            raise outcome
        return outcome

    def has(self, key: ModelKey) -> bool:
        """Returns whether an endpoint accepts items for a model."""
        return bool(self._accepting[key])

    def problem_of(self, key: ModelKey) -> str:
        """Returns the problem of an endpoint that could not load a model; empty if there is none."""
        problems = (endpoint.models.problems.get(key, "") for endpoint in self._endpoints)
        return next((f"{self.service}: {problem}" for problem in problems if problem), "")

    def is_loading(self, key: ModelKey) -> bool | None:
        """Returns whether an endpoint is loading a model; None if an endpoint has the model in memory, or no endpoint
        has the model.
        """
        having = [endpoint for endpoint in self._endpoints if key in endpoint.models.ready]
        if not all(key in endpoint.models.unloaded for endpoint in having):
            return None
        return any(endpoint.models.unloaded[key] for endpoint in having) if having else None

    def preparation_of(self, key: ModelKey) -> Preparation:
        """Returns the progress of all endpoints together in preparing a model."""
        return sum((endpoint.models.prepared.get(key, Preparation()) for endpoint in self._endpoints), Preparation())

    def set_needed(self, keys: frozenset[ModelKey]) -> None:
        """Sets the models that items may be sent for from now on. Endpoints unload none of them."""
        self.needed = keys
        for endpoint in self._endpoints:
            endpoint.wake()

    def set_digests(self, digests: Mapping[ModelKey, str]) -> None:
        """Sets the digests of the gateway's bundles. Endpoints get no items for a version whose bundle differs."""
        if digests != self.digests:
            self.digests = digests
            for endpoint in self._endpoints:
                endpoint.compare_digests()
            self.recount()

    async def serve(self, stream: Stream) -> None:
        """Sends items over the stream until it is lost. Then another endpoint gets the items without an outcome."""
        endpoint = StageEndpoint(self, stream)
        self._endpoints.add(endpoint)
        self.recount()
        try:
            await self._report_change()
            await endpoint.run()
        finally:
            unfinished = endpoint.give_up_items()
            if not stream.retired.is_set():
                for queued in unfinished:
                    queued.losses += 1
            await self.retire(endpoint, unfinished)

    async def retire(self, endpoint: StageEndpoint, unread: Iterable[QueuedItem]) -> None:
        """Gives an endpoint no more items. The items that it has not read are sent elsewhere."""
        self._endpoints.discard(endpoint)
        returned = []
        for queued in unread:
            queued.is_returned = True
            if queued.losses >= _MAX_LOSSES or queued.has_tokens:
                queued.resolve(Unavailable(self._unreachable))
            elif not queued.future.done():
                queued.put(NewTokens())  # the item may have waited there for its grammar
                returned.append(queued)
        self._queue.put_back(returned)
        self.recount()
        await self._report_change()

    def recount(self) -> None:
        """Updates which endpoint has which model. Items for a model that no endpoint has any more are held, or fail."""
        self._choose_loaders()
        self._accepting = Counter(model for endpoint in self._endpoints for model in endpoint.accepted)
        for queued in list(self._queue):
            if self.has(queued.item.model):
                self._release(queued, is_sent=True)
                continue
            try:
                self._hold(queued)
            except NeuronpipeError as error:
                self._queue.remove(queued)
                queued.resolve(error)
        self.changes.notify()
        self._wake_one()

    def take_items(self, endpoint: StageEndpoint) -> list[QueuedItem]:
        """Takes items for an endpoint. The endpoints that accept a model divide the waiting tokens of the model evenly.

        Items whose callers left are dropped.
        """
        waiting = self._queue.cost_tokens.items()
        least_tokens = sum(
            -(-tokens // self._accepting[model]) for model, tokens in waiting if endpoint.has_model(model)
        )
        taken = self._queue.take(endpoint.has_model, least_tokens, takes_suspects=self._takes_suspects(endpoint))
        for queued in taken:
            if queued.is_returned:
                queued.is_returned = False
                queued.events.append(SpanEvent(Events.RETRIED, time.monotonic_ns()))
                self._retried.add()
        self._wake_one()
        return taken

    def _choose_loaders(self) -> None:
        """Decides which endpoints accept items for which model: the endpoints that have it in memory, or otherwise a
        single endpoint, which loads it. An endpoint that is loading the model already goes first, then the endpoint
        with the fewest models in memory.
        """
        in_memory = {endpoint: set(endpoint.in_memory) for endpoint in self._endpoints if endpoint.models.unloaded}
        for endpoint in self._endpoints:
            endpoint.accepted = endpoint.models.ready
        if not in_memory:
            return
        loaded = {model for endpoint in self._endpoints for model in in_memory.get(endpoint, endpoint.models.ready)}
        for model in sorted({model for endpoint in in_memory for model in endpoint.models.unloaded} - loaded):
            able = [endpoint for endpoint in in_memory if model in endpoint.models.unloaded]
            chosen = min(able, key=lambda endpoint: (not endpoint.models.unloaded[model], len(in_memory[endpoint])))
            in_memory[chosen].add(model)
        for endpoint, models in in_memory.items():
            endpoint.accepted = frozenset(models)

    def _takes_suspects(self, endpoint: StageEndpoint) -> bool:
        # There is hardly ever a suspect, and a search of an endpoint's items takes time for each item.
        return self._queue.has_suspects and not endpoint.has_suspect

    async def _report_change(self) -> None:
        if self._is_reported != bool(self._endpoints):
            self._is_reported = bool(self._endpoints)
            await self._report(self._is_reported)

    def _hold(self, queued: QueuedItem) -> None:
        """Holds an item that no endpoint can take now. Raises Overloaded, and Unavailable where none ever may."""
        item = queued.item
        has_failed = bool(self._endpoints) and all(
            item.model in endpoint.models.problems for endpoint in self._endpoints
        )
        if not self._held_items.is_on or has_failed:
            raise self._unavailable(item.model)
        if not queued.held:
            tenant = item.call.caller.tenant
            queued.held = self._held_items.hold(self.service, queued.size_bytes, tenant, item.work.held)
            queued.events.append(SpanEvent(Events.HELD, queued.held.began_ns))

    def _release(self, queued: QueuedItem, *, is_sent: bool) -> None:
        """Holds an item no longer, if it is held."""
        if queued.held:
            self._held_items.release(queued.held, is_sent=is_sent)
            queued.held = None
            queued.events.append(SpanEvent(Events.RELEASED, time.monotonic_ns()))

    def _unavailable(self, model: ModelKey) -> Unavailable:
        problem = f"no process of the {self.service} service has model {model.name!r} version {model.version}"
        if not self._endpoints:
            problem = self._unreachable
        return Unavailable(f"{problem}; the gateway is stopping" if self._held_items.is_stopping else problem)

    @property
    def _unreachable(self) -> str:
        return f"the {self.service} service cannot be reached"

    def _wake_one(self) -> None:
        """Wakes the free endpoint with the least work for which an item waits."""
        least: StageEndpoint | None = None
        for endpoint in self._endpoints:
            if (
                endpoint.is_free
                and (least is None or endpoint.cost_tokens < least.cost_tokens)
                and self._queue.has_any(endpoint.has_model, takes_suspects=self._takes_suspects(endpoint))
            ):
                least = endpoint
        if least:
            least.wake()
