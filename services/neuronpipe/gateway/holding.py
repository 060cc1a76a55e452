"""Requests that are held: the stage that they need has no process, or none that has their model.

Without a limit of requests nothing is held, and such requests fail at once.
"""

import time
from collections.abc import Callable

from neuronpipe.core.deadlines import HeldTime
from neuronpipe.core.errors import Overloaded
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.gateway.tenants.tenants import Shares

# The time that a caller beyond the limits is told to wait: processes take seconds to start.
_RETRY_AFTER_S = 1.0
# Memory for the messages of all held requests.
MAX_HELD_BYTES = 64 << 20
# A tenant leaves at least a ninth to others.
_MOST_OF_THE_REST = 8


class Hold:
    """One item that is held, until `end`. `Holding` makes it."""

    __slots__ = ("_holding", "_request", "_service", "_size_bytes", "_tenant", "began_ns")

    def __init__(
        self, holding: "Holding", service: str, size_bytes: int, tenant: str, request: HeldTime | None
    ) -> None:
        self.began_ns = time.monotonic_ns()
        self._holding, self._service, self._size_bytes, self._tenant = holding, service, size_bytes, tenant
        self._request = request
        if self._request:
            self._request.items += 1
            self._request.service = service

    def end(self, *, is_sent: bool) -> None:
        """Ends the hold, as the item is sent to a process or its caller has left."""
        ended_ns = time.monotonic_ns()
        if self._request:
            self._request.add(self.began_ns, ended_ns)
            self._request.items -= 1
            if is_sent and not self._request.items:
                self._request.service = ""
        held_ns = ended_ns - self.began_ns
        self._holding.leave(self._service, self._size_bytes, self._tenant, held_ns, is_sent=is_sent)


class Holding:
    """The limits of what a gateway holds, for all of its stages together. Draining ends it."""

    def __init__(self, max_requests: int = 0, max_bytes: int = MAX_HELD_BYTES, meters: Meters | None = None) -> None:
        self._meters = meters or Meters()
        self._requests, self._bytes = (Shares(limit, _MOST_OF_THE_REST) for limit in (max_requests, max_bytes))
        self.is_on = max_requests > 0
        self.is_stopping = False
        self._stages: list[Callable[[], None]] = []
        if self.is_on:
            self._meters.gauge(Metrics.HELD, lambda: self._requests.total)

    async def stop(self) -> None:
        """Stops holding: stages end the items that they hold."""
        self.is_on, self.is_stopping = False, self.is_on
        for look in self._stages:
            look()

    def watch_stop(self, look: Callable[[], None]) -> None:
        """Calls `look` when holding stops."""
        self._stages.append(look)

    def record(self) -> HeldTime | None:
        """Makes the record of a new request; None where nothing is held."""
        return HeldTime() if self.is_on else None

    def begin(self, service: str, size_bytes: int, tenant: str = "", request: HeldTime | None = None) -> Hold:
        """Holds an item of a tenant's request, whose record counts the time.

        Raises Overloaded for an item above the limit, and for a tenant that would take the rest from the
        others. The first item may be larger than the limit.
        """
        requests = self._requests.total
        has_room = self._requests.has_room(tenant) and (not requests or self._bytes.has_room(tenant, size_bytes))
        if not has_room:
            self._meters.counter(Metrics.HELD_ENDED, service, "refused").add()
            held, limit = f"{requests} requests", f"{self._requests.limit} (the gateway's max_held_requests)"
            if self._requests.has_room(tenant):
                held, limit = f"{self._bytes.total} bytes", f"{self._bytes.limit} (the gateway's max_held_bytes)"
            raise Overloaded(
                f"{held} are held until a process of the {service} service has their model, the limit is {limit}",
                _RETRY_AFTER_S,
            )
        self._requests.take(tenant)
        self._bytes.take(tenant, size_bytes)
        return Hold(self, service, size_bytes, tenant, request)

    def leave(self, service: str, size_bytes: int, tenant: str, held_ns: int, *, is_sent: bool) -> None:
        """Counts the end of a hold."""
        self._requests.give_back(tenant)
        self._bytes.give_back(tenant, size_bytes)
        self._meters.counter(Metrics.HELD_ENDED, service, "sent" if is_sent else "ended").add()
        self._meters.histogram(Metrics.HELD_DURATION, service).record(held_ns)
