"""Records the work of each core of a device: the batch that it computes, those behind it, and whether it is lost."""

import time
from collections import deque
from dataclasses import dataclass


class CoresLost(Exception):
    """No core of a device is left. The process has to end."""


@dataclass(frozen=True, slots=True)
class _Handed:
    """A batch that a core was given, of any model, and its expected time."""

    expected_s: float
    owner: object


class Cores:
    """Records the batches on each core, of all models.

    A core computes one batch at a time; a batch that it is given ahead waits for the one before. So a batch's time
    counts from when the core was free for it, and the times of a core's batches never overlap.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lost: set[int] = set()
        # For each core: its batches, and when it began the first of them.
        self._handed: list[deque[_Handed]] = [deque() for _ in range(count)]
        self._since_ns = [0] * count
        # Cores that run a batch that may have caused the loss of a core. They get no other work meanwhile.
        self._kept_apart: set[int] = set()

    @property
    def left(self) -> int:
        """The number of cores that are not lost."""
        return self.count - len(self._lost)

    @property
    def idle(self) -> int:
        """The number of cores without work."""
        return sum(not batches and core not in self._lost for core, batches in enumerate(self._handed))

    @property
    def running(self) -> int:
        """The number of batches on all cores."""
        return sum(map(len, self._handed))

    def is_lost(self, core: int) -> bool:
        """Whether a core is lost."""
        return core in self._lost

    def is_idle(self, core: int) -> bool:
        """Whether a core has no work."""
        return not self._handed[core]

    def may_take(self, core: int) -> bool:
        """Whether a core may take a batch. A busy core takes one ahead only if no idle core could begin it now."""
        return self.is_idle(core) or (core not in self._kept_apart and not self.idle)

    def busy_s(self, core: int) -> float:
        """The expected time that a core needs for its batches. The next batch waits for it."""
        return self._busy_s(core, None)

    def busy_with_others_s(self, owner: object) -> float:
        """The expected time until a core has no work of owners other than this one."""
        return min((self._busy_s(core, owner) for core in range(self.count) if core not in self._lost), default=0.0)

    def _busy_s(self, core: int, but: object) -> float:
        batches = self._handed[core]
        if not batches:
            return 0.0
        expected_s = sum(one.expected_s for one in batches if one.owner is not but)
        passed_s = (time.monotonic_ns() - self._since_ns[core]) / 1e9 if batches[0].owner is not but else 0.0
        return max(0.0, expected_s - passed_s)

    def begin(self, core: int, expected_s: float, owner: object = "", *, is_kept_apart: bool = False) -> None:
        """Records a batch that a core is given, with its owner (a model's forecast) and its expected time."""
        if self.is_idle(core):
            self._since_ns[core] = time.monotonic_ns()
        self._handed[core].append(_Handed(expected_s, owner))
        if is_kept_apart:
            self._kept_apart.add(core)

    def end(self, core: int) -> tuple[int, int]:
        """Records that a batch has ended or failed. Returns when the core began it, and now, on time.monotonic_ns()."""
        since_ns, self._since_ns[core] = self._since_ns[core], time.monotonic_ns()
        self._handed[core].popleft()
        self._kept_apart.discard(core)
        return since_ns, self._since_ns[core]

    def lose(self, core: int) -> bool:
        """Records a lost core. Returns whether it was not lost before."""
        is_news = core not in self._lost
        self._lost.add(core)
        return is_news
