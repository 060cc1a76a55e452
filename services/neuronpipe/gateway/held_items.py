"""Held items: they wait in the gateway because their stage has no process, or no process with their model.

Without a limit of requests no item is held, and such requests fail at once.
"""

import time
from dataclasses import dataclass, field

from neuronpipe.core.changes import Changes
from neuronpipe.core.deadlines import HeldTime
from neuronpipe.core.errors import Overloaded
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.gateway.tenants.tenants import FairLimit

# The time that a caller beyond the limits is told to wait: processes take seconds to start.
_RETRY_AFTER_S = 1.0
# Memory for the messages of all held items.
MAX_HELD_BYTES = 64 << 20
# A tenant leaves at least a ninth to others.
_MOST_OF_THE_REST = 8


@dataclass(slots=True, eq=False)
class HeldItem:
    """One held item. `HeldItems` makes and ends it. `held_time`: the record of its request."""

    service: str
    size_bytes: int
    tenant: str
    held_time: HeldTime | None
    began_ns: int = field(default_factory=time.monotonic_ns)


class HeldItems:
    """The limits of the items that a gateway holds, for all of its stages together. Draining ends the held items.

    `stops`: its watchers are called when holding stops.
    """

    def __init__(self, max_requests: int = 0, max_bytes: int = MAX_HELD_BYTES, meters: Meters | None = None) -> None:
        self._meters = meters or Meters()
        self._requests, self._bytes = (FairLimit(limit, _MOST_OF_THE_REST) for limit in (max_requests, max_bytes))
        self.is_on = max_requests > 0
        self.is_stopping = False
        self.stops = Changes()
        if self.is_on:
            self._meters.gauge(Metrics.HELD, lambda: self._requests.total)

    async def stop(self) -> None:
        """Stops holding: stages end the items that they hold."""
        self.is_on, self.is_stopping = False, self.is_on
        self.stops.notify()

    def new_time(self) -> HeldTime | None:
        """Makes the held time of a new request; None where no item is held."""
        return HeldTime() if self.is_on else None

    def hold(self, service: str, size_bytes: int, tenant: str = "", held_time: HeldTime | None = None) -> HeldItem:
        """Holds an item of a tenant's request. `held_time`: counts the time for the request.

        Raises Overloaded for an item above the limit, and for a tenant that would take the rest from the others. The
        first item may be larger than the limit.
        """
        requests = self._requests.total
        has_place = self._requests.has_room(tenant)
        if not has_place or (requests and not self._bytes.has_room(tenant, size_bytes)):
            self._meters.counter(Metrics.HELD_ENDED, service, "refused").add()
            held, limit = f"{self._bytes.total} bytes", f"{self._bytes.limit}"
            if not has_place:
                held, limit = f"{requests} requests", f"{self._requests.limit} (the gateway's max_held_requests)"
            raise Overloaded(
                f"{held} are held until a process of the {service} service has their model, the limit is {limit}",
                _RETRY_AFTER_S,
            )
        self._requests.take(tenant)
        self._bytes.take(tenant, size_bytes)
        if held_time:
            held_time.items += 1
            held_time.service = service
        return HeldItem(service, size_bytes, tenant, held_time)

    def release(self, held: HeldItem, *, is_sent: bool) -> None:
        """Holds an item no longer: it is sent to a process, or its caller has left."""
        ended_ns = time.monotonic_ns()
        if held.held_time:
            held.held_time.add(held.began_ns, ended_ns)
            held.held_time.items -= 1
            if is_sent and not held.held_time.items:
                held.held_time.service = ""
        self._requests.give_back(held.tenant)
        self._bytes.give_back(held.tenant, held.size_bytes)
        self._meters.counter(Metrics.HELD_ENDED, held.service, "sent" if is_sent else "ended").add()
        self._meters.histogram(Metrics.HELD_DURATION, held.service).record(ended_ns - held.began_ns)
