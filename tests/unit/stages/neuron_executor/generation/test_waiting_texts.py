"""generation/waiting_texts.py: what a step asks is the same as a search of all waiting texts would find."""

import asyncio
import random
from collections import Counter
from itertools import islice

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.stages.neuron_executor.generation.logit_rules import LogitRules
from neuronpipe.stages.neuron_executor.generation.sampling import TokenChooser
from neuronpipe.stages.neuron_executor.generation.sequence import (
    GeneratedSequence,
    Rank,
    SequenceCaller,
    TextRecord,
    TextRow,
)
from neuronpipe.stages.neuron_executor.generation.waiting_texts import WaitingTexts

_SEED = 20261201
_OPTIONS = GenerationOptions(max_new_tokens=8)
_CHOOSER = TokenChooser(LogitRules(_OPTIONS, 1, frozenset()))


def _text(rank: Rank, tenant: str, *, has_begun: bool = False) -> GeneratedSequence:
    caller = SequenceCaller(asyncio.get_running_loop().create_future(), tenant=tenant)
    text = GeneratedSequence(rank, [TextRow([1])], _OPTIONS, _CHOOSER, frozenset(), caller)
    text.record = TextRecord(started_ns=int(has_begun))
    return text


def _displaced(waiting: list[GeneratedSequence], text: GeneratedSequence) -> list[GeneratedSequence | None]:
    """The newest text that has not begun, of each tenant with most texts that may end for `text`."""
    may_end = [other for other in waiting if other.rank.is_bulk >= text.rank.is_bulk]
    counts = Counter(other.tenant for other in may_end)
    most = max(counts.values(), default=0)
    if most <= counts[text.tenant] + 1:
        return [None]
    unbegun = [other for other in may_end if not other.record.started_ns]
    return [
        max((other for other in unbegun if other.tenant == tenant), key=lambda other: other.rank, default=None)
        for tenant in counts
        if counts[tenant] == most
    ]


async def test_waiting_texts_are_those_of_a_sorted_list() -> None:
    generator = random.Random(_SEED)
    texts, expected = WaitingTexts(), list[GeneratedSequence]()
    for number in range(600):
        rank = Rank(generator.random() < 0.3, generator.random() < 0.3, number)
        text = _text(rank, generator.choice("aaabc"), has_begun=generator.random() < 0.2)
        for tenant in (None, text.tenant):
            before = [other for other in expected if other.rank < text.rank and tenant in (None, other.tenant)]
            assert texts.rows_before(text, tenant) == len(before)
        assert texts.displaced_by(text) in _displaced(expected, text)
        texts.add(text)
        expected.append(text)
        for leaving in [other for other in expected if generator.random() < 0.02]:
            for _ in range(2):
                texts.discard(leaving)
            expected.remove(leaving)
        expected.sort(key=lambda other: other.rank)
        assert [*texts] == expected
        assert len(texts) == len(expected)
        assert texts.first() is next(iter(expected), None)
        assert [*islice(texts, 3)] == expected[:3]
        tenants = {other.tenant for other in expected}
        assert {first.tenant: first for first in texts.firsts()} == {
            tenant: next(other for other in expected if other.tenant == tenant) for tenant in tenants
        }
    for text in expected:
        texts.discard(text)
    assert not texts
    assert texts.first() is None
    assert not texts._rows
