"""The items that wait for one stage: a line for each model and priority, so that what waits for one model is not in another's way."""

import asyncio
import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, TypeAlias

from neuronpipe.core.items import ModelKey, StageItem
from neuronpipe.core.tracing import Event

_MAX_ITEMS = 128
_MAX_BYTES = 1 << 20
# An item that so many endpoints died with may be the reason: from then on it travels without others of its kind, so that it takes none of
# them along. Not from the first on: those of a process that was killed would each have to wait for the other.
_SUSPECT_LOSSES = 2


class ItemHolder(Protocol):
    """Who works on an item."""

    def abandon(self, item_id: int) -> None:
        """Notes that nobody waits for it any more."""


class QueuedItem:
    """An item until its outcome is there: the value or a NeuronpipeError is the result of `future`."""

    __slots__ = ("cost_tokens", "endpoint", "future", "is_bulk", "is_returned", "item", "item_id", "losses", "retries", "size_bytes")

    def __init__(self, item_id: int, item: StageItem) -> None:
        self.item_id = item_id
        self.item = item
        self.cost_tokens = item.call.cost_tokens or 1
        self.size_bytes = item.size_bytes
        self.is_bulk = item.call.is_bulk
        self.future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.endpoint: ItemHolder | None = None
        self.losses = 0
        self.is_returned = False
        self.retries: list[Event] = []

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what endpoints die of."""
        return self.losses >= _SUSPECT_LOSSES

    def end(self, outcome: object) -> None:
        """Tells whoever waits."""
        if not self.future.done():
            self.future.set_result(outcome)


_Line: TypeAlias = OrderedDict[int, QueuedItem]
_HasModel: TypeAlias = Callable[[ModelKey], bool]


class StageQueue:
    """Whoever takes from it gets suspects one by one, then interactive items before bulk, the oldest of all models first."""

    def __init__(self) -> None:
        # What waits, suspects apart, by the models that it is for.
        self.cost_tokens: Counter[ModelKey] = Counter()
        self._suspects: _Line = OrderedDict()
        self._interactive: dict[ModelKey, _Line] = {}
        self._bulk: dict[ModelKey, _Line] = {}

    def __iter__(self) -> Iterator[QueuedItem]:
        lines = [self._suspects, *self._interactive.values(), *self._bulk.values()]
        return itertools.chain.from_iterable(line.values() for line in lines)

    @property
    def has_suspects(self) -> bool:
        """Whether any suspect waits."""
        return bool(self._suspects)

    def append(self, queued: QueuedItem) -> None:
        """Adds a new item behind the others."""
        self._line_of(queued)[queued.item_id] = queued

    def put_back(self, returned: Iterable[QueuedItem]) -> None:
        """Adds items that were taken before in front of the others, in their order."""
        for queued in reversed(list(returned)):
            line = self._suspects if queued.is_suspect else self._line_of(queued)
            line[queued.item_id] = queued
            line.move_to_end(queued.item_id, last=False)

    def remove(self, queued: QueuedItem) -> None:
        """Takes an item out wherever it is, in constant time; does nothing where it is not here."""
        model, lines = queued.item.model, self._bulk if queued.is_bulk else self._interactive
        if queued.item_id in self._suspects:
            del self._suspects[queued.item_id]
        elif queued.item_id in lines.get(model, ()):
            del lines[model][queued.item_id]
            self._count_out(queued, model, lines)

    def has_any(self, has_model: _HasModel, *, takes_suspects: bool) -> bool:
        """Whether somebody with these models would find something."""
        return any(map(has_model, self.cost_tokens)) or bool(takes_suspects and self._oldest_suspect(has_model))

    def take(self, has_model: _HasModel, share_tokens: int, *, takes_suspects: bool) -> list[QueuedItem]:
        """Items for one message to somebody with these models: until they cost as much as the share, or fill the message."""
        taken: list[QueuedItem] = []
        if takes_suspects and (suspect := self._oldest_suspect(has_model)):
            self.remove(suspect)
            taken.append(suspect)
        cost_tokens = sum(queued.cost_tokens for queued in taken)
        size_bytes = sum(queued.size_bytes for queued in taken)
        for lines in (self._interactive, self._bulk):
            while len(taken) < _MAX_ITEMS and size_bytes < _MAX_BYTES and cost_tokens < share_tokens:
                model = _oldest(lines, has_model)
                if model is None:
                    break
                _, queued = lines[model].popitem(last=False)
                self._count_out(queued, model, lines)
                if not queued.future.done():  # else its caller left a moment ago
                    taken.append(queued)
                    cost_tokens += queued.cost_tokens
                    size_bytes += queued.size_bytes
        return taken

    def _count_out(self, queued: QueuedItem, model: ModelKey, lines: dict[ModelKey, _Line]) -> None:
        """After an item has left its line."""
        if not lines[model]:
            del lines[model]
        self.cost_tokens[model] -= queued.cost_tokens
        if not self.cost_tokens[model]:
            del self.cost_tokens[model]

    def _oldest_suspect(self, has_model: _HasModel) -> QueuedItem | None:
        return next((one for one in self._suspects.values() if has_model(one.item.model) and not one.future.done()), None)

    def _line_of(self, queued: QueuedItem) -> _Line:
        model, lines = queued.item.model, self._bulk if queued.is_bulk else self._interactive
        self.cost_tokens[model] += queued.cost_tokens
        line = lines.get(model)
        if line is None:
            line = lines[model] = OrderedDict()
        return line


def _oldest(lines: dict[ModelKey, _Line], has_model: _HasModel) -> ModelKey | None:
    """The model of the oldest item, of those that somebody has."""
    models = [model for model in lines if has_model(model)]
    if len(models) > 1:
        return min(models, key=lambda model: next(iter(lines[model])))
    return models[0] if models else None
