"""Plans the steps: which tokens of which sequences are computed next, and in which blocks.

Sequences join and leave at every step. Those that are being answered get their next token in every step; what is left
of the step's token budget goes to prompts, the oldest first, in parts. If blocks run out, the youngest sequence gives
its own back and is computed again later; interactive ones count as older than bulk. The oldest always advances, because
no sequence is let in that the whole cache could not hold. Knows no model and no transport.
"""

import asyncio
import time
from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass, field

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.items import GenerationFigures, Report, TokenLogprobs
from neuronpipe.neuron_executor.generation.blocks import BlockPool, block_digests
from neuronpipe.neuron_executor.generation.sampling import TokenChooser
from neuronpipe.runtimes.decoder import Run


@dataclass(eq=False, slots=True)
class Sequence:
    """A text that is being generated.

    `token_ids`: the prompt and all tokens so far. `computed`: how many of these are in `blocks`. `future`: ends with
    the finish reason. `deadline_s`: on time.monotonic()'s clock. `rank`: those with a lower one go first: interactive
    ones before bulk, then the older one. `scope`: see block_digests.
    """

    rank: tuple[bool, bool, int]
    token_ids: list[int]
    options: GenerationOptions
    chooser: TokenChooser
    end_token_ids: frozenset[int]
    deadline_s: float
    scope: str
    report: Report | None
    future: "asyncio.Future[int]"
    arrived_ns: int = field(default_factory=time.monotonic_ns)
    prompt_tokens: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    digests: list[bytes] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    steps: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    started_ns: int = 0
    first_token_ns: int = 0
    last_token_ns: int = 0
    longest_gap_ns: int = 0

    def __post_init__(self) -> None:
        self.prompt_tokens = len(self.token_ids)

    @property
    def most_tokens(self) -> int:
        """The tokens of the prompt, and of the longest text that may follow."""
        return self.prompt_tokens + self.options.max_new_tokens

    @property
    def generated(self) -> int:
        """The number of tokens that were generated."""
        return len(self.token_ids) - self.prompt_tokens

    @property
    def left(self) -> int:
        """The tokens that are to be computed before the next one can be chosen."""
        return len(self.token_ids) - self.computed

    @property
    def figures(self) -> GenerationFigures:
        """What it took so far."""
        return GenerationFigures(
            max(0, self.started_ns - self.arrived_ns),
            max(0, self.first_token_ns - self.started_ns),
            self.last_token_ns - self.first_token_ns,
            self.longest_gap_ns,
            self.steps,
            self.cached_tokens,
        )

    def append(self, token_id: int, now_ns: int) -> None:
        """Adds the next token."""
        self.token_ids.append(token_id)
        if self.first_token_ns:
            self.longest_gap_ns = max(self.longest_gap_ns, now_ns - self.last_token_ns)
        else:
            self.first_token_ns = now_ns
        self.last_token_ns = now_ns


class Planner:
    """The sequences of one model, and their blocks."""

    def __init__(self, pool: BlockPool, max_sequences: int, step_tokens: int) -> None:
        """`max_sequences`: in one step. `step_tokens`: at most so many, but one for each sequence in any case."""
        self._pool = pool
        self._max_sequences = max_sequences
        self._step_tokens = max(step_tokens, max_sequences)
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

    def add(self, sequence: Sequence) -> None:
        """A new sequence, whose `most_tokens` fit into the cache."""
        insort(self.waiting, sequence, key=_rank)

    def end(self, sequence: Sequence) -> None:
        """Takes a sequence out, and frees its blocks."""
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        self._give_back(sequence)

    def plan(self) -> dict[Sequence, Run]:
        """The next step; nothing if there is no sequence."""
        planned: dict[Sequence, int] = {}
        room = self._step_tokens
        # Those with one token left first: each of them costs one token of the budget, and somebody reads along.
        for sequence in sorted(self.running, key=lambda one: (one.left > 1, one.rank)):
            count = min(sequence.left, room)
            if count and sequence in self.running and self._hold(sequence, count, planned):
                planned[sequence] = count
            room = self._step_tokens - sum(planned.values())
        while self.waiting and len(self.running) < self._max_sequences and room > 0:
            sequence = self.waiting[0]
            self._begin(sequence)
            count = min(sequence.left, room)
            if self._missing(sequence, count) > self._pool.free:
                self._give_back(sequence)
                break
            del self.waiting[0]
            self._take(sequence, count)
            insort(self.running, sequence, key=_rank)
            planned[sequence] = count
            room -= count
        return {one: self._run(one, count) for one, count in planned.items()}

    def finish(self, sequence: Sequence, count: int) -> None:
        """So many more tokens of a sequence are computed. Full blocks can be shared from now on."""
        sequence.computed += count
        sequence.steps += 1
        full = sequence.computed // self._pool.block_tokens
        if full > len(sequence.digests):
            known = len(sequence.digests)
            computed = sequence.token_ids[: full * self._pool.block_tokens]
            sequence.digests = block_digests(computed, self._pool.block_tokens, sequence.scope, sequence.digests)
            for index in range(known, full):
                self._pool.publish(sequence.blocks[index], sequence.digests[index])

    def _begin(self, sequence: Sequence) -> None:
        """Gives a sequence the published blocks with its first tokens. The last token is always computed anew."""
        size = self._pool.block_tokens
        digests = block_digests(sequence.token_ids[:-1], size, sequence.scope)
        sequence.blocks = self._pool.share(digests)
        sequence.digests = digests[: len(sequence.blocks)]
        sequence.computed = len(sequence.blocks) * size
        if not sequence.preemptions:
            sequence.cached_tokens = sequence.computed

    def _hold(self, sequence: Sequence, count: int, planned: dict[Sequence, int]) -> bool:
        """Gets blocks for so many more tokens, if need be from younger sequences. False: it was itself the youngest."""
        while self._missing(sequence, count) > self._pool.free:
            youngest = self.running[-1]
            planned.pop(youngest, None)
            self._preempt(youngest)
            if youngest is sequence:
                return False
        self._take(sequence, count)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._give_back(sequence)
        sequence.preemptions += 1
        self.preemptions += 1
        insort(self.waiting, sequence, key=_rank)

    def _give_back(self, sequence: Sequence) -> None:
        self._pool.release(sequence.blocks)
        sequence.blocks, sequence.digests, sequence.computed = [], [], 0

    def _missing(self, sequence: Sequence, count: int) -> int:
        return -(-(sequence.computed + count) // self._pool.block_tokens) - len(sequence.blocks)

    def _take(self, sequence: Sequence, count: int) -> None:
        sequence.blocks += self._pool.take(max(0, self._missing(sequence, count)))

    @staticmethod
    def _run(sequence: Sequence, count: int) -> Run:
        end = sequence.computed + count
        return Run(
            sequence.token_ids[sequence.computed : end],
            sequence.computed,
            sequence.blocks,
            is_scored=end == len(sequence.token_ids),
        )


def _rank(sequence: Sequence) -> tuple[bool, bool, int]:
    return sequence.rank
