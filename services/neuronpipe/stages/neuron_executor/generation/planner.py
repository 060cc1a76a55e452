"""Plans the steps: which tokens of which sequences are computed next, and in which blocks.

Sequences join and leave at every step. Sequences that are being answered get their next token in every step. Prompts
get the rest of the step's token budget in parts, the oldest first, but only as many tokens as delay the answers little.
If blocks run out, the youngest sequence of the tenant with most blocks gives its blocks back, and is computed again
later; interactive sequences count as older than bulk. At least one sequence always advances, because the planner takes
no sequence that the whole cache could not hold. Tenants have shares of rows and blocks, see tenant_shares.py. The
planner knows no model and no transport.
"""

import asyncio
import time
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from hashlib import blake2b

from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.generated import TokenLogprobs, TokenSink
from neuronpipe.core.tracing import Link, SpanContext
from neuronpipe.stages.neuron_executor.generation.beams import BeamSearch, BeamStep
from neuronpipe.stages.neuron_executor.generation.blocks import BlockPool, block_digests
from neuronpipe.stages.neuron_executor.generation.pace import Pace
from neuronpipe.stages.neuron_executor.generation.prompt_lookup import PromptLookup
from neuronpipe.stages.neuron_executor.generation.sampling import TokenChooser
from neuronpipe.stages.neuron_executor.generation.tenant_shares import DUE_TOKENS, PATIENCE_S, TenantShares, split
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderRun


@dataclass(slots=True)
class TextRow:
    """A text of a sequence, alone or in a search. `token_ids`: the prompt and all tokens so far.

    A block that several rows hold counts as several uses. A block that is not full is copied before a second row writes
    to it.
    """

    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class GeneratedSequence:
    """A text that is being generated, or several texts of one length among which a search finds the best.

    - `rows`: these texts. `computed`: number of their tokens whose keys and values are in their blocks.
    - `rank`: sequences of lower rank go first: interactive before bulk, tenants within their shares before others, and
      then the older sequence. `deadline_s`: a time of time.monotonic(). `future`: ends with the finish reason.
    - `digests`: see block_digests; for blocks that are full or will be. `published`: number of blocks that other texts
      can share. `scope`: see block_digests; it contains the source.
    - `source_ids`: the text that the model reads first, if it has an encoder. `source_blocks` hold it once it
      `is_read`.
    - `prompt_logprobs`: log probabilities of the prompt's tokens except the first, if the sequence `scores_prompt`. A
      step scores at most `most_scored` of them.
    - `lookup`: makes the `draft` of the planned step, see prompt_lookup.py. `drafted`: tokens of all drafts so far, of
      which `accepted` were right.
    - `trace`: the context of its span, if its request is sampled. `links`: links from the span to some of its steps.
    - `tenant`: the tenant of its caller, whose share has the size `weight`. `waits_since_s`: a time of
      time.monotonic(). `kept_tokens`: number of new tokens before which no text of another tenant preempts it.
    """

    rank: tuple[bool, bool, int]
    rows: list[TextRow]
    options: GenerationOptions
    chooser: TokenChooser | BeamSearch
    end_token_ids: frozenset[int]
    deadline_s: float
    scope: str
    stream: TokenSink | None
    future: "asyncio.Future[int]"
    source_ids: Sequence[int] = ()
    source_blocks: list[int] = field(default_factory=list)
    is_read: bool = False
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    prompt_tokens: int = 0
    computed: int = 0
    digests: list[bytes] = field(default_factory=list)
    published: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    scores_prompt: bool = False
    most_scored: int = 1
    lookup: PromptLookup | None = None
    draft: list[int] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    cached_tokens: int = 0
    preempted_ns: list[int] = field(default_factory=list)
    trace: SpanContext | None = None
    links: list[Link] = field(default_factory=list)
    started_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    longest_gap_ns: int = 0
    tenant: str = ""
    weight: float = 1.0
    waits_since_s: float = field(default_factory=time.monotonic)
    kept_tokens: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.token_ids)
        self.scores_prompt = self.options.prompt_logprobs

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the first text."""
        return self.rows[0].token_ids

    @property
    def most_rows(self) -> int:
        """The number of texts that may be searched side by side."""
        return max(1, self.options.num_beams)

    @property
    def blocks_held(self) -> int:
        """The number of different blocks that the sequence holds."""
        if len(self.rows) == 1:
            return len(self.source_blocks) + len(self.rows[0].blocks)
        return len(self.source_blocks) + len({block for row in self.rows for block in row.blocks})

    @property
    def most_tokens(self) -> int:
        """The tokens of the prompt, and of the longest text that may follow."""
        return self.prompt_tokens + self.options.max_new_tokens

    @property
    def input_tokens(self) -> int:
        """The number of tokens that the caller sent."""
        return len(self.source_ids) or self.prompt_tokens

    @property
    def unread(self) -> int:
        """The tokens of a source that the model must read before it computes anything else."""
        return 0 if self.is_read else len(self.source_ids)

    @property
    def generated(self) -> int:
        """The number of tokens that were generated."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def is_kept(self) -> bool:
        """Whether texts of other tenants may not preempt the sequence now."""
        return self.generated < self.kept_tokens

    @property
    def left(self) -> int:
        """The tokens to compute before the next token can be chosen; at most `most_scored` of a scored prompt."""
        uncomputed_tokens = len(self.token_ids) - self.computed
        return min(uncomputed_tokens, self.most_scored) if self.scores_prompt else uncomputed_tokens

    def left_with(self, spare_scores: int) -> int:
        """As `left`, in a step that has room for `spare_scores` further scores."""
        return min(self.left, 1 + spare_scores) if self.scores_prompt else self.left

    @property
    def figures(self) -> GenerationFigures:
        """The times and counts of the text so far."""
        return GenerationFigures(
            queue_ns=max(0, self.started_ns - self.arrived_ns),
            prefill_ns=max(0, self.first_token_ns - self.started_ns),
            decode_ns=self.last_token_ns - self.first_token_ns,
            longest_gap_ns=self.longest_gap_ns,
            steps=self.steps,
            cached_tokens=self.cached_tokens,
        )

    def note(self, now_ns: int) -> None:
        if self.first_token_ns:
            self.longest_gap_ns = max(self.longest_gap_ns, now_ns - self.last_token_ns)
        else:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns


class _Preemptable(Enum):
    """The tenants whose sequences may give their rows and blocks to a waiting sequence."""

    OVER_SHARE = auto()
    ALL = auto()


class Planner:
    def __init__(self, pool: BlockPool, pace: Pace, max_sequences: int, step_tokens: int, spare_scores: int) -> None:
        """`max_sequences`: limit of rows in a step. `step_tokens`: limit of a step's tokens, at least one per row.

        `spare_scores`: scores of prompts and drafts in a step, beyond the scores after one token of each text.
        """
        self._pool = pool
        self._max_sequences = max_sequences
        self._step_tokens = max(step_tokens, max_sequences)
        self._spare_scores = spare_scores
        self.pace = pace
        # Number of texts that run side by side while others wait: fewer than the limit if they need the whole cache.
        self._places = max_sequences
        self._copies: list[tuple[int, int]] = []
        # The waiting and the running sequences, both sorted by rank.
        self.waiting: list[GeneratedSequence] = []
        self.running: list[GeneratedSequence] = []
        self.preemptions = 0
        self._shares = TenantShares((max_sequences, pool.count))

    def __iter__(self) -> Iterator[GeneratedSequence]:
        yield from self.running
        yield from self.waiting

    @property
    def most_tokens(self) -> int:
        """The number of tokens that fit into the whole cache."""
        return self._pool.count * self._pool.block_tokens

    @property
    def blocks_in_use(self) -> int:
        """The number of blocks that sequences hold."""
        return self._pool.count - self._pool.free

    def could_hold(self, sequence: GeneratedSequence) -> bool:
        """Whether the longest text of a sequence, and its source, fit into the empty cache."""
        text_blocks = sequence.most_rows * self._blocks(sequence.most_tokens)
        return text_blocks + self._blocks(len(sequence.source_ids)) <= self._pool.count

    def add(self, sequence: GeneratedSequence) -> None:
        """Adds a new sequence that the cache could hold."""
        insort(self.waiting, sequence, key=_rank)

    def end(self, sequence: GeneratedSequence) -> None:
        """Removes a sequence, and frees its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._give_back(sequence)

    def plan(self) -> dict[GeneratedSequence, list[DecoderRun]]:
        """Plans the next step; empty if there is no sequence."""
        planned: dict[GeneratedSequence, int] = {}
        self._shares.count(self.running, self.waiting)
        # Sequences with one token left come first: each costs one token of the budget, and a reader waits for it.
        answered = [running for running in self.running if running.left == 1]
        reading = [running for running in self.running if running.left > 1]
        room, is_reading = self._most_tokens(answered, reading), False
        parts = self._reading_parts(room, answered, reading)
        spare, self._places = self._spare_scores, self._max_sequences
        for sequence in (*answered, *reading):
            rows = len(sequence.rows)
            max_tokens = min(room, max(rows, parts.get(sequence.tenant, room))) if sequence.left > 1 else room
            # A search alone may have more rows than the step has tokens.
            count = min(sequence.left_with(spare), max_tokens // rows if planned else max(1, max_tokens // rows))
            if not count or sequence not in self.running:  # the sequence was preempted
                continue
            room += self._hold(sequence, count, planned)
            if sequence in self.running:
                planned[sequence] = count
                room -= count * rows
                spare -= (count - 1) * sequence.scores_prompt
                if sequence.left > 1 and parts:
                    parts[sequence.tenant] -= count * rows
        while next_sequence := self._next():
            sequence = next_sequence
            if planned and room < len(sequence.rows):
                break
            room += self._make_room(sequence, planned)
            if not self._has_room_for(sequence):
                break
            self._begin(sequence)
            count = min(sequence.left_with(spare), max(1, room // len(sequence.rows)))
            # A source is read as a whole, so a source may be longer than the step.
            if is_reading and sequence.unread > room - count * len(sequence.rows):
                self._give_back(sequence)
                break
            missing = self._missing(sequence, count)
            room += self._make_room(sequence, planned, missing)
            if missing > self._pool.free:
                self._give_back(sequence)
                self._places = max(1, self._rows)
                break
            if self._preemptable(sequence) is _Preemptable.ALL:
                sequence.kept_tokens = sequence.generated + DUE_TOKENS
            self.waiting.remove(sequence)
            self._take(sequence, count, missing)
            self._shares.add(sequence, sequence.most_rows, sequence.blocks_held)
            insort(self.running, sequence, key=_rank)
            planned[sequence] = count
            room -= count * len(sequence.rows) + sequence.unread
            spare -= (count - 1) * sequence.scores_prompt
            is_reading = is_reading or sequence.unread > 0
        # Drafts beyond this number of tokens take longer than they save.
        room = min(room, spare, self.pace.part_tokens)
        for sequence in answered:
            if sequence in planned:
                room -= self._add_draft(sequence, room)
        return {sequence: self._runs(sequence, count) for sequence, count in planned.items()}

    def wait_s(self, sequence: GeneratedSequence) -> float:
        """The forecast time until a new sequence's first step.

        The sequence waits behind all sequences, or within its tenant's share only behind its tenant's sequences.
        """
        ahead = [waiting for waiting in self.waiting if waiting.rank < sequence.rank]
        rows = self._rows + sum(other.most_rows for other in ahead) + sequence.most_rows
        tenant_rows = [other.most_rows for other in (*self.running, *ahead) if other.tenant == sequence.tenant]
        share, _ = self._shares.of(sequence.tenant, sequence.weight)
        return min(
            self.pace.wait_s(rows, self._places),
            self.pace.wait_s(sum(tenant_rows) + sequence.most_rows, min(share, self._places)),
        )

    def makes_room_for(self, sequence: GeneratedSequence) -> GeneratedSequence | None:
        """The sequence that ends so that a new sequence can wait: the newest of the tenant with most new sequences.

        None unless that tenant has more new sequences than the tenant of the new sequence would have. An interactive
        sequence never ends for a bulk sequence.
        """
        new = [waiting for waiting in self.waiting if not waiting.started_ns and waiting.rank[0] >= sequence.rank[0]]
        counts = Counter(waiting.tenant for waiting in new)
        busiest = max(counts, key=lambda tenant: counts[tenant], default="")
        if counts[busiest] <= counts[sequence.tenant] + 1:
            return None
        return max((waiting for waiting in new if waiting.tenant == busiest), key=_rank)

    def take_copies(self) -> list[tuple[int, int]]:
        """The blocks to copy before the planned step, as pairs (from, to)."""
        copies, self._copies = self._copies, []
        return copies

    def fork(self, sequence: GeneratedSequence, steps: Sequence[BeamStep]) -> None:
        """Replaces the texts of a sequence by continuations of them, each a former text with another token."""
        before = sequence.rows
        sequence.rows = [
            TextRow([*before[step.parent].token_ids, step.token_id], [*before[step.parent].blocks]) for step in steps
        ]
        for row in sequence.rows:
            self._pool.retain(row.blocks)
        for row in before:
            self._pool.release(row.blocks)

    def finish(self, sequence: GeneratedSequence, count: int) -> None:
        """Notes that `count` more tokens of a sequence are computed, and publishes the blocks that became full."""
        sequence.computed += count
        sequence.steps += 1
        if sequence.unread:
            sequence.is_read = True
            for block, digest in zip(sequence.source_blocks, self._source_digests(sequence), strict=True):
                self._pool.publish(block, digest)
        full = sequence.computed // self._pool.block_tokens
        if full > sequence.published and len(sequence.rows) == 1:
            self._extend_digests(sequence, full * self._pool.block_tokens)
            for index in range(sequence.published, full):
                self._pool.publish(sequence.rows[0].blocks[index], sequence.digests[index])
            sequence.published = full

    def _reading_parts(
        self, room: int, answered: Sequence[GeneratedSequence], reading: Sequence[GeneratedSequence]
    ) -> dict[str, int]:
        """The tokens of prompts that each tenant may have in the next step, with the tenant of the next text; empty if
        there is only one tenant.
        """
        needs = Counter[str]()
        if not reading or not self._shares.are_several:
            return needs
        for sequence in (*reading, *filter(None, [self._next()])):
            needs[sequence.tenant] += sequence.left * len(sequence.rows)
        return split(max(0, room - sum(len(sequence.rows) for sequence in answered)), needs)

    def _next(self) -> GeneratedSequence | None:
        if not self.waiting or not self._shares.are_several:
            return next(iter(self.waiting), None)
        firsts: dict[str, GeneratedSequence] = {}
        for waiting in self.waiting:
            firsts.setdefault(waiting.tenant, waiting)
        return min(
            firsts.values(),
            key=lambda first: (
                first.rank[0],
                not self._preemptable(first),
                self._shares.part(first.tenant),
                first.rank,
            ),
        )

    def _preemptable(self, sequence: GeneratedSequence) -> _Preemptable | None:
        """The tenants whose rows and blocks a waiting sequence may get, if any; all after a long wait."""
        if not self._shares.are_several:
            return None
        # The whole text: texts larger than their shares would preempt each other before they have a token.
        blocks = sequence.blocks_held + self._missing(sequence, len(sequence.token_ids) - sequence.computed)
        if self._shares.fits(sequence, sequence.most_rows, blocks):
            return _Preemptable.OVER_SHARE
        is_due = time.monotonic() - sequence.waits_since_s > PATIENCE_S
        return _Preemptable.ALL if is_due and not self._shares.rows_of(sequence.tenant) else None

    def _victim(self, sequence: GeneratedSequence, tenants: _Preemptable) -> GeneratedSequence | None:
        """The sequence that makes room for another tenant's sequence: the youngest of the tenant that has most."""
        candidates = [
            running
            for running in self.running
            if running.tenant != sequence.tenant
            and running.rank[0] >= sequence.rank[0]
            and not running.is_kept
            and (tenants is _Preemptable.ALL or self._shares.is_over(running))
        ]
        return max(candidates, key=lambda running: (self._shares.part(running.tenant), running.rank), default=None)

    def _make_room(self, sequence: GeneratedSequence, planned: dict[GeneratedSequence, int], missing: int = 0) -> int:
        """Preempts sequences until a waiting sequence has rows and its missing blocks, or until none may be preempted.

        Returns the tokens of the step that the preempted sequences leave.
        """
        freed_tokens = 0
        while missing > self._pool.free or not self._has_room_for(sequence):
            tenants = self._preemptable(sequence)
            if not tenants or not (victim := self._victim(sequence, tenants)):
                break
            freed_tokens += planned.pop(victim, 0) * len(victim.rows)
            self._preempt(victim)
        return freed_tokens

    def _begin(self, sequence: GeneratedSequence) -> None:
        """Gives a sequence the published blocks of its source and of its first tokens.

        The last token is always computed again.
        """
        self._share_source(sequence)
        if len(sequence.rows) > 1 or sequence.scores_prompt:
            return
        row, tokens = sequence.rows[0], len(sequence.token_ids) - 1
        self._extend_digests(sequence, tokens)
        row.blocks = self._pool.share(sequence.digests[: tokens // self._pool.block_tokens])
        sequence.published = len(row.blocks)
        sequence.computed = len(row.blocks) * self._pool.block_tokens
        if not sequence.preempted_ns:
            sequence.cached_tokens = sequence.computed + (len(sequence.source_ids) if sequence.is_read else 0)

    def _share_source(self, sequence: GeneratedSequence) -> None:
        """Gives a sequence the published blocks of its source, if all of them exist."""
        digests = self._source_digests(sequence)
        sequence.source_blocks = self._pool.share(digests)
        sequence.is_read = len(sequence.source_blocks) == len(digests)
        if not sequence.is_read:
            self._pool.release(sequence.source_blocks)
            sequence.source_blocks = []

    def _source_digests(self, sequence: GeneratedSequence) -> list[bytes]:
        """One digest per block of a source. It hashes the scope and the block's number, because the scope identifies
        the source.
        """
        count = self._blocks(len(sequence.source_ids))
        return [blake2b(f"{sequence.scope} source {place}".encode()).digest() for place in range(count)]

    def _extend_digests(self, sequence: GeneratedSequence, tokens: int) -> None:
        """Computes missing digests of the first `tokens` tokens. A waiting prompt is looked at in every step."""
        size = self._pool.block_tokens
        if tokens // size > len(sequence.digests):
            sequence.digests = block_digests(sequence.token_ids[:tokens], size, sequence.scope, sequence.digests)

    def _hold(self, sequence: GeneratedSequence, count: int, planned: dict[GeneratedSequence, int]) -> int:
        """Gets blocks for `count` more tokens, if needed from younger sequences, and at last preempts the sequence.

        Returns the tokens of the step that the preempted sequences leave.
        """
        freed_tokens = 0
        while (missing := self._missing(sequence, count)) > self._pool.free:
            youngest = self.running[-1]
            if self._shares.are_several:
                youngest = max(self.running, key=self._superfluity)
            freed_tokens += planned.pop(youngest, 0) * len(youngest.rows)
            self._preempt(youngest)
            if youngest is sequence:
                return freed_tokens
        if missing:
            self._take(sequence, count, missing)
            self._shares.add(sequence, 0, missing)
        return freed_tokens

    def _superfluity(self, sequence: GeneratedSequence) -> tuple[bool, float, tuple[bool, bool, int]]:
        """A sort key: the sequence with the largest key makes room first. The oldest kept sequence stays."""
        return sequence.rank[0], -1 if sequence.is_kept else self._shares.part(sequence.tenant), sequence.rank

    def _add_draft(self, sequence: GeneratedSequence, room: int) -> int:
        """Adds a draft to a planned sequence with a lookup, if blocks are free. Returns the tokens of the draft."""
        max_draft_tokens = min(room, sequence.options.max_new_tokens - sequence.generated - 1)
        if not sequence.lookup or max_draft_tokens < 1 or sequence.computed + 1 < len(sequence.token_ids):
            return 0
        draft = sequence.lookup.draft(sequence.token_ids, max_draft_tokens)
        if (missing := self._missing(sequence, 1 + len(draft))) > self._pool.free:
            return 0
        self._take(sequence, 1 + len(draft), missing)
        sequence.draft = draft
        return len(draft)

    def _preempt(self, sequence: GeneratedSequence) -> None:
        self.running.remove(sequence)
        self._shares.add(sequence, -sequence.most_rows, -sequence.blocks_held)
        self._give_back(sequence)
        sequence.waits_since_s = time.monotonic()
        sequence.preempted_ns.append(time.monotonic_ns())
        self.preemptions += 1
        insort(self.waiting, sequence, key=_rank)

    def _give_back(self, sequence: GeneratedSequence) -> None:
        self._pool.release(sequence.source_blocks)
        for row in sequence.rows:
            self._pool.release(row.blocks)
            row.blocks = []
        sequence.published = sequence.computed = 0
        sequence.source_blocks, sequence.is_read = [], False

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._pool.block_tokens)

    @property
    def _rows(self) -> int:
        return sum(running.most_rows for running in self.running)

    def _most_tokens(self, answered: Sequence[GeneratedSequence], reading: Sequence[GeneratedSequence]) -> int:
        """The limit of tokens in the next step: few enough of prompts that the texts being answered wait little.

        Unread bulk texts do not make interactive texts wait longer.
        """
        if not answered:
            return self._step_tokens
        first, rows = answered[0].rank[:-1], sum(len(sequence.rows) for sequence in answered)
        following = self.waiting[: max(0, self._max_sequences - self._rows)]
        unread = sum(sequence.rank[:-1] <= first for sequence in (*reading, *following))
        return int(min(self._step_tokens, rows + self.pace.most_read_tokens(len(answered), unread)))

    def _has_room_for(self, sequence: GeneratedSequence) -> bool:
        rows = self._rows + sequence.most_rows
        if not self._rows or rows > self._max_sequences:
            return not self._rows
        if not self._shares.are_several or self._preemptable(sequence):
            return True
        kept_rows, kept_blocks = self._shares.kept_for_others(sequence.tenant)
        blocks = self._missing(sequence, sequence.left)
        return rows + kept_rows <= self._max_sequences and blocks + kept_blocks <= self._pool.free

    def _missing(self, sequence: GeneratedSequence, count: int) -> int:
        held, missing = self._blocks(sequence.computed + count), 0
        for row in sequence.rows:
            missing += max(0, held - len(row.blocks))
        if sequence.source_ids:
            missing += self._blocks(len(sequence.source_ids)) - len(sequence.source_blocks)
        return missing + (self._shared_ends(sequence) if len(sequence.rows) > 1 else 0)

    def _shared_ends(self, sequence: GeneratedSequence) -> int:
        """The number of rows that would write to a block to which another row also writes."""
        if not sequence.computed % self._pool.block_tokens:
            return 0
        return len(sequence.rows) - len({row.blocks[-1] for row in sequence.rows})

    def _take(self, sequence: GeneratedSequence, count: int, missing: int) -> None:
        taken = self._pool.take(missing)
        if len(sequence.rows) > 1 and self._shared_ends(sequence):
            written: set[int] = set()
            for row in sequence.rows:
                if row.blocks[-1] in written:
                    copy = taken.pop()
                    self._copies.append((row.blocks[-1], copy))
                    self._pool.release(row.blocks[-1:])
                    row.blocks[-1] = copy
                written.add(row.blocks[-1])
        while len(sequence.source_blocks) < self._blocks(len(sequence.source_ids)):
            sequence.source_blocks.append(taken.pop())
        for row in sequence.rows:
            while len(row.blocks) < self._blocks(sequence.computed + count):
                row.blocks.append(taken.pop())

    @staticmethod
    def _runs(sequence: GeneratedSequence, count: int) -> list[DecoderRun]:
        end, draft = sequence.computed + count, sequence.draft
        scored = count if sequence.scores_prompt else int(end == len(sequence.token_ids))
        return [
            DecoderRun(
                row.token_ids[sequence.computed : end] + draft,
                sequence.computed,
                row.blocks,
                scored + len(draft),
                len(sequence.source_ids),
                sequence.source_blocks,
            )
            for row in sequence.rows
        ]


def _rank(sequence: GeneratedSequence) -> tuple[bool, bool, int]:
    return sequence.rank
