"""A queue in which groups take turns."""

from collections.abc import Iterator
from itertools import chain
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class GroupQueue(Generic[ItemT]):
    """Items in order of arrival within a group, such as a tenant. Groups take turns: a group with many items does not
    hold up the others. An item is hashable, and is in the queue once.
    """

    def __init__(self) -> None:
        self._groups: dict[str, dict[ItemT, None]] = {}  # the first group is next, and none is empty
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[ItemT]:
        """Iterates over the items, group by group."""
        return chain.from_iterable(self._groups.values())

    def put(self, group: str, item: ItemT) -> None:
        self._groups.setdefault(group, {})[item] = None
        self._count += 1

    def first(self) -> ItemT:
        """Returns the item that `take` would return. Raises StopIteration if the queue is empty."""
        return next(iter(next(iter(self._groups.values()))))

    def take(self) -> ItemT:
        """Takes the first item of the next group, which then queues up behind the others. Raises StopIteration if the
        queue is empty.
        """
        group, items = next(iter(self._groups.items()))
        item = next(iter(items))
        del items[item], self._groups[group]
        if items:
            self._groups[group] = items
        self._count -= 1
        return item

    def discard(self, group: str, item: ItemT) -> None:
        """Removes an item, if it is still in the queue."""
        items = self._groups.get(group, {})
        if item in items:
            del items[item]
            self._count -= 1
            if not items:
                del self._groups[group]
