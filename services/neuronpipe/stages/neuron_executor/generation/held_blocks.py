"""The cache blocks of each sequence, for its texts and its source. Texts with an equal beginning share blocks."""

from collections.abc import Sequence
from hashlib import blake2b

from neuronpipe.stages.neuron_executor.generation.beams import BeamStep
from neuronpipe.stages.neuron_executor.generation.blocks import BlockPool, block_digests
from neuronpipe.stages.neuron_executor.generation.sequence import GeneratedSequence, TextRow


class HeldBlocks:
    """Gives blocks to sequences, and takes them back. Equal beginnings of texts, and equal sources, share blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._copies: list[tuple[int, int]] = []

    @property
    def free(self) -> int:
        """The number of blocks that no sequence holds."""
        return self._pool.free

    @property
    def most_tokens(self) -> int:
        """The number of tokens that fit into the whole cache."""
        return self._pool.count * self._pool.block_tokens

    @property
    def in_use(self) -> int:
        """The number of blocks that sequences hold."""
        return self._pool.count - self._pool.free

    def could_hold(self, sequence: GeneratedSequence) -> bool:
        """Returns whether the longest text of a sequence, and its source, fit into the empty cache."""
        text_blocks = sequence.most_rows * self._blocks(sequence.most_tokens)
        return text_blocks + self._blocks(len(sequence.source.token_ids)) <= self._pool.count

    def missing(self, sequence: GeneratedSequence, count: int) -> int:
        """Counts the blocks that a sequence needs for `count` more tokens of each text."""
        held, missing = self._blocks(sequence.computed + count), 0
        for row in sequence.rows:
            missing += max(0, held - len(row.blocks))
        if sequence.source.token_ids:
            missing += self._blocks(len(sequence.source.token_ids)) - len(sequence.source.blocks)
        return missing + (self._shared_ends(sequence) if len(sequence.rows) > 1 else 0)

    def take(self, sequence: GeneratedSequence, count: int, missing: int) -> None:
        """Gives a sequence its `missing` blocks for `count` more tokens. At least as many must be free."""
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
        while len(sequence.source.blocks) < self._blocks(len(sequence.source.token_ids)):
            sequence.source.blocks.append(taken.pop())
        for row in sequence.rows:
            while len(row.blocks) < self._blocks(sequence.computed + count):
                row.blocks.append(taken.pop())

    def take_copies(self) -> list[tuple[int, int]]:
        """Takes the blocks to copy before the planned step, as pairs (from, to)."""
        copies, self._copies = self._copies, []
        return copies

    def give_back(self, sequence: GeneratedSequence) -> None:
        """Frees the blocks of a sequence, which is then computed from its beginning."""
        self._pool.release(sequence.source.blocks)
        for row in sequence.rows:
            self._pool.release(row.blocks)
            row.blocks = []
        sequence.prefix.published = sequence.computed = 0
        sequence.source.blocks, sequence.source.is_read = [], False

    def share(self, sequence: GeneratedSequence) -> None:
        """Gives a sequence the published blocks of its source and of its first tokens.

        The last token is always computed again.
        """
        self._share_source(sequence)
        if len(sequence.rows) > 1 or sequence.prompt_scores:
            return
        row, source, tokens = sequence.rows[0], sequence.source, len(sequence.token_ids) - 1
        self._extend_digests(sequence, tokens)
        row.blocks = self._pool.share(sequence.prefix.digests[: tokens // self._pool.block_tokens])
        sequence.prefix.published = len(row.blocks)
        sequence.computed = len(row.blocks) * self._pool.block_tokens
        if not sequence.record.preempted_ns:
            sequence.record.cached_tokens = sequence.computed + len(source.token_ids) - source.unread

    def publish(self, sequence: GeneratedSequence) -> None:
        """Publishes the blocks of a sequence that became full."""
        full, prefix = sequence.computed // self._pool.block_tokens, sequence.prefix
        if full > prefix.published and len(sequence.rows) == 1:
            self._extend_digests(sequence, full * self._pool.block_tokens)
            for index in range(prefix.published, full):
                self._pool.publish(sequence.rows[0].blocks[index], prefix.digests[index])
            prefix.published = full

    def publish_source(self, sequence: GeneratedSequence) -> None:
        """Publishes the blocks of a sequence's source, which was read."""
        for block, digest in zip(sequence.source.blocks, self._source_digests(sequence), strict=True):
            self._pool.publish(block, digest)

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

    def _share_source(self, sequence: GeneratedSequence) -> None:
        """Gives a sequence the published blocks of its source, if all of them exist."""
        source, digests = sequence.source, self._source_digests(sequence)
        source.blocks = self._pool.share(digests)
        source.is_read = len(source.blocks) == len(digests)
        if not source.is_read:
            self._pool.release(source.blocks)
            source.blocks = []

    def _source_digests(self, sequence: GeneratedSequence) -> list[bytes]:
        """Makes a digest for each block of a source, from the scope and the block's number.

        The scope identifies the source.
        """
        count = self._blocks(len(sequence.source.token_ids))
        return [blake2b(f"{sequence.prefix.scope} source {place}".encode()).digest() for place in range(count)]

    def _extend_digests(self, sequence: GeneratedSequence, tokens: int) -> None:
        """Computes missing digests of the first `tokens` tokens. A waiting prompt is looked at in every step."""
        size, prefix = self._pool.block_tokens, sequence.prefix
        if tokens // size > len(prefix.digests):
            prefix.digests = block_digests(sequence.token_ids[:tokens], size, prefix.scope, prefix.digests)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._pool.block_tokens)

    def _shared_ends(self, sequence: GeneratedSequence) -> int:
        """Counts the rows that would write to a block to which another row also writes."""
        if not sequence.computed % self._pool.block_tokens:
            return 0
        return len(sequence.rows) - len({row.blocks[-1] for row in sequence.rows})
