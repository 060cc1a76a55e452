"""Requests that are held: the stage that they need has no process, or none that has their model.

Without a limit of requests nothing is held, and such requests fail at once.
"""

import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass

from neuronpipe.core.callers import current_caller
from neuronpipe.core.errors import DeadlineExceeded, Overloaded
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.gateway.tenants.tenants import Shares

# What a caller beyond the limits is told to wait: processes take seconds to start.
_RETRY_AFTER_S = 1.0
# One tenant leaves at least a ninth to others.
_MOST_OF_THE_REST = 8


@dataclass(slots=True)
class HeldTime:
    """For how long a request was held, each moment counted once. `service`: the one that it is held for, or was when it
    ended; empty once it has been sent on.
    """

    total_ns: int = 0
    service: str = ""
    counted_until_ns: int = 0

    def add(self, began_ns: int, ended_ns: int) -> None:
        """Adds a time in which one of the request's items was held."""
        self.total_ns += max(0, ended_ns - max(began_ns, self.counted_until_ns))
        self.counted_until_ns = max(ended_ns, self.counted_until_ns)

    def too_late(self, model: ModelKey) -> DeadlineExceeded:
        """The error of a request whose deadline passes while it is held."""
        return DeadlineExceeded(
            f"the deadline passed while the request was held: no process of the {self.service} service has model "
            f"{model.name!r} version {model.version} yet"
        )


# Of the request that the running task answers; tasks that it starts share it.
_HELD: ContextVar[HeldTime | None] = ContextVar("neuronpipe_held", default=None)


class Hold:
    """One item that is held, until `end`. Made by `Holding`."""

    __slots__ = ("_holding", "_request", "_service", "_size_bytes", "_tenant", "began_ns")

    def __init__(self, holding: "Holding", service: str, size_bytes: int, tenant: str) -> None:
        self.began_ns = time.monotonic_ns()
        self._holding, self._service, self._size_bytes, self._tenant = holding, service, size_bytes, tenant
        self._request = _HELD.get()
        if self._request:
            self._request.service = service

    def end(self, *, is_sent: bool) -> None:
        """The item is sent to a process, or nobody waits for it any more."""
        ended_ns = time.monotonic_ns()
        if self._request:
            self._request.add(self.began_ns, ended_ns)
            if is_sent:
                self._request.service = ""
        held_ns = ended_ns - self.began_ns
        self._holding.leave(self._service, self._size_bytes, self._tenant, held_ns, is_sent=is_sent)


class Holding:
    """The limits of what a gateway holds, for all of its stages together. Draining ends it."""

    def __init__(self, max_requests: int = 0, max_bytes: int = 0, meters: Meters | None = None) -> None:
        self._meters = meters or Meters()
        self._requests, self._bytes = (Shares(limit, _MOST_OF_THE_REST) for limit in (max_requests, max_bytes))
        self.is_on = max_requests > 0
        self.is_stopping = False
        self._stages: list[Callable[[], None]] = []
        if self.is_on:
            self._meters.gauge(Metrics.HELD, lambda: self._requests.total)

    async def stop(self) -> None:
        """Nothing is held from now on. Stages end what they hold."""
        self.is_on, self.is_stopping = False, self.is_on
        for look in self._stages:
            look()

    def watch_stop(self, look: Callable[[], None]) -> None:
        """Has a stage look at what it holds when nothing is held any more."""
        self._stages.append(look)

    def watch(self) -> HeldTime | None:
        """The record of the request that the running task answers from now on; None where nothing is held."""
        if not self.is_on:
            return None
        held = HeldTime()
        _HELD.set(held)
        return held

    def begin(self, service: str, size_bytes: int) -> Hold:
        """Holds an item. Raises Overloaded where it is one too many, or its tenant has so many that others need the
        rest; the first one may be larger than the limit.
        """
        tenant, requests = current_caller().tenant, self._requests.total
        has_room = self._requests.has_room(tenant) and (not requests or self._bytes.has_room(tenant, size_bytes))
        if not has_room:
            self._meters.counter(Metrics.HELD_ENDED, service, "refused").add()
            raise Overloaded(
                f"{requests} requests with {self._bytes.total} bytes are held until a process of the {service} service "
                f"has their model, the limits are {self._requests.limit} and {self._bytes.limit}",
                _RETRY_AFTER_S,
            )
        self._requests.take(tenant)
        self._bytes.take(tenant, size_bytes)
        return Hold(self, service, size_bytes, tenant)

    def leave(self, service: str, size_bytes: int, tenant: str, held_ns: int, *, is_sent: bool) -> None:
        """The end of a hold."""
        self._requests.give_back(tenant)
        self._bytes.give_back(tenant, size_bytes)
        self._meters.counter(Metrics.HELD_ENDED, service, "sent" if is_sent else "ended").add()
        self._meters.histogram(Metrics.HELD_DURATION, service).record(held_ns)
