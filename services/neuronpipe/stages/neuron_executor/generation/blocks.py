"""The blocks of a key-value cache: which are in use, and which hold the start of a prompt that may come again."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


class BlockPool:
    """Gives out blocks by their numbers. A block is free while no text uses it.

    A full block may be published under the digest of its tokens and all tokens before them, and texts with the same
    tokens share it. A free block keeps its tokens until it is given out again; the block that was used longest ago goes
    first.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.count = blocks
        self._uses = [0] * blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self._by_digest: dict[bytes, int] = {}
        self._digests: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """The number of blocks that no text uses."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Gives out `count` blocks. At least as many must be free."""
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            if digest := self._digests.pop(block, None):
                del self._by_digest[digest]
            self._uses[block] = 1
        return taken

    def share(self, digests: Iterable[bytes]) -> list[int]:
        """Takes the published blocks of these digests into use, in order, up to the first digest without a block."""
        shared = []
        for digest in digests:
            block = self._by_digest.get(digest)
            if block is None:
                break
            if not self._uses[block]:
                del self._free[block]
            self._uses[block] += 1
            shared.append(block)
        return shared

    def retain(self, blocks: Iterable[int]) -> None:
        """Counts another use of blocks that are in use."""
        for block in blocks:
            self._uses[block] += 1

    def publish(self, block: int, digest: bytes) -> None:
        """Lets other texts share a full block, unless a block with the same tokens is already published."""
        if digest not in self._by_digest and block not in self._digests:
            self._by_digest[digest] = block
            self._digests[block] = digest

    def release(self, blocks: Sequence[int]) -> None:
        """Ends a use of blocks. The last blocks are given out first, because fewer texts have all of their tokens."""
        for block in reversed(blocks):
            self._uses[block] -= 1
            if not self._uses[block]:
                self._free[block] = None
                if block not in self._digests:
                    self._free.move_to_end(block, last=False)


def block_digests(token_ids: Sequence[int], block_tokens: int, scope: str, known: Sequence[bytes] = ()) -> list[bytes]:
    """Digests the tokens of each full block with all tokens before it. `known`: digests of the first blocks.

    `scope`: callers of different scopes have different digests.
    """
    digests = list(known)
    for start in range(len(digests) * block_tokens, len(token_ids) - block_tokens + 1, block_tokens):
        before = digests[-1] if digests else scope.encode()
        tokens = repr(token_ids[start : start + block_tokens]).encode()
        digests.append(blake2b(before + b"\0" + tokens, digest_size=_DIGEST_BYTES).digest())
    return digests
