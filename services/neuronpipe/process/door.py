"""What the life of a process asks of a door: of whatever speaks a protocol to callers."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol, TypeAlias

from neuronpipe.process.health import HealthBoard
from neuronpipe.process.in_flight import InFlight

# What answers the calls of one path. Its arguments are between the door and whoever assembles the process.
Handler: TypeAlias = Callable[..., Any]


class Door(Protocol):
    """Takes calls of one protocol at one address."""

    @property
    def services(self) -> Collection[str]:
        """The services whose health the door shows."""

    async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
        """Takes connections, shows `health`, and refuses calls as "starting". Raises SetupError for an address that cannot be used.

        From now on every call is counted by `in_flight`, which refuses what is too much, and what comes too late.
        """

    def open(self, handlers: Mapping[str, Handler]) -> None:
        """Answers calls, each path's by its handler; of those it takes what it knows."""

    def drain(self) -> None:
        """Reads nothing more from open streams; what was read is still answered."""

    async def stop(self, grace_s: float) -> None:
        """Ends connections once their last answers have left, and after `grace_s` seconds in any case. May be called at any time."""
