"""The calls in flight in one process, over all of its doors: their number, the memory of their messages, their end.

A call is counted from its headers to its answer (`with in_flight`). Its message is claimed from a budget while it
arrives (`arriving`) and while it is turned into an object (`make`, `inflate`). When the process drains, new calls are
refused, then calls whose messages have not arrived, and the rest end.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Overloaded, Unavailable
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.core.parsing import inflate
from neuronpipe.platform.process.background import wait_for_event
from neuronpipe.platform.process.caller_waits import CallerWaits
from neuronpipe.platform.process.receiving_budget import Claim, ReceivingBudget

# Maximum number of calls of all services in one process: the last resort behind admission control and the executor's
# queues.
MAX_CALLS = 4096
# Maximum number of calls that wait for their callers in one kind of wait. Other calls find room.
_MAX_WAITS = MAX_CALLS // 2
# Larger messages are turned into objects in a thread, one after the other. Tensors of this size are serialized in a
# thread, because this takes half a millisecond or more.
LARGE_BYTES = 256 << 10
# Up to this size, compressed data is first decompressed without a thread, in case the result is small.
_SMALL_BYTES = 16 << 10
# Maximum number of bytes that a byte of compressed data becomes (https://zlib.net/zlib_tech.html).
_MAX_RATIO = 1032
# After this time without a new call while draining, callers know that the process stops.
_QUIET_S = 0.1

T = TypeVar("T")


class InFlight:
    """Counts calls (as a context manager), and the messages that are being received.

    The counts let a process wait for its calls to end.
    """

    def __init__(
        self,
        service: str,
        max_message_bytes: int,
        max_receiving_bytes: int,
        max_calls: int = MAX_CALLS,
        *,
        max_receive_s: float = 60.0,
        meters: Meters | None = None,
    ) -> None:
        self.count = 0
        self.meters = meters or Meters()
        self._max_receive_s = max_receive_s
        # Waits for the rest of messages that are arriving.
        self.arrivals = self.caller_waits("max_receive_s", max_receive_s)
        self.refuses_arriving = False
        self._checks: list[Callable[[float | None], None]] = []
        self._service = service
        self._max_calls = max_calls
        self.budget = ReceivingBudget(max_message_bytes, max_receiving_bytes)
        # The budget of answers that callers do not read, by connection.
        self.unread = ReceivingBudget(max_message_bytes, max_receiving_bytes)
        self._makers: ThreadPoolExecutor | None = None
        # Set when new calls are refused.
        self.draining = asyncio.Event()
        self._came = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._idle_since_s = time.monotonic()

    def begin(self) -> None:
        """Counts a call until `end`. Raises Unavailable while the process drains, Overloaded at the limit."""
        self._came += 1
        if self.draining.is_set():
            raise self.stopping()
        if self.count >= self._max_calls:
            raise Overloaded(
                f"{self.count} calls in flight, the {self._service} service takes {self._max_calls}", retry_after_s=1
            )
        if not self.count:
            self._idle.clear()
        self.count += 1

    def end(self, *_: object) -> None:
        """Ends a counted call."""
        self.count -= 1
        if not self.count:
            self._idle.set()
            self._idle_since_s = time.monotonic()

    __enter__, __exit__ = begin, end

    def add_check(self, check: Callable[[float | None], None]) -> None:
        """Runs `check` before a call's message is read, with the seconds left until its deadline. It raises Overloaded
        for a call that the process has no room for.
        """
        self._checks.append(check)

    def check_room(self, remaining_s: float | None) -> None:
        """Runs the checks of a call whose message has not been read. Raises the errors of the checks."""
        for check in self._checks:
            check(remaining_s)

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Does not count a call while the block runs: the call only waits, and leaves its place to others."""
        self.end()
        try:
            yield
        finally:
            self.count += 1
            self._idle.clear()

    def caller_waits(self, setting: str, limit_s: float) -> CallerWaits:
        """Returns the waits for callers of one kind, which the setting with this name limits."""
        return CallerWaits(limit_s, _MAX_WAITS, self.meters.counter(Metrics.CALLS_ENDED, setting))

    @contextmanager
    def arriving(self, connection: str, refuse: Callable[[NeuronpipeError], None]) -> Iterator[Callable[[int], None]]:
        """Counts a message that arrives in pieces while the block runs. Pass its size so far to the yielded function.

        If the message takes too long, or the budget has no room for it, `refuse` is called, which must end the block.
        """
        claim, arrival = Claim(connection, refuse), self.arrivals.begin(lambda is_late: refuse(self.too_slow(is_late)))
        try:
            yield lambda size_bytes: self.budget.grow(claim, size_bytes)
        finally:
            self.arrivals.remove(arrival)
            self.budget.release(claim)

    async def make(self, connection: str, size_bytes: int, work: Callable[[], T]) -> T:
        """Returns the result of `work` on a message that has arrived.

        A large message waits for its turn in a thread, and counts as if it were still arriving. Raises Overloaded if
        the budget has no room for it.
        """
        if size_bytes <= LARGE_BYTES:
            return work()
        refusals: list[NeuronpipeError] = []
        claim = Claim(connection, refusals.append)
        self.budget.grow(claim, size_bytes)
        self._makers = self._makers or ThreadPoolExecutor(1, "messages")
        try:
            if not refusals:
                result = await asyncio.get_running_loop().run_in_executor(self._makers, copy_context().run, work)
        finally:
            self.budget.release(claim)
        if refusals:
            raise refusals[0]
        return result

    async def inflate(self, connection: str, data: bytes, window_bits: int, max_bytes: int) -> bytes | None:
        """Calls `inflate`. Data that may become large waits as in `make`, and counts with its most possible bytes."""
        if len(data) <= _SMALL_BYTES:
            small = inflate(data, window_bits, min(max_bytes, LARGE_BYTES))
            if small is not None or max_bytes <= LARGE_BYTES:
                return small
        most_bytes = min(max_bytes, _MAX_RATIO * len(data))
        return await self.make(connection, most_bytes, partial(inflate, data, window_bits, max_bytes))

    def drain(self) -> None:
        self.draining.set()

    def refuse_arriving(self) -> None:
        """Refuses the calls whose messages have not arrived: no work was done for them."""
        self.refuses_arriving = True
        self.arrivals.end_all()

    async def wait_until_idle(self, limit_s: float) -> None:
        """Returns when no call is in flight, and after `limit_s` in any case."""
        await wait_for_event(self._idle, limit_s)

    async def wait_until_unused(self, idle_s: float) -> None:
        """Returns when no call has been in flight for `idle_s` seconds."""
        while self.count or (left_s := self._idle_since_s + idle_s - time.monotonic()) > 0:
            await (self._idle.wait() if self.count else asyncio.sleep(left_s))

    async def wait_until_quiet(self, limit_s: float) -> bool:
        """Returns True when no new call has come for a moment, and False after `limit_s`."""
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0:
            calls_before = self._came
            await asyncio.sleep(min(_QUIET_S, left_s))
            if calls_before == self._came and left_s >= _QUIET_S:
                return True
        return False

    def waited(self, is_late: bool, late: str) -> NeuronpipeError:
        """Returns the error of a call that may no longer wait for its caller.

        `is_late`: the time limit is over, and `late` becomes the message. Otherwise too many calls waited.
        """
        if is_late:
            return DeadlineExceeded(late)
        return Overloaded(f"{_MAX_WAITS} calls wait for their callers, the limit", retry_after_s=1)

    def too_slow(self, is_late: bool) -> NeuronpipeError:
        """Returns the error of a call whose message did not arrive in time, or while too many calls waited."""
        if self.refuses_arriving:
            return self.stopping()
        return self.waited(is_late, f"the message took longer than {self._max_receive_s:g} s, the limit")

    def stopping(self) -> Unavailable:
        """Returns the error of calls, and of reads from streams, while the process drains."""
        return Unavailable(f"the {self._service} service is stopping")

    def starting(self) -> Unavailable:
        """Returns the error of calls while the process loads."""
        return Unavailable(f"the {self._service} service is starting")
