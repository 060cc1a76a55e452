"""What is in flight in one process, over all of its doors: counted, bounded, and refused once the process drains."""

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Overloaded, Unavailable

# Backstop behind the admission of the gateway and the queues of the executor: calls in one process, of all services.
MAX_CALLS = 4096
# Reads of messages that have just begun. More wait, unread, and the network holds them back: each could bring a message of any size before
# the loop looks again.
_MAX_NEW_READS = 8
# A message that is not there after this long is large, or its sender slow. From then on it claims a part of the budget, the more the longer
# it takes, and after the second time as much as the largest message: a small one that comes slowly costs little.
_QUICK_S = 0.005
_FULL_CLAIM_S = 0.64
# How long a message may take at all.
_RECEIVE_LIMIT_S = 60.0
# While draining, so long without a new call means that callers have heard of it.
_QUIET_S = 0.1

T = TypeVar("T")


class InFlight:
    """Counts calls, so that a process can wait for them, and the messages that are being received."""

    def __init__(self, service: str, max_message_bytes: int, max_receiving_bytes: int, max_calls: int = MAX_CALLS) -> None:
        self.count = 0
        self._service = service
        self._max_calls = max_calls
        self._max_message_bytes = max_message_bytes
        self._max_claimed_bytes = max(max_message_bytes, max_receiving_bytes)
        self._claimed_bytes = 0
        # Of each connection, which gets half of the budget at most: calls that send nothing would keep all others out.
        self._claimed_of: Counter[str] = Counter()
        self._max_claimed_of = max(max_message_bytes, max_receiving_bytes // 2)
        self._new_reads = asyncio.Semaphore(_MAX_NEW_READS)
        self._is_draining = False
        self._came_late = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @contextmanager
    def one_more(self) -> Iterator[None]:
        """Counts a call in and out. Raises Unavailable while draining, and Overloaded."""
        if self._is_draining:
            self._came_late += 1
            raise self.stopping()
        if self.count >= self._max_calls:
            raise Overloaded(f"{self.count} calls in flight, the {self._service} service takes {self._max_calls}", retry_after_s=1)
        self.count += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self._idle.set()

    async def receive(self, connection: str, read: Callable[[], Awaitable[T]], refuse: Callable[[NeuronpipeError], None]) -> T:
        """Reads the message of a call. Where it takes long and the budget has no room for it, calls `refuse`, which must end the read."""
        loop = asyncio.get_running_loop()
        claimed_bytes, is_new = 0, True
        timer: asyncio.TimerHandle

        def claim() -> None:
            nonlocal claimed_bytes, is_new, timer
            if is_new:
                is_new = False
                self._new_reads.release()
            taken_s = time.monotonic() - began_s
            more_bytes = int(self._max_message_bytes * min(1.0, taken_s / _FULL_CLAIM_S)) - claimed_bytes
            if self._claimed_bytes + more_bytes > self._max_claimed_bytes:
                refuse(Overloaded(f"{self._max_claimed_bytes} bytes for messages while they arrive, the limit", retry_after_s=1))
            elif self._claimed_of[connection] + more_bytes > self._max_claimed_of:
                problem = f"{self._max_claimed_of} bytes for messages of one connection while they arrive, the limit"
                refuse(Overloaded(problem, retry_after_s=1))
            elif taken_s > _RECEIVE_LIMIT_S:
                refuse(DeadlineExceeded(f"the message took longer than {_RECEIVE_LIMIT_S:g} s, the limit"))
            else:
                claimed_bytes += more_bytes
                self._claimed_bytes += more_bytes
                self._claimed_of[connection] += more_bytes
                timer = loop.call_later(taken_s, claim)

        await self._new_reads.acquire()
        began_s = time.monotonic()
        timer = loop.call_later(_QUICK_S, claim)
        try:
            return await read()
        finally:
            timer.cancel()
            self._claimed_bytes -= claimed_bytes
            self._claimed_of[connection] -= claimed_bytes
            if not self._claimed_of[connection]:
                del self._claimed_of[connection]
            if is_new:
                self._new_reads.release()

    def drain(self) -> None:
        """Refuses new calls from now on."""
        self._is_draining = True

    async def wait_until_idle(self, limit_s: float) -> None:
        """Returns once no call is in flight, and after `limit_s` in any case."""
        try:
            await asyncio.wait_for(self._idle.wait(), limit_s)
        except TimeoutError:
            return

    async def wait_until_quiet(self, limit_s: float) -> None:
        """Returns once no new call has come for a moment, and after `limit_s` in any case."""
        end_s = time.monotonic() + limit_s
        came_late = -1
        while came_late != self._came_late and (left_s := end_s - time.monotonic()) > 0:
            came_late = self._came_late
            await asyncio.sleep(min(_QUIET_S, left_s))

    def stopping(self) -> Unavailable:
        """Why a call is refused now, or a stream not read any more."""
        return Unavailable(f"the {self._service} service is stopping")

    def starting(self) -> Unavailable:
        """Why a call is refused while the process loads."""
        return Unavailable(f"the {self._service} service is starting")
