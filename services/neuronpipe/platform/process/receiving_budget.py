"""The memory for large or slow messages while they arrive: the claims of messages, and which message is refused."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from neuronpipe.core.errors import NeuronpipeError, Overloaded

# A claim is small up to this part of the largest message. Twice this size is reserved for small claims, so that small
# messages that arrive slowly find room beside large messages.
_SMALL_CLAIM = 1 / 8
# Up to this number, bytes that the server or the caller has not read do not count.
UNCOUNTED_BYTES = 64 << 10


@dataclass(slots=True, eq=False)
class Claim:
    """A message's claim. `refuse` must end the reading of the message."""

    connection: str
    refuse: Callable[[NeuronpipeError], None]
    bytes: int = 0


class ReceivingBudget:
    """Lets claims grow while there is room.

    A large claim without room is refused, and other claims keep their room. Small claims may take the room that large
    claims leave, and a reserved part. When both are full, the largest small claim is refused, so that new claims find
    room.
    """

    def __init__(self, max_message_bytes: int, max_receiving_bytes: int) -> None:
        self._max_bytes = max(max_message_bytes, max_receiving_bytes)
        self._full = f"{self._max_bytes} bytes for messages while they arrive, the limit (max_receiving_bytes)"
        # A connection gets at most half of the budget. Otherwise calls that send nothing could keep out all others.
        self._max_bytes_of = max(max_message_bytes, max_receiving_bytes // 2)
        self._max_small_claim_bytes = int(max_message_bytes * _SMALL_CLAIM)
        self._bytes = self._small_bytes = 0
        self._bytes_of: Counter[str] = Counter()
        self._small: dict[Claim, None] = {}  # the oldest first

    def grow(self, claim: Claim, to_bytes: int) -> None:
        """Grows a claim. Without room, this claim, or small claims, are refused."""
        more_bytes = to_bytes - claim.bytes
        is_small = to_bytes <= self._max_small_claim_bytes
        if claim in self._small and not is_small:
            del self._small[claim]
            self._small_bytes -= claim.bytes
        if self._bytes_of[claim.connection] + more_bytes > self._max_bytes_of:
            self._refuse(
                claim,
                f"{self._max_bytes_of} bytes for messages of one connection while they arrive, the limit (half of "
                "max_receiving_bytes)",
            )
        elif not is_small and self._bytes - self._small_bytes + more_bytes > self._max_bytes:
            self._refuse(claim, self._full)
        else:
            if is_small:
                self._small[claim] = None
            self._add(claim, more_bytes)
            while self._bytes > self._max_bytes + 2 * self._max_small_claim_bytes:
                # The oldest claim stays; otherwise no message would ever become large.
                largest = max(list(self._small)[1:], key=lambda small: small.bytes)
                self._refuse(largest, self._full)

    def release(self, claim: Claim) -> None:
        """Releases the claim of a message that has arrived, or never will."""
        if claim.bytes:
            self._add(claim, -claim.bytes)
            if not self._bytes_of[claim.connection]:
                del self._bytes_of[claim.connection]
            self._small.pop(claim, None)

    def _add(self, claim: Claim, more_bytes: int) -> None:
        claim.bytes += more_bytes
        self._bytes += more_bytes
        self._bytes_of[claim.connection] += more_bytes
        if claim in self._small:
            self._small_bytes += more_bytes

    def _refuse(self, claim: Claim, problem: str) -> None:
        self.release(claim)
        claim.refuse(Overloaded(problem, retry_after_s=1))
