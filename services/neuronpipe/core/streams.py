"""The values that travel over the stream between a gateway and a process of a stage."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from neuronpipe.core.items import ModelKey, StageItem

# An item's number, and the stage's value or a NeuronpipeError. The three stages have different types of values.
Outcome: TypeAlias = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class StageResponse:
    """One message of a stage's process.

    `kept_item_ids`: the items that a draining process still works on. `models`: the models of the process, if they have
    changed, and with them `problems`: why it could not load others, and `unloaded`: which are not in memory, and
    whether they are being loaded.
    """

    outcomes: Sequence[Outcome] = ()
    kept_item_ids: Sequence[int] | None = None
    models: frozenset[ModelKey] | None = None
    problems: Mapping[ModelKey, str] = field(default_factory=dict)
    unloaded: Mapping[ModelKey, bool] = field(default_factory=dict)


class Stream(Protocol):
    """An open stream to one process of a stage. Its methods raise Unavailable once it is lost."""

    @property
    def models(self) -> frozenset[ModelKey] | None:
        """The models that the process announced; None from a process of an older release, which gets every item."""

    @property
    def problems(self) -> Mapping[ModelKey, str]:
        """Why the process could not load others that it should have."""

    @property
    def unloaded(self) -> Mapping[ModelKey, bool]:
        """Which of the models are not in memory, and whether they are being loaded."""

    @property
    def retired(self) -> asyncio.Event:
        """Set when the process gets no new items."""

    async def send(
        self, items: Sequence[tuple[int, StageItem]], abandoned_item_ids: Sequence[int], size_bytes: int
    ) -> Sequence[Outcome]:
        """Sends items by their numbers. Returns the errors of those that cannot be sent. `size_bytes`: of all items."""

    async def tell_needed(self, models: frozenset[ModelKey]) -> None:
        """Says which models items may be sent for from now on. Not while something is being sent."""

    async def receive(self) -> StageResponse:
        """The next message."""


class AnnouncedModels(Protocol):
    """The models that a stage's process announces to gateways; see bundles/served.py."""

    @property
    def keys(self) -> frozenset[ModelKey]:
        """The models that are ready."""

    @property
    def problems(self) -> Mapping[ModelKey, str]:
        """Why others that should be are not."""

    @property
    def unloaded(self) -> Mapping[ModelKey, bool]:
        """Which of the models are loaded when an item for them comes, and whether they are being loaded."""

    def need(self, user: object, keys: frozenset[ModelKey] | None) -> None:
        """Says which models a gateway may send items for from now on; None: any."""

    def forget(self, user: object) -> None:
        """A gateway has gone."""

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Calls `changed` after each change, until the returned function is called."""
