"""Functions that are called after each change of an object."""

from collections.abc import Callable


class Changes:
    def __init__(self) -> None:
        self._watchers: list[Callable[[], None]] = []

    def watch(self, changed: Callable[[], None]) -> Callable[[], None]:
        """Calls `changed` after each change, until the returned function is called."""
        self._watchers.append(changed)
        return lambda: self._watchers.remove(changed)

    def notify(self) -> None:
        """Calls the watchers after a change. A watcher may end its own watch."""
        for changed in list(self._watchers):
            changed()
