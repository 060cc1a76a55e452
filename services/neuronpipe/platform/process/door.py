"""The contract of a door, the part of a process that speaks a protocol to callers."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from neuronpipe.core.callers import Caller
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight

# Answers the calls of one path. Its arguments are agreed between the door and the assembly of the process.
Handler: TypeAlias = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a caller shows of itself.

    `authorization`: as in HTTP's header of that name; empty without one. `names`: the subject alternative names of its
    certificate, which the door has verified. `on_behalf`: the tenant for which it calls; empty for its own.
    """

    authorization: str = ""
    names: tuple[str, ...] = ()
    on_behalf: str = ""


class Guard(Protocol):
    """Tells doors who calls. A door asks it before it reads a message; a door without one lets everybody in."""

    @property
    def open_services(self) -> Collection[str]:
        """What needs no credentials, of "health" and "reflection"."""

    def identify(self, credentials: Credentials) -> Caller:
        """The caller. Raises Unauthenticated, always with the same message."""


class Door(Protocol):
    """Takes calls of one protocol at one address. `port`: known once it listens."""

    port: int

    @property
    def services(self) -> Collection[str]:
        """The services whose health the door reports."""

    async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
        """Takes its address, reports `health`, and, if callers are to know that it starts, accepts their connections.

        From now on `in_flight` counts every call, and refuses calls beyond its limits and calls that come too late.
        Raises SetupError for an address that cannot be used.
        """

    def open(self, handlers: Mapping[str, Handler]) -> None:
        """Answers calls from now on, each path's by its handler. The door uses the handlers of its own paths.

        Raises SetupError where another process has begun to listen at its address.
        """

    def ask_to_leave(self) -> None:
        """Asks callers to send new calls elsewhere, and answers those that still come."""

    async def stop_listening(self, limit_s: float) -> None:
        """Takes no new connections. Returns once the callers of the others know that they are to leave, or after the
        limit; until then their calls are answered.
        """

    def drain(self) -> None:
        """Stops reading from open streams. What was read is still answered."""

    async def stop(self, grace_s: float) -> None:
        """Ends connections once their last responses have been sent, and after `grace_s` seconds in any case.

        May be called at any time.
        """
