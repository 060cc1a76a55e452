"""Which cores work, which have nothing to do, and which are lost."""


class Cores:
    """Counts the batches on each core."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._running = [0] * count
        self._lost: set[int] = set()

    @property
    def left(self) -> int:
        """Cores that are not lost."""
        return self.count - len(self._lost)

    @property
    def idle(self) -> int:
        """Cores that have nothing to do."""
        return sum(not running and core not in self._lost for core, running in enumerate(self._running))

    @property
    def running(self) -> int:
        """Batches on all cores."""
        return sum(self._running)

    def is_lost(self, core: int) -> bool:
        """Whether a core is no more."""
        return core in self._lost

    def may_take(self, core: int) -> bool:
        """Whether a core may take a batch: one that works takes the next ahead only while no other could begin it now."""
        return not self._running[core] or not self.idle

    def begin(self, core: int) -> None:
        """A batch begins."""
        self._running[core] += 1

    def end(self, core: int) -> None:
        """A batch ends."""
        self._running[core] -= 1

    def lose(self, core: int) -> bool:
        """Returns whether that is news."""
        is_news = core not in self._lost
        self._lost.add(core)
        return is_news
