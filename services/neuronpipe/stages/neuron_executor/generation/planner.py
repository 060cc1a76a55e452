"""Plans the steps: which tokens of which sequences are computed next, and in which blocks.

Sequences join and leave at every step. Sequences that are being answered get their next token in every step. Prompts
get the rest of the step's token budget in parts, the oldest first, but only as many tokens as delay the answers little.
If blocks run out, the youngest sequence of the tenant with most blocks gives its blocks back, and is computed again
later; interactive sequences count as older than bulk. At least one sequence always advances, because the planner takes
no sequence that the whole cache could not hold. Tenants have shares of rows and blocks, see tenant_shares.py; many rows
of a tenant take turns beside another tenant's few rows. The planner knows no model and no transport.
"""

import time
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import islice

from neuronpipe.stages.neuron_executor.generation.blocks import BlockPool
from neuronpipe.stages.neuron_executor.generation.held_blocks import HeldBlocks
from neuronpipe.stages.neuron_executor.generation.pace import Pace
from neuronpipe.stages.neuron_executor.generation.sequence import GeneratedSequence, Rank
from neuronpipe.stages.neuron_executor.generation.tenant_shares import DUE_TOKENS, PATIENCE_S, TenantShares, split
from neuronpipe.stages.neuron_executor.generation.waiting_texts import WaitingTexts, rank_of
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderRun


@dataclass(slots=True)
class _Step:
    """The step that is being planned. `room`: tokens that it may still get. `spare_scores`: scores that it may still
    get beyond the scores after one token of each text. `counts`: tokens of each row of a sequence.
    """

    room: int
    spare_scores: int
    counts: dict[GeneratedSequence, int] = field(default_factory=dict)
    reads_source: bool = False

    def add(self, sequence: GeneratedSequence, count: int) -> None:
        self.counts[sequence] = count
        self.room -= count * len(sequence.rows) + sequence.source.unread
        self.reads_source = self.reads_source or sequence.source.unread > 0
        if sequence.prompt_scores:
            self.spare_scores -= count - 1

    def remove(self, sequence: GeneratedSequence) -> None:
        """Removes a preempted sequence. Other sequences may get its tokens."""
        self.room += self.counts.pop(sequence, 0) * len(sequence.rows)


class _Preemptable(Enum):
    """The tenants whose sequences may give their rows and blocks to a waiting sequence."""

    OVER_SHARE = auto()
    ALL = auto()


class Planner:
    def __init__(self, pool: BlockPool, pace: Pace, max_sequences: int, step_tokens: int, spare_scores: int) -> None:
        """`max_sequences`: limit of rows in a step. `step_tokens`: limit of a step's tokens, at least one per row.

        `spare_scores`: scores of prompts and drafts in a step, beyond the scores after one token of each text.
        """
        self.blocks = HeldBlocks(pool)
        self._max_sequences = max_sequences
        self._step_tokens = max(step_tokens, max_sequences)
        self._spare_scores = spare_scores
        self.pace = pace
        # Number of texts that run side by side while others wait: fewer than the limit if they need the whole cache.
        self._places = max_sequences
        self.waiting = WaitingTexts()
        self.running: list[GeneratedSequence] = []  # sorted by rank
        self.preemptions = 0
        self._shares = TenantShares((max_sequences, pool.count))

    def __iter__(self) -> Iterator[GeneratedSequence]:
        yield from self.running
        yield from self.waiting

    def add(self, sequence: GeneratedSequence) -> None:
        """Adds a sequence that the cache could hold to the waiting sequences."""
        self.waiting.add(sequence)

    def remove(self, sequence: GeneratedSequence) -> None:
        """Removes a sequence, and frees its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.discard(sequence)
        self.blocks.give_back(sequence)

    def plan(self) -> dict[GeneratedSequence, list[DecoderRun]]:
        """Plans the next step; empty if there is no sequence."""
        self._shares.count(self.running, self.waiting.firsts())
        # Sequences with one token left come first: each costs one token of the budget, and a reader waits for it.
        answered = self._due([running for running in self.running if running.left == 1])
        reading = [running for running in self.running if running.left > 1]
        step = _Step(self._most_tokens(answered, reading), self._spare_scores)
        parts = self._reading_parts(step.room, answered, reading)
        self._places = self._max_sequences
        for sequence in (*answered, *reading):
            if sequence in self.running:  # a sequence before it may have preempted it
                self._continue(sequence, step, parts)
        while self._begin_next(step):
            pass
        self._add_drafts(answered, step)
        return {sequence: self._runs(sequence, count) for sequence, count in step.counts.items()}

    def _due(self, answered: Sequence[GeneratedSequence]) -> Sequence[GeneratedSequence]:
        """Returns the texts that get their next token in this step: all, if one tenant has them.

        Beside another tenant's rows, a tenant's rows take turns: they take at most as long, relative to the tenants'
        weights, as a step of the other tenant alone.
        """
        rows, weights = Counter[str](), dict[str, float]()
        for running in self.running:
            rows[running.tenant] += len(running.rows)
            weights[running.tenant] = running.weight
        if len(rows) < 2:
            return answered
        # The rows that take as long as a step of each tenant alone, by its weight.
        alone = {tenant: (self.pace.overhead_rows + rows[tenant]) / weights[tenant] for tenant in rows}
        shortest, next_shortest, *_ = sorted(alone.values())
        planned, due = Counter[str](), set[GeneratedSequence]()
        for text in sorted(answered, key=lambda text: (text.record.last_token_ns, text.record.steps)):
            most_rows = text.weight * (next_shortest if alone[text.tenant] == shortest else shortest)
            if not planned[text.tenant] or planned[text.tenant] + len(text.rows) <= most_rows:
                planned[text.tenant] += len(text.rows)
                due.add(text)
        return [text for text in answered if text in due]

    def _continue(self, sequence: GeneratedSequence, step: _Step, parts: dict[str, int]) -> None:
        """Adds a running sequence to a step, with as many tokens as the step and its tenant's part have room for."""
        rows, max_tokens = len(sequence.rows), step.room
        if sequence.left > 1:
            max_tokens = min(max_tokens, max(rows, parts.get(sequence.tenant, max_tokens)))
        # A search alone may have more rows than the step has tokens.
        least = 0 if step.counts else 1
        count = min(sequence.left_with(step.spare_scores), max(least, max_tokens // rows))
        if count and self._hold(sequence, count, step):
            step.add(sequence, count)
            if sequence.left > 1 and parts:
                parts[sequence.tenant] -= count * rows

    def _begin_next(self, step: _Step) -> bool:
        """Adds the next waiting sequence to a step. Returns whether it has begun, so that another may follow."""
        sequence = self._next()
        if not sequence or (step.counts and step.room < len(sequence.rows)):
            return False
        self._make_room(sequence, step)
        if not self._has_room_for(sequence):
            return False
        self.blocks.share(sequence)
        count = min(sequence.left_with(step.spare_scores), max(1, step.room // len(sequence.rows)))
        # A source is read as a whole. So the first source may be longer than the step, and a further source must fit.
        if step.reads_source and sequence.source.unread > step.room - count * len(sequence.rows):
            self.blocks.give_back(sequence)
            return False
        missing = self.blocks.missing(sequence, count)
        self._make_room(sequence, step, missing)
        if missing > self.blocks.free:
            self.blocks.give_back(sequence)
            self._places = max(1, self._rows)
            return False
        if self._preemptable(sequence) is _Preemptable.ALL:
            sequence.kept_tokens = sequence.generated + DUE_TOKENS
        self.waiting.discard(sequence)
        self.blocks.take(sequence, count, missing)
        self._shares.add(sequence, sequence.most_rows, sequence.blocks_held)
        insort(self.running, sequence, key=rank_of)
        step.add(sequence, count)
        return True

    def _add_drafts(self, answered: Sequence[GeneratedSequence], step: _Step) -> None:
        """Adds drafts to the planned texts that are being answered, if blocks are free."""
        # Drafts beyond this number of tokens take longer than they save.
        room = min(step.room, step.spare_scores, self.pace.part_tokens)
        for sequence in answered:
            drafts, max_tokens = sequence.drafts, min(room, sequence.options.max_new_tokens - sequence.generated - 1)
            is_answered = sequence in step.counts and sequence.computed + 1 == len(sequence.token_ids)
            if not drafts.lookup or not is_answered or max_tokens < 1:
                continue
            draft = drafts.lookup.draft(sequence.token_ids, max_tokens)
            missing = self.blocks.missing(sequence, 1 + len(draft))
            if missing <= self.blocks.free:
                self.blocks.take(sequence, 1 + len(draft), missing)
                drafts.token_ids = draft
                room -= len(draft)

    def wait_s(self, sequence: GeneratedSequence) -> float:
        """Forecasts the time until a new sequence's first step.

        The sequence waits behind all sequences, or within its tenant's share only behind its tenant's sequences.
        """
        tenant_rows = sum(running.most_rows for running in self.running if running.tenant == sequence.tenant)
        rows = self._rows + self.waiting.rows_before(sequence, None) + sequence.most_rows
        tenant_rows += self.waiting.rows_before(sequence, sequence.tenant) + sequence.most_rows
        share, _ = self._shares.share_of(sequence.tenant, sequence.weight)
        text_s = self._shares.text_s(sequence.tenant)
        return min(
            self.pace.wait_s(rows, self._places), self.pace.wait_s(tenant_rows, min(share, self._places), text_s)
        )

    def note_text(self, sequence: GeneratedSequence, took_s: float) -> None:
        """Notes that a text is complete. `took_s`: time since its first step began."""
        self.pace.note_text(took_s)
        self._shares.note_text(sequence.tenant, took_s)

    def finish(self, sequence: GeneratedSequence, count: int) -> None:
        """Notes that `count` more tokens of a sequence are computed, and publishes the blocks that became full."""
        sequence.computed += count
        sequence.record.steps += 1
        if sequence.source.unread:
            sequence.source.is_read = True
            self.blocks.publish_source(sequence)
        self.blocks.publish(sequence)

    def _reading_parts(
        self, room: int, answered: Sequence[GeneratedSequence], reading: Sequence[GeneratedSequence]
    ) -> dict[str, int]:
        """Divides the prompt tokens of the next step among the tenants; empty if there is only one tenant.

        The next waiting text counts for its tenant.
        """
        needs = Counter[str]()
        if not reading or not self._shares.are_several:
            return needs
        for sequence in (*reading, *filter(None, [self._next()])):
            needs[sequence.tenant] += sequence.left * len(sequence.rows)
        return split(max(0, room - sum(len(sequence.rows) for sequence in answered)), needs)

    def _next(self) -> GeneratedSequence | None:
        if not self._shares.are_several:
            return self.waiting.first()
        return min(
            self.waiting.firsts(),
            key=lambda first: (
                first.rank.is_bulk,
                not self._preemptable(first),
                self._shares.part(first.tenant),
                first.rank,
            ),
            default=None,
        )

    def _preemptable(self, sequence: GeneratedSequence) -> _Preemptable | None:
        """Returns the tenants whose rows and blocks a waiting sequence may get, if any; all after a long wait."""
        if not self._shares.are_several:
            return None
        # The whole text counts: texts larger than their shares would preempt each other before the first token.
        blocks = sequence.blocks_held + self.blocks.missing(sequence, len(sequence.token_ids) - sequence.computed)
        if self._shares.fits(sequence, sequence.most_rows, blocks):
            return _Preemptable.OVER_SHARE
        is_due = time.monotonic() - sequence.waits_since_s > PATIENCE_S
        return _Preemptable.ALL if is_due and not self._shares.rows_of(sequence.tenant) else None

    def _victim(self, sequence: GeneratedSequence, tenants: _Preemptable) -> GeneratedSequence | None:
        """Chooses the youngest sequence of the tenant with the largest part, to make room for another tenant."""
        candidates = [
            running
            for running in self.running
            if running.tenant != sequence.tenant
            and running.rank.is_bulk >= sequence.rank.is_bulk
            and not running.is_kept
            and (tenants is _Preemptable.ALL or self._shares.is_over(running))
        ]
        return max(candidates, key=lambda running: (self._shares.part(running.tenant), running.rank), default=None)

    def _make_room(self, sequence: GeneratedSequence, step: _Step, missing: int = 0) -> None:
        """Preempts sequences until a waiting sequence has rows and its missing blocks, or none may be preempted."""
        while missing > self.blocks.free or not self._has_room_for(sequence):
            tenants = self._preemptable(sequence)
            if not tenants or not (victim := self._victim(sequence, tenants)):
                break
            self._preempt(victim, step)

    def _hold(self, sequence: GeneratedSequence, count: int, step: _Step) -> bool:
        """Gets blocks for `count` more tokens, if needed from younger sequences, and at last preempts the sequence.

        Returns whether the sequence still runs.
        """
        while (missing := self.blocks.missing(sequence, count)) > self.blocks.free:
            youngest = max(self.running, key=self._superfluity) if self._shares.are_several else self.running[-1]
            self._preempt(youngest, step)
            if youngest is sequence:
                return False
        if missing:
            self.blocks.take(sequence, count, missing)
            self._shares.add(sequence, 0, missing)
        return True

    def _superfluity(self, sequence: GeneratedSequence) -> tuple[bool, float, Rank]:
        """Returns a sort key: the sequence with the largest key makes room first. The oldest kept sequence stays."""
        return sequence.rank.is_bulk, -1 if sequence.is_kept else self._shares.part(sequence.tenant), sequence.rank

    def _preempt(self, sequence: GeneratedSequence, step: _Step) -> None:
        step.remove(sequence)
        self.running.remove(sequence)
        self._shares.add(sequence, -sequence.most_rows, -sequence.blocks_held)
        self.blocks.give_back(sequence)
        sequence.waits_since_s = time.monotonic()
        sequence.record.preempted_ns.append(time.monotonic_ns())
        self.preemptions += 1
        self.add(sequence)

    @property
    def _rows(self) -> int:
        return sum(running.most_rows for running in self.running)

    def _most_tokens(self, answered: Sequence[GeneratedSequence], reading: Sequence[GeneratedSequence]) -> int:
        """Returns the most tokens of the next step: few prompt tokens, so that texts being answered wait little.

        Unread bulk texts do not make interactive texts wait longer.
        """
        if not answered:
            return self._step_tokens
        last, rows = answered[0].rank.last_of_priority, sum(len(sequence.rows) for sequence in answered)
        following = islice(self.waiting, max(0, self._max_sequences - self._rows))
        unread = sum(sequence.rank < last for sequence in (*reading, *following))
        return int(min(self._step_tokens, rows + self.pace.most_read_tokens(len(answered), unread)))

    def _has_room_for(self, sequence: GeneratedSequence) -> bool:
        rows = self._rows + sequence.most_rows
        if not self._rows or rows > self._max_sequences:
            return not self._rows
        if not self._shares.are_several or self._preemptable(sequence):
            return True
        kept_rows, kept_blocks = self._shares.kept_for_others(sequence.tenant)
        blocks = self.blocks.missing(sequence, sequence.left)
        return rows + kept_rows <= self._max_sequences and blocks + kept_blocks <= self.blocks.free

    @staticmethod
    def _runs(sequence: GeneratedSequence, count: int) -> list[DecoderRun]:
        end, draft = sequence.computed + count, sequence.drafts.token_ids
        scored = count if sequence.prompt_scores else int(end == len(sequence.token_ids))
        return [
            DecoderRun(
                token_ids=row.token_ids[sequence.computed : end] + draft,
                past=sequence.computed,
                blocks=row.blocks,
                scored=scored + len(draft),
                source_tokens=len(sequence.source.token_ids),
                source_blocks=sequence.source.blocks,
            )
            for row in sequence.rows
        ]
