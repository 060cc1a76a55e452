"""The shares of tenants in the rows of steps and in the blocks of the cache: which text is next, and which makes room.

A tenant alone has everything. If several tenants have texts, a text within its tenant's share gets room from tenants
that have more than their shares. A tenant keeps the part of its share that it used a moment ago, so that other tenants'
texts are not preempted again and again.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from neuronpipe.stages.neuron_executor.generation.pace import mean
from neuronpipe.stages.neuron_executor.generation.sequence import GeneratedSequence

# For this time after its last text, a tenant still has a share, and keeps the part of it that it used.
_RECENT_S = 2.0
# A text that is larger than its tenant's share gets room after PATIENCE_S if its tenant has no other rows, and is not
# preempted before it has DUE_TOKENS new tokens.
PATIENCE_S, DUE_TOKENS = 5.0, 32


@dataclass(slots=True)
class _TenantUse:
    """The [rows, blocks] that a tenant uses, and the most of each in the last moments.

    `text_s`: the mean time of the tenant's recent texts; 0 before the first has ended.
    """

    weight: float = 1.0
    used: list[int] = field(default_factory=lambda: [0, 0])
    peak: list[int] = field(default_factory=lambda: [0, 0])
    peak_s: list[float] = field(default_factory=lambda: [0.0, 0.0])
    seen_s: float = 0.0
    text_s: float = 0.0


class TenantShares:
    """The shares of one model. `limits`: all rows of a step, and all blocks."""

    def __init__(self, limits: tuple[int, int], clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._tenants: dict[str, _TenantUse] = {}
        self._weights = 0.0

    @property
    def are_several(self) -> bool:
        """Whether more than one tenant has texts, or had texts a moment ago."""
        return len(self._tenants) > 1

    def count(self, running: Iterable[GeneratedSequence], waiting: Iterable[GeneratedSequence]) -> None:
        """Counts the rows and blocks of all tenants again."""
        now_s, tenants, running = self._clock(), self._tenants, [*running]
        for text in (*running, *waiting):
            use = tenants.get(text.tenant) or tenants.setdefault(text.tenant, _TenantUse())
            use.weight, use.seen_s = text.weight, now_s
        for use in tenants.values():
            use.used = [0, 0]
        for text in running if len(tenants) > 1 else ():
            self.add(text, text.most_rows, text.blocks_held)
        for use in tenants.values():
            for kind, used in enumerate(use.used):
                if used >= use.peak[kind] or now_s - use.peak_s[kind] > _RECENT_S:
                    use.peak[kind], use.peak_s[kind] = used, now_s
        self._tenants = {name: use for name, use in tenants.items() if now_s - use.seen_s <= _RECENT_S}
        self._weights = sum(use.weight for use in self._tenants.values())

    def add(self, text: GeneratedSequence, rows: int, blocks: int) -> None:
        """Adds rows and blocks to the use of a text's tenant. Negative numbers: the text gives them back."""
        used = self._tenants[text.tenant].used
        used[0] += rows
        used[1] += blocks

    def share_of(self, tenant: str, weight: float) -> tuple[int, int]:
        """Returns the rows and blocks of a tenant's share, at least one row and one block."""
        use = self._tenants.get(tenant)
        part = weight / (self._weights + (0 if use else weight))
        rows, blocks = self._limits
        return max(1, int(part * rows)), max(1, int(part * blocks))

    def part(self, tenant: str) -> float:
        """Returns the part of all rows or blocks that a tenant uses, relative to its weight."""
        use = self._tenants[tenant]
        return max(used / limit for used, limit in zip(use.used, self._limits, strict=True)) / use.weight

    def note_text(self, tenant: str, took_s: float) -> None:
        """Notes a complete text of a tenant. `took_s`: time since its first step began."""
        use = self._tenants[tenant]
        use.text_s = mean(use.text_s, took_s)

    def text_s(self, tenant: str) -> float:
        """Returns the mean time of a tenant's recent texts; 0 if it is not known."""
        return self._tenants[tenant].text_s if tenant in self._tenants else 0.0

    def rows_of(self, tenant: str) -> int:
        return self._tenants[tenant].used[0] if tenant in self._tenants else 0

    def fits(self, text: GeneratedSequence, rows: int, blocks: int) -> bool:
        """Returns whether a text with `rows` and `blocks` more is within its tenant's share."""
        use, share = self._tenants[text.tenant], self.share_of(text.tenant, text.weight)
        return all(used + more <= limit for used, more, limit in zip(use.used, (rows, blocks), share, strict=True))

    def is_over(self, text: GeneratedSequence) -> bool:
        return not self.fits(text, 0, 0)

    def kept_for_others(self, tenant: str) -> tuple[int, int]:
        """Counts the rows and blocks that other tenants used a moment ago, up to their shares, and do not use now."""
        reserved = [0, 0]
        for name, use in self._tenants.items():
            if name != tenant:
                for kind, share in enumerate(self.share_of(name, use.weight)):
                    reserved[kind] += max(0, min(use.peak[kind], share) - use.used[kind])
        return reserved[0], reserved[1]


def split(room: int, needs: dict[str, int]) -> dict[str, int]:
    """Distributes room by needs: a tenant gets all that it needs, or an equal part of what smaller needs leave."""
    parts: dict[str, int] = {}
    for number, (name, need) in enumerate(sorted(needs.items(), key=lambda pair: pair[1])):
        parts[name] = min(need, room // (len(needs) - number))
        room -= parts[name]
    return parts
