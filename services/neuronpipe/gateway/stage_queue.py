"""The queue of one stage: a line for each model and priority, so models do not delay each other."""

import asyncio
import itertools
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from neuronpipe.core.generated import NewTokens, TokenSink
from neuronpipe.core.items import ModelKey, StageItem
from neuronpipe.core.tracing import SpanEvent
from neuronpipe.gateway.held_items import HeldItem

_MAX_ITEMS = 128
_MAX_BYTES = 1 << 20
# If this many endpoints died with an item, the item may be the reason. From then on it is sent without other suspects,
# which would die with it. A single death is not enough: all items of a process that was killed would have to be sent
# one by one.
_SUSPECT_LOSSES = 2


@dataclass(slots=True, eq=False)
class QueuedItem:
    """An item until its outcome is there. The result of `future` is the value or a NeuronpipeError.

    - `sink`: gets the tokens of a text.
    - `abandon`: tells the endpoint that works on the item that the caller has left.
    - `held`: set while the item is held because no endpoint has its model.
    """

    item_id: int
    item: StageItem
    sink: TokenSink | None = None
    cost_tokens: int = field(init=False)
    size_bytes: int = field(init=False)
    is_bulk: bool = field(init=False)
    future: asyncio.Future[Any] = field(init=False)
    abandon: Callable[[int], None] | None = None
    has_tokens: bool = False
    losses: int = 0
    is_returned: bool = False
    held: HeldItem | None = None
    events: list[SpanEvent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.cost_tokens = self.item.work.cost_tokens or 1
        self.size_bytes, self.is_bulk = self.item.size_bytes, self.item.call.is_bulk
        self.future = asyncio.get_running_loop().create_future()

    @property
    def is_suspect(self) -> bool:
        """Whether endpoints may have died because of the item."""
        return self.losses >= _SUSPECT_LOSSES

    def put(self, tokens: NewTokens) -> None:
        """Gives new tokens to the caller that waits."""
        self.has_tokens |= bool(tokens.token_ids)
        if self.sink and not self.future.done():
            self.sink.put(tokens)

    def resolve(self, outcome: object) -> None:
        """Gives the outcome to the caller that waits."""
        if not self.future.done():
            self.future.set_result(outcome)


_Line: TypeAlias = OrderedDict[int, QueuedItem]
_HasModel: TypeAlias = Callable[[ModelKey], bool]


class StageQueue:
    """The queue of one stage.

    A message gets one suspect at most, then interactive items, then bulk items. Among the lines of a priority, the line
    whose first item is the oldest goes first. Returned items are at the front of their line.
    """

    def __init__(self) -> None:
        # The tokens of the waiting items of each model, without suspects.
        self.cost_tokens: Counter[ModelKey] = Counter()
        self._suspects: _Line = OrderedDict()
        # A line begins with its first item and ends with its last, so no line is empty.
        self._interactive: defaultdict[ModelKey, _Line] = defaultdict(OrderedDict)
        self._bulk: defaultdict[ModelKey, _Line] = defaultdict(OrderedDict)

    def __iter__(self) -> Iterator[QueuedItem]:
        lines = [self._suspects, *self._interactive.values(), *self._bulk.values()]
        return itertools.chain.from_iterable(line.values() for line in lines)

    @property
    def has_suspects(self) -> bool:
        """Whether any suspect waits."""
        return bool(self._suspects)

    def append(self, queued: QueuedItem) -> None:
        """Adds an item at the end of its line, and counts it in."""
        self._line_of(queued)[queued.item_id] = queued
        self.cost_tokens[queued.item.model] += queued.cost_tokens

    def put_back(self, returned: Iterable[QueuedItem]) -> None:
        """Puts taken items back at the front of their lines, in their order."""
        for queued in reversed(list(returned)):
            if queued.is_suspect:
                line = self._suspects
                line[queued.item_id] = queued
            else:
                line = self._line_of(queued)
                self.append(queued)
            line.move_to_end(queued.item_id, last=False)

    def remove(self, queued: QueuedItem) -> None:
        """Removes an item at any position, in constant time. Does nothing if the item does not wait."""
        model, lines = queued.item.model, self._bulk if queued.is_bulk else self._interactive
        if queued.item_id in self._suspects:
            del self._suspects[queued.item_id]
        elif queued.item_id in lines.get(model, ()):
            del lines[model][queued.item_id]
            self._count_out(queued, model, lines)

    def has_any(self, has_model: _HasModel, *, takes_suspects: bool) -> bool:
        """Returns whether an item waits for an endpoint with these models."""
        return any(map(has_model, self.cost_tokens)) or bool(takes_suspects and self._first_suspect(has_model))

    def take(self, has_model: _HasModel, least_tokens: int, *, takes_suspects: bool) -> list[QueuedItem]:
        """Takes items for one message to an endpoint with these models.

        The items cost at least `least_tokens`, or fill the message, if there are that many.
        """
        taken: list[QueuedItem] = []
        if takes_suspects and (suspect := self._first_suspect(has_model)):
            self.remove(suspect)
            taken.append(suspect)
        cost_tokens = sum(queued.cost_tokens for queued in taken)
        size_bytes = sum(queued.size_bytes for queued in taken)
        for lines in (self._interactive, self._bulk):
            while len(taken) < _MAX_ITEMS and size_bytes < _MAX_BYTES and cost_tokens < least_tokens:
                model = _next_model(lines, has_model)
                if model is None:
                    break
                _, queued = lines[model].popitem(last=False)
                self._count_out(queued, model, lines)
                if not queued.future.done():  # otherwise the caller has just left
                    taken.append(queued)
                    cost_tokens += queued.cost_tokens
                    size_bytes += queued.size_bytes
        return taken

    def _count_out(self, queued: QueuedItem, model: ModelKey, lines: dict[ModelKey, _Line]) -> None:
        """Updates the counts after an item has left its line."""
        if not lines[model]:
            del lines[model]
        self.cost_tokens[model] -= queued.cost_tokens
        if not self.cost_tokens[model]:
            del self.cost_tokens[model]

    def _first_suspect(self, has_model: _HasModel) -> QueuedItem | None:
        suspects = self._suspects.values()
        return next((item for item in suspects if has_model(item.item.model) and not item.future.done()), None)

    def _line_of(self, queued: QueuedItem) -> _Line:
        return (self._bulk if queued.is_bulk else self._interactive)[queued.item.model]


def _next_model(lines: dict[ModelKey, _Line], has_model: _HasModel) -> ModelKey | None:
    """Returns the endpoint's model whose line goes first."""
    if len(lines) == 1:  # the usual case
        (model,) = lines
        return model if has_model(model) else None
    models = [model for model in lines if has_model(model)]
    if len(models) > 1:
        return min(models, key=lambda model: next(iter(lines[model])))
    return models[0] if models else None
