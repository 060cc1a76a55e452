"""The contract of a door, the part of a process that speaks a protocol to callers."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from neuronpipe.core.callers import Caller
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight


@dataclass(frozen=True, slots=True)
class Credentials:
    """The credentials of a caller.

    - `authorization`: as in HTTP's header of that name; empty without the header.
    - `names`: the subject alternative names of the caller's certificate, which the door has verified.
    - `on_behalf`: the tenant for which the caller calls; empty: the caller's own tenant.
    """

    authorization: str = ""
    names: tuple[str, ...] = ()
    on_behalf: str = ""


class Guard(Protocol):
    """Identifies callers for doors, before they read a message. A door without a guard admits all callers."""

    @property
    def open_services(self) -> Collection[str]:
        """The services among "health" and "reflection" that need no credentials."""

    def identify(self, credentials: Credentials) -> Caller:
        """Returns the caller. Raises Unauthenticated, always with the same message."""


class Door(Protocol):
    """Accepts calls of one protocol at one address. `port`: known after it listens.

    A door is starting until its own method `open` gives it its rpcs or routes, each with its handler.
    """

    port: int

    @property
    def services(self) -> Collection[str]:
        """The services whose health the door reports."""

    async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
        """Takes the door's address and reports `health`. A door that tells callers that it starts also accepts
        connections.

        From now on `in_flight` counts every call, and refuses calls beyond its limits and calls that come too late.
        Raises SetupError if the address cannot be used.
        """

    def ask_to_leave(self) -> None:
        """Asks callers to send new calls elsewhere, and answers calls that still come."""

    async def stop_listening(self, limit_s: float) -> None:
        """Stops accepting connections. Returns when the callers of all connections know that they are to leave, or
        after the limit; until then their calls are answered.
        """

    def drain(self) -> None:
        """Stops reading from open streams. Messages that were read are still answered."""

    async def stop(self, grace_s: float) -> None:
        """Ends connections after their last responses have been sent, and after `grace_s` seconds in any case.

        Callable at any time.
        """
