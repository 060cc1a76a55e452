"""Plans the steps: which tokens of which sequences are computed next, and in which blocks.

Sequences join and leave at every step. Those that are being answered get their next token in every step; what is left
of the step's token budget goes to prompts, the oldest first, in parts, but only so much that the others wait little
longer than without. If blocks run out, the youngest sequence gives
its own back and is computed again later; interactive ones count as older than bulk. The oldest always advances, because
no sequence is let in that the whole cache could not hold. Knows no model and no transport.
"""

import asyncio
import time
from bisect import insort
from collections.abc import Iterator
from collections.abc import Sequence as Sequence_
from dataclasses import dataclass, field
from hashlib import blake2b

from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.generated import Report, TokenLogprobs
from neuronpipe.core.tracing import Link, SpanContext
from neuronpipe.stages.neuron_executor.generation.beams import BeamSearch, Step
from neuronpipe.stages.neuron_executor.generation.blocks import BlockPool, block_digests
from neuronpipe.stages.neuron_executor.generation.pace import Pace
from neuronpipe.stages.neuron_executor.generation.prompt_lookup import PromptLookup
from neuronpipe.stages.neuron_executor.generation.sampling import TokenChooser
from neuronpipe.stages.neuron_executor.runtimes.decoder import Run


@dataclass(slots=True)
class Row:
    """One of the texts that are searched side by side. `token_ids`: the prompt and all tokens so far.

    Blocks that several of them hold are as many uses. One that is not full is copied before a second one writes to it.
    """

    token_ids: list[int]
    blocks: list[int] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Sequence:
    """A text that is being generated, or several of one length of which the best is searched.

    `rows`: these texts. `computed`: how many of their tokens are in their blocks. `digests`: see block_digests, of
    blocks that are full or will be; `published`: how many blocks of these others can share. `future`: ends with the
    finish reason. `deadline_s`: on time.monotonic()'s clock. `rank`: those with a lower one go first: interactive
    ones before bulk, then the older one. `scope`: see block_digests; of another source it is another one. `source_ids`:
    the text that the model reads first, if it has an encoder; `source_blocks` hold it, once it `is_read`.
    `prompt_logprobs`: of the prompt's tokens but the first one, if it `scores_prompt`, of which a step takes
    `most_scored`. `lookup`: makes the `draft` of the step that is planned, see prompt_lookup.py; `drafted`: the tokens
    of all drafts, and how many were `accepted`. `trace`: of its span, if its request is sampled; `links`: from there to
    some of its steps.
    """

    rank: tuple[bool, bool, int]
    rows: list[Row]
    options: GenerationOptions
    chooser: TokenChooser | BeamSearch
    end_token_ids: frozenset[int]
    deadline_s: float
    scope: str
    report: Report | None
    future: "asyncio.Future[int]"
    source_ids: Sequence_[int] = ()
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
    def most_tokens(self) -> int:
        """The tokens of the prompt, and of the longest text that may follow."""
        return self.prompt_tokens + self.options.max_new_tokens

    @property
    def input_tokens(self) -> int:
        """The number of tokens that its caller sent."""
        return len(self.source_ids) or self.prompt_tokens

    @property
    def unread(self) -> int:
        """The tokens of its source, if that is to be read before anything is computed."""
        return 0 if self.is_read else len(self.source_ids)

    @property
    def generated(self) -> int:
        """The number of tokens that were generated."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def left(self) -> int:
        """The tokens that are to be computed before the next one can be chosen, or of a prompt scored in a step."""
        left = len(self.token_ids) - self.computed
        return min(left, self.most_scored) if self.scores_prompt else left

    def left_with(self, spare_scores: int) -> int:
        """As `left`, in a step that has room for `spare_scores` further scores."""
        return min(self.left, 1 + spare_scores) if self.scores_prompt else self.left

    @property
    def figures(self) -> GenerationFigures:
        """What it took so far."""
        return GenerationFigures(
            queue_ns=max(0, self.started_ns - self.arrived_ns),
            prefill_ns=max(0, self.first_token_ns - self.started_ns),
            decode_ns=self.last_token_ns - self.first_token_ns,
            longest_gap_ns=self.longest_gap_ns,
            steps=self.steps,
            cached_tokens=self.cached_tokens,
        )

    def note(self, now_ns: int) -> None:
        """The next token is there."""
        if self.first_token_ns:
            self.longest_gap_ns = max(self.longest_gap_ns, now_ns - self.last_token_ns)
        else:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns


class Planner:
    """The sequences of one model, and their blocks."""

    def __init__(self, pool: BlockPool, pace: Pace, max_sequences: int, step_tokens: int, spare_scores: int) -> None:
        """`max_sequences`: in one step. `step_tokens`: the most of a step, but one for each sequence in any case.

        `spare_scores`: of prompts and drafts in one step, beyond those after one token of each text.
        """
        self._pool = pool
        self._max_sequences = max_sequences
        self._step_tokens = max(step_tokens, max_sequences)
        self._spare_scores = spare_scores
        self.pace = pace
        # How many texts run side by side while others wait: fewer where they need the whole cache.
        self._places = max_sequences
        self._copies: list[tuple[int, int]] = []
        # Both by rank.
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.preemptions = 0

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        yield from self.waiting

    @property
    def most_tokens(self) -> int:
        """The tokens that fit into the whole cache."""
        return self._pool.count * self._pool.block_tokens

    @property
    def blocks_in_use(self) -> int:
        """The number of blocks that sequences hold."""
        return self._pool.count - self._pool.free

    def could_hold(self, sequence: Sequence) -> bool:
        """Whether the longest text of a sequence, and its source, fit into the empty cache."""
        own = sequence.most_rows * self._blocks(sequence.most_tokens)
        return own + self._blocks(len(sequence.source_ids)) <= self._pool.count

    def add(self, sequence: Sequence) -> None:
        """A new sequence that the cache could hold."""
        insort(self.waiting, sequence, key=_rank)

    def end(self, sequence: Sequence) -> None:
        """Takes a sequence out, and frees its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._give_back(sequence)

    def plan(self) -> dict[Sequence, list[Run]]:
        """The next step; nothing if there is no sequence."""
        planned: dict[Sequence, int] = {}
        # Those with one token left first: each of them costs one token of the budget, and somebody reads along.
        answered = [one for one in self.running if one.left == 1]
        reading = [one for one in self.running if one.left > 1]
        room, is_reading = self._most_tokens(answered, reading), False
        spare, self._places = self._spare_scores, self._max_sequences
        for sequence in (*answered, *reading):
            rows = len(sequence.rows)
            # A search alone may be wider than the step.
            count = min(sequence.left_with(spare), room // rows if planned else max(1, room // rows))
            if not count or sequence not in self.running:  # it has been preempted
                continue
            freed = self._hold(sequence, count, planned)
            room += freed
            if sequence in self.running:
                planned[sequence] = count
                room -= count * rows
                spare -= (count - 1) * sequence.scores_prompt
        while self.waiting and self._has_room_for(self.waiting[0]):
            sequence = self.waiting[0]
            if planned and room < len(sequence.rows):
                break
            self._begin(sequence)
            count = min(sequence.left_with(spare), max(1, room // len(sequence.rows)))
            # A source is read as a whole, so one may be longer than the step.
            if is_reading and sequence.unread > room - count * len(sequence.rows):
                self._give_back(sequence)
                break
            if (missing := self._missing(sequence, count)) > self._pool.free:
                self._give_back(sequence)
                self._places = max(1, self._rows)
                break
            del self.waiting[0]
            self._take(sequence, count, missing)
            insort(self.running, sequence, key=_rank)
            planned[sequence] = count
            room -= count * len(sequence.rows) + sequence.unread
            spare -= (count - 1) * sequence.scores_prompt
            is_reading = is_reading or sequence.unread > 0
        # More tokens than these take longer than the drafts of many texts save.
        room = min(room, spare, self.pace.part_tokens)
        for sequence in answered:
            if sequence in planned:
                room -= self._add_draft(sequence, room)
        return {one: self._runs(one, count) for one, count in planned.items()}

    def wait_s(self, sequence: Sequence) -> float:
        """The forecast of how long a new sequence waits for its first step."""
        ahead = sum(one.most_rows for one in self.waiting if one.rank < sequence.rank)
        return self.pace.wait_s(self._rows + ahead + sequence.most_rows, self._places)

    def take_copies(self) -> list[tuple[int, int]]:
        """The blocks that are to be copied before the planned step, each from the first to the second."""
        copies, self._copies = self._copies, []
        return copies

    def fork(self, sequence: Sequence, steps: Sequence_[Step]) -> None:
        """The texts of a sequence go on, each as one of those before with another token."""
        before = sequence.rows
        sequence.rows = [
            Row([*before[step.parent].token_ids, step.token_id], [*before[step.parent].blocks]) for step in steps
        ]
        for row in sequence.rows:
            self._pool.retain(row.blocks)
        for row in before:
            self._pool.release(row.blocks)

    def finish(self, sequence: Sequence, count: int) -> None:
        """`count` more tokens of a sequence, which it has, are computed. Full blocks can be shared from now on."""
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

    def _begin(self, sequence: Sequence) -> None:
        """Gives a sequence the published blocks with its source, and those with its first tokens. The last token is
        always computed anew.
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

    def _share_source(self, sequence: Sequence) -> None:
        """Gives a sequence the published blocks with its source, if all of them are there."""
        digests = self._source_digests(sequence)
        sequence.source_blocks = self._pool.share(digests)
        sequence.is_read = len(sequence.source_blocks) == len(digests)
        if not sequence.is_read:
            self._pool.release(sequence.source_blocks)
            sequence.source_blocks = []

    def _source_digests(self, sequence: Sequence) -> list[bytes]:
        """A digest for each block of a source. The scope says which one it is."""
        count = self._blocks(len(sequence.source_ids))
        return [blake2b(f"{sequence.scope} source {place}".encode()).digest() for place in range(count)]

    def _extend_digests(self, sequence: Sequence, tokens: int) -> None:
        """Of its first so many tokens, as far as they are not there: a waiting prompt is looked at in every step."""
        size = self._pool.block_tokens
        if tokens // size > len(sequence.digests):
            sequence.digests = block_digests(sequence.token_ids[:tokens], size, sequence.scope, sequence.digests)

    def _hold(self, sequence: Sequence, count: int, planned: dict[Sequence, int]) -> int:
        """Gets blocks for so many more tokens, if need be from younger sequences, and at last from itself: then it has
        been preempted. Returns the tokens of the step that those have left.
        """
        left = 0
        while (missing := self._missing(sequence, count)) > self._pool.free:
            youngest = self.running[-1]
            left += planned.pop(youngest, 0) * len(youngest.rows)
            self._preempt(youngest)
            if youngest is sequence:
                return left
        if missing:
            self._take(sequence, count, missing)
        return left

    def _add_draft(self, sequence: Sequence, room: int) -> int:
        """Adds a draft to a planned sequence, if it has a lookup, and there are free blocks. Returns its tokens."""
        most = min(room, sequence.options.max_new_tokens - sequence.generated - 1)
        if not sequence.lookup or most < 1 or sequence.computed + 1 < len(sequence.token_ids):
            return 0
        draft = sequence.lookup.draft(sequence.token_ids, most)
        if (missing := self._missing(sequence, 1 + len(draft))) > self._pool.free:
            return 0
        self._take(sequence, 1 + len(draft), missing)
        sequence.draft = draft
        return len(draft)

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.preempted_ns.append(time.monotonic_ns())
        self.preemptions += 1
        insort(self.waiting, sequence, key=_rank)

    def _give_back(self, sequence: Sequence) -> None:
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
        return sum(one.most_rows for one in self.running)

    def _most_tokens(self, answered: Sequence_[Sequence], reading: Sequence_[Sequence]) -> int:
        """The most tokens of the next step: few enough of prompts that the texts that are being answered wait little.

        Bulk texts that are unread do not make interactive ones wait longer.
        """
        if not answered:
            return self._step_tokens
        first, rows = answered[0].rank[:-1], sum(len(one.rows) for one in answered)
        next_ones = self.waiting[: max(0, self._max_sequences - self._rows)]
        unread = sum(one.rank[:-1] <= first for one in (*reading, *next_ones))
        return int(min(self._step_tokens, rows + self.pace.most_read_tokens(len(answered), unread)))

    def _has_room_for(self, sequence: Sequence) -> bool:
        return not self._rows or self._rows + sequence.most_rows <= self._max_sequences

    def _missing(self, sequence: Sequence, count: int) -> int:
        held, missing = self._blocks(sequence.computed + count), 0
        for row in sequence.rows:
            missing += max(0, held - len(row.blocks))
        if sequence.source_ids:
            missing += self._blocks(len(sequence.source_ids)) - len(sequence.source_blocks)
        return missing + (self._shared_ends(sequence) if len(sequence.rows) > 1 else 0)

    def _shared_ends(self, sequence: Sequence) -> int:
        """How many rows are to write to a block that another one writes to, too."""
        if not sequence.computed % self._pool.block_tokens:
            return 0
        return len(sequence.rows) - len({row.blocks[-1] for row in sequence.rows})

    def _take(self, sequence: Sequence, count: int, missing: int) -> None:
        taken = self._pool.take(missing)
        if len(sequence.rows) > 1 and self._shared_ends(sequence):
            written: set[int] = set()
            for row in sequence.rows:
                if row.blocks[-1] in written:
                    own = taken.pop()
                    self._copies.append((row.blocks[-1], own))
                    self._pool.release(row.blocks[-1:])
                    row.blocks[-1] = own
                written.add(row.blocks[-1])
        while len(sequence.source_blocks) < self._blocks(len(sequence.source_ids)):
            sequence.source_blocks.append(taken.pop())
        for row in sequence.rows:
            while len(row.blocks) < self._blocks(sequence.computed + count):
                row.blocks.append(taken.pop())

    @staticmethod
    def _runs(sequence: Sequence, count: int) -> list[Run]:
        end, draft = sequence.computed + count, sequence.draft
        scored = count if sequence.scores_prompt else int(end == len(sequence.token_ids))
        return [
            Run(
                row.token_ids[sequence.computed : end] + draft,
                sequence.computed,
                row.blocks,
                scored + len(draft),
                len(sequence.source_ids),
                sequence.source_blocks,
            )
            for row in sequence.rows
        ]


def _rank(sequence: Sequence) -> tuple[bool, bool, int]:
    return sequence.rank
