"""The values that travel over the stream between a gateway and a process of a stage."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from operator import add
from typing import Any, Protocol, TypeAlias

from neuronpipe.core.changes import Changes
from neuronpipe.core.items import ModelKey, StageItem

# An item's number, and the stage's value or a NeuronpipeError. The three stages have different types of values.
Outcome: TypeAlias = tuple[int, Any]


@dataclass(frozen=True, slots=True)
class Preparation:
    """The progress of preparing a model: shapes, shapes that are ready, graphs of single texts, their memory."""

    shapes: int = 0
    shapes_ready: int = 0
    lone_graphs: int = 0
    lone_graph_bytes: int = 0

    def __add__(self, other: "Preparation") -> "Preparation":
        return Preparation(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class ProcessModels:
    """The models of a stage's process.

    - `ready`: the models that the process serves, and gets items for.
    - `problems`: reasons why other models that should be ready are not.
    - `unloaded`: ready models that are loaded when an item for them arrives, and whether they are being loaded.
    - `prepared`: the progress of preparing each model.
    - `digests`: the digests of the bundles of ready models, as far as they are known.
    """

    ready: frozenset[ModelKey] = frozenset()
    problems: Mapping[ModelKey, str] = field(default_factory=dict)
    unloaded: Mapping[ModelKey, bool] = field(default_factory=dict)
    prepared: Mapping[ModelKey, Preparation] = field(default_factory=dict)
    digests: Mapping[ModelKey, str] = field(default_factory=dict)

    def without(self, problems: Mapping[ModelKey, str]) -> "ProcessModels":
        """Returns the models of the process without these models, which have problems."""
        return ProcessModels(
            self.ready - problems.keys(),
            {**self.problems, **problems},
            {key: is_loading for key, is_loading in self.unloaded.items() if key not in problems},
            {key: preparation for key, preparation in self.prepared.items() if key not in problems},
            self.digests,
        )


@dataclass(frozen=True, slots=True)
class StageResponse:
    """A message of a stage's process.

    - `kept_item_ids`: the items that a draining process still works on.
    - `models`: the models of the process, if they have changed.
    """

    outcomes: Sequence[Outcome] = ()
    kept_item_ids: Sequence[int] | None = None
    models: ProcessModels | None = None


class Stream(Protocol):
    """An open stream to a process of a stage. Its methods raise Unavailable after the stream is lost."""

    @property
    def models(self) -> ProcessModels:
        """The models that the process announced first."""

    @property
    def address(self) -> str:
        """The address of the process."""

    @property
    def retired(self) -> asyncio.Event:
        """Set when the process gets no new items."""

    async def send(
        self, items: Sequence[tuple[int, StageItem]], abandoned_item_ids: Sequence[int], size_bytes: int
    ) -> Sequence[Outcome]:
        """Sends items, `size_bytes` together, by their numbers. Returns the errors of items that cannot be sent."""

    async def tell_needed(self, models: frozenset[ModelKey]) -> None:
        """Tells the process the models of all items that may follow. Called while no other message is being sent."""

    async def receive(self) -> StageResponse:
        """Returns the next message."""


class ModelNeeds:
    """The models that each gateway may send items for; None: any model."""

    def __init__(self) -> None:
        self._by_gateway: dict[object, frozenset[ModelKey] | None] = {}
        self.changes = Changes()

    def set(self, gateway: object, keys: frozenset[ModelKey] | None) -> None:
        """Sets the models that a gateway may send items for from now on; None: any model."""
        self._by_gateway[gateway] = keys
        self.changes.notify()

    def forget(self, gateway: object) -> None:
        """Removes a gateway that has gone."""
        self._by_gateway.pop(gateway, None)
        self.changes.notify()

    def has(self, key: ModelKey) -> bool:
        """Returns whether a gateway may still send items for a model."""
        return any(keys is None or key in keys for keys in self._by_gateway.values())


class AnnouncedModels(Protocol):
    """The models that a stage's process announces to gateways; see bundles/served.py."""

    needs: ModelNeeds
    changes: Changes

    @property
    def announced(self) -> ProcessModels:
        """The models as they are now."""
