"""What each core of a device has to do: the batch that it computes, those made ready behind it; and which cores are lost."""

import time
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class _Handed:
    """A batch that a core was handed, of whichever model, and how long it is expected to take."""

    expected_s: float
    owner: object


class Cores:
    """Keeps account of the batches on each core, of all models together.

    A core computes one batch at a time: what it is handed ahead waits for the one before. So a batch's time is counted from when the core
    was free for it, and the times of a core's batches never overlap.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._lost: set[int] = set()
        # Of each core: its batches, and since when it is at the first of them.
        self._handed: list[deque[_Handed]] = [deque() for _ in range(count)]
        self._since_ns = [0] * count
        # Cores that compute what cores were lost through, and nothing beside it.
        self._kept_apart: set[int] = set()

    @property
    def left(self) -> int:
        """Cores that are not lost."""
        return self.count - len(self._lost)

    @property
    def idle(self) -> int:
        """Cores that have nothing to do."""
        return sum(not batches and core not in self._lost for core, batches in enumerate(self._handed))

    @property
    def running(self) -> int:
        """Batches on all cores."""
        return sum(map(len, self._handed))

    def is_lost(self, core: int) -> bool:
        """Whether a core is no more."""
        return core in self._lost

    def is_idle(self, core: int) -> bool:
        """Whether a core has nothing to do."""
        return not self._handed[core]

    def may_take(self, core: int) -> bool:
        """Whether a core may take a batch: one that works takes the next ahead only while no other could begin it now."""
        return self.is_idle(core) or (core not in self._kept_apart and not self.idle)

    def busy_s(self, core: int) -> float:
        """How long a core is likely to need for what it has, which the next batch waits for."""
        return self._busy_s(core, None)

    def busy_with_others_s(self, owner: object) -> float:
        """How long it is likely to take until a core has nothing to do for others than this owner."""
        return min((self._busy_s(core, owner) for core in range(self.count) if core not in self._lost), default=0.0)

    def _busy_s(self, core: int, but: object) -> float:
        batches = self._handed[core]
        if not batches:
            return 0.0
        expected_s = sum(one.expected_s for one in batches if one.owner is not but)
        passed_s = (time.monotonic_ns() - self._since_ns[core]) / 1e9 if batches[0].owner is not but else 0.0
        return max(0.0, expected_s - passed_s)

    def begin(self, core: int, expected_s: float, owner: object = "", *, is_kept_apart: bool = False) -> None:
        """A core is handed a batch of an owner (of a model: its forecast) that is expected to take so long."""
        if self.is_idle(core):
            self._since_ns[core] = time.monotonic_ns()
        self._handed[core].append(_Handed(expected_s, owner))
        if is_kept_apart:
            self._kept_apart.add(core)

    def end(self, core: int) -> tuple[int, int]:
        """A batch has ended, or failed. Returns since when the core was at it, and now; on time.monotonic_ns()."""
        since_ns, self._since_ns[core] = self._since_ns[core], time.monotonic_ns()
        self._handed[core].popleft()
        self._kept_apart.discard(core)
        return since_ns, self._since_ns[core]

    def lose(self, core: int) -> bool:
        """Returns whether that is news."""
        is_news = core not in self._lost
        self._lost.add(core)
        return is_news
