"""The answers that a caller does not read: the time and the memory that they may take.

The functions that end a stream are arguments of methods. As attributes, they would refer back to the connection, in a
cycle that waits for the garbage collector.
"""

from collections.abc import Callable, Iterable
from typing import TypeAlias

from ngh2 import Connection as Engine

from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.platform.process.caller_waits import CallerWaits
from neuronpipe.platform.process.receiving_budget import UNCOUNTED_BYTES, Claim, ReceivingBudget
from neuronpipe.rpc.http2.outbox import Sender

# A stream whose bytes the caller must read. None: the connection, while the operating system takes no bytes.
Unread: TypeAlias = Sender | None


class UnreadAnswers:
    """The unread answers of a connection. `connection`: its name in the budget.

    - `waits`: the number of each stream's wait, and the bytes that the caller must have read to end the wait.
    - `claim`: the memory of the unread bytes in the budget; None while they do not count.
    """

    def __init__(self, connection: str, caller_waits: CallerWaits, budget: ReceivingBudget) -> None:
        self.waits: dict[Unread, tuple[int, int]] = {}
        self.claim: Claim | None = None
        self._connection, self._caller_waits, self._budget = connection, caller_waits, budget

    def wait(self, stream: Unread, until_bytes: int, end: Callable[[Unread], None]) -> None:
        """Waits until the caller has read `until_bytes`. Calls `end` if that takes too long."""
        if stream not in self.waits:
            self.waits[stream] = self._caller_waits.begin(lambda is_late: end(stream)), until_bytes

    def note_read(self, stream: Unread) -> None:
        """Ends the wait for a stream."""
        if wait := self.waits.pop(stream, None):
            self._caller_waits.remove(wait[0])

    def note_flush(self, engine: Engine, written: Iterable[Sender], end: Callable[[Unread], None]) -> None:
        """Waits for the caller to read the bytes that a flush of the streams `written` could not send."""
        if engine.queued_body_size():
            for stream in written:
                if stream not in self.waits and engine.queued_body_size(stream.number):
                    self.wait(stream, stream.put_bytes, end)
        for unread, (_, until_bytes) in list(self.waits.items()):
            if unread is None:
                continue
            left_bytes = engine.queued_body_size(unread.number)
            if unread.put_bytes - left_bytes >= until_bytes:
                self.note_read(unread)
                if left_bytes:
                    self.wait(unread, unread.put_bytes, end)

    def count_bytes(self, size_bytes: int, make_room: Callable[[NeuronpipeError], None]) -> None:
        """Counts the bytes in the budget if they are many. Without room, the budget calls `make_room`."""
        claim = self.claim
        if size_bytes > UNCOUNTED_BYTES:
            claim = self.claim = claim or Claim(self._connection, make_room)
            if size_bytes > claim.bytes:
                self._budget.grow(claim, size_bytes)
        elif claim:
            self.claim = None
            self._budget.release(claim)

    def close(self) -> None:
        """Ends all waits, and frees the memory in the budget."""
        for stream in list(self.waits):
            self.note_read(stream)
        if claim := self.claim:
            self.claim = None
            self._budget.release(claim)
