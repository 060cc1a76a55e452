"""The sequences that wait for their first or next step, by tenant."""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator

from neuronpipe.stages.neuron_executor.generation.sequence import GeneratedSequence, Rank

_PRIORITIES = (False, False), (False, True), (True, False), (True, True)


class WaitingTexts:
    """Sequences in order of their ranks.

    A step asks for the first sequences only. So its time does not grow with the number of sequences that wait.
    """

    def __init__(self) -> None:
        # By tenant, in order of rank; no list is empty.
        self._by_tenant: dict[str, list[GeneratedSequence]] = {}
        self._count = 0
        # The rows of the sequences by tenant (None: all) and by priority.
        self._rows: Counter[tuple[str | None, tuple[bool, bool]]] = Counter()

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[GeneratedSequence]:
        return heapq.merge(*self._by_tenant.values(), key=rank_of)

    def add(self, sequence: GeneratedSequence) -> None:
        insort(self._by_tenant.setdefault(sequence.tenant, []), sequence, key=rank_of)
        self._note(sequence, 1)

    def discard(self, sequence: GeneratedSequence) -> None:
        """Removes a sequence, if it waits."""
        texts = self._by_tenant.get(sequence.tenant, [])
        place = bisect_left(texts, sequence.rank, key=rank_of)
        if place < len(texts) and texts[place] is sequence:
            del texts[place]
            if not texts:
                del self._by_tenant[sequence.tenant]
            self._note(sequence, -1)

    def firsts(self) -> list[GeneratedSequence]:
        """Returns the first sequence of each tenant."""
        return [texts[0] for texts in self._by_tenant.values()]

    def first(self) -> GeneratedSequence | None:
        return min(self.firsts(), key=rank_of, default=None)

    def rows_before(self, sequence: GeneratedSequence, tenant: str | None) -> int:
        """Counts the rows of a tenant (None: all) before a new sequence, which is the last of its priority."""
        priority = sequence.rank.priority
        return sum(self._rows[tenant, other] for other in _PRIORITIES if other <= priority)

    def displaced_by(self, sequence: GeneratedSequence) -> GeneratedSequence | None:
        """Finds the sequence that ends so that a new sequence can wait: the newest of the tenant with most sequences.

        None unless that tenant has more sequences than the tenant of the new sequence would have. An interactive
        sequence never ends for a bulk sequence, and no sequence ends that has begun.
        """
        is_bulk = sequence.rank.is_bulk
        counts = {
            tenant: len(texts) - bisect_left(texts, is_bulk, key=lambda text: text.rank.is_bulk)
            for tenant, texts in self._by_tenant.items()
        }
        busiest = max(counts, key=lambda tenant: counts[tenant], default="")
        if counts.get(busiest, 0) <= counts.get(sequence.tenant, 0) + 1:
            return None
        return next(
            (
                text
                for text in reversed(self._by_tenant[busiest])
                if text.rank.is_bulk >= is_bulk and not text.record.started_ns
            ),
            None,
        )

    def _note(self, sequence: GeneratedSequence, count: int) -> None:
        self._count += count
        priority = sequence.rank.priority
        for key in ((None, priority), (sequence.tenant, priority)):
            self._rows[key] += count * sequence.most_rows
            if not self._rows[key]:
                del self._rows[key]


def rank_of(sequence: GeneratedSequence) -> Rank:
    """Returns the key by which sequences are sorted."""
    return sequence.rank
