"""Counts and limits the calls in flight in one process, over all of its doors, and refuses calls while it drains.

Also limits the messages that are being received, or turned into objects, and ends what waits for callers for too long.
"""

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Overloaded, Unavailable
from neuronpipe.core.metrics import Counter, Meters
from neuronpipe.core.names import Metrics
from neuronpipe.core.parsing import inflate
from neuronpipe.platform.process.receiving_budget import Claim, ReceivingBudget

# Where too many wait, the one that has waited longest is ended; not before this time, in which any network delivers.
_PATIENCE_S = 5.0


class CallerWaits:
    """What waits in one way. As all of it may wait equally long, the first is always due first.

    `limit_s`: 0: for ever. `max_waits`: how many may wait at once. `ended`: counts those that were ended.
    """

    def __init__(self, limit_s: float, max_waits: int, ended: Counter) -> None:
        self._limit_s = limit_s
        self._max_waits = max_waits
        self._ended = ended
        self._waits: dict[int, tuple[float, Callable[[bool], None]]] = {}
        self._numbers = itertools.count()
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, end: Callable[[bool], None]) -> int:
        """Something waits from now on. `end` is called where it waits for too long, with whether that was the time
        limit; else another needs its place. Returns the number for `done`.
        """
        number, now_s = next(self._numbers), time.monotonic()
        self._waits[number] = now_s, end
        if len(self._waits) > self._max_waits and now_s - self._first_began_s() > _PATIENCE_S:
            self._end_first(is_late=False)
        if self._timer is None and self._limit_s:
            self._timer = asyncio.get_running_loop().call_later(self._limit_s, self._look)
        return number

    def done(self, number: int) -> None:
        """It no longer waits. May be called again."""
        self._waits.pop(number, None)

    def end_all(self) -> None:
        """Ends all that waits now."""
        while self._waits:
            self._waits.pop(next(iter(self._waits)))[1](False)

    def _look(self) -> None:
        """One timer serves all, as hardly anything waits until its limit."""
        self._timer = None
        due_s = time.monotonic() - self._limit_s
        while self._waits and self._first_began_s() <= due_s:
            self._end_first(is_late=True)
        if self._waits:
            wait_s = max(0.0, self._first_began_s() - due_s)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._look)

    def _first_began_s(self) -> float:
        return self._waits[next(iter(self._waits))][0]

    def _end_first(self, *, is_late: bool) -> None:
        _, end = self._waits.pop(next(iter(self._waits)))
        self._ended.add()
        end(is_late)


# Last resort behind the gateway's admission control and the executor's queues: calls in one process, of all services.
MAX_CALLS = 4096
# Of all calls, those that may wait for their callers in one way, so that the others find room.
_MAX_WAITS = MAX_CALLS // 2
# Larger messages are turned into objects in a thread, one after the other.
LARGE_BYTES = 256 << 10
# Compressed data of which it is tried first whether they stay small.
_SMALL_BYTES = 16 << 10
# What a byte of compressed data becomes at most (https://zlib.net/zlib_tech.html).
_MAX_RATIO = 1032
# While draining, this time without a new call means that callers know that the process stops.
_QUIET_S = 0.1

T = TypeVar("T")


class InFlight:
    """Counts calls (as a context manager), and the messages that are being received.

    So a process can wait for its calls to end.
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
        # Messages that are arriving.
        self.arrivals = self.caller_waits("max_receive_s", max_receive_s)
        self.refuses_arriving = False
        # Called before a call's message is read, with the seconds left until its deadline; raises Overloaded.
        self.check_room: Callable[[float | None], None] = lambda remaining_s: None
        self._service = service
        self._max_calls = max_calls
        self.budget = ReceivingBudget(max_message_bytes, max_receiving_bytes)
        # For answers that callers do not read, by connection.
        self.unread = ReceivingBudget(max_message_bytes, max_receiving_bytes)
        self._makers: ThreadPoolExecutor | None = None
        self._is_draining = False
        self._came = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._idle_since_s = time.monotonic()

    def __enter__(self) -> None:
        """Counts a call until the block ends. Raises Unavailable while the process drains, Overloaded at the limit."""
        self._came += 1
        if self._is_draining:
            raise self.stopping()
        if self.count >= self._max_calls:
            raise Overloaded(
                f"{self.count} calls in flight, the {self._service} service takes {self._max_calls}", retry_after_s=1
            )
        self.count += 1
        self._idle.clear()

    def __exit__(self, *_: object) -> None:
        self.count -= 1
        if not self.count:
            self._idle.set()
            self._idle_since_s = time.monotonic()

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """While the block runs, a call that was counted is not: it only waits, and leaves its place to others."""
        self.__exit__()
        try:
            yield
        finally:
            self.count += 1
            self._idle.clear()

    def caller_waits(self, setting: str, limit_s: float) -> CallerWaits:
        """What waits for callers in one way, which the setting of this name limits."""
        return CallerWaits(limit_s, _MAX_WAITS, self.meters.counter(Metrics.CALLS_ENDED, setting))

    @contextmanager
    def arriving(self, connection: str, refuse: Callable[[NeuronpipeError], None]) -> Iterator[Callable[[int], None]]:
        """While the block runs, a message arrives in pieces; tell the function how large it is by now.

        If it takes too long, or the budget has no room for it, `refuse` is called, which must end the block.
        """
        claim, arrival = Claim(connection, refuse), self.arrivals.begin(lambda is_late: refuse(self.too_slow(is_late)))
        try:
            yield lambda size_bytes: self.budget.grow(claim, size_bytes)
        finally:
            self.arrivals.done(arrival)
            self.budget.end(claim)

    async def make(self, connection: str, size_bytes: int, work: Callable[[], T]) -> T:
        """What `work` makes of a message that has arrived. A large one waits for its turn in a thread, and counts as if
        it were still arriving. Raises Overloaded where the budget has no room for it.
        """
        if size_bytes <= LARGE_BYTES:
            return work()
        refusals: list[NeuronpipeError] = []
        claim = Claim(connection, refusals.append)
        self.budget.grow(claim, size_bytes)
        self._makers = self._makers or ThreadPoolExecutor(1, "messages")
        try:
            if not refusals:
                made = await asyncio.get_running_loop().run_in_executor(self._makers, work)
        finally:
            self.budget.end(claim)
        if refusals:
            raise refusals[0]
        return made

    async def inflate(self, connection: str, data: bytes, window_bits: int, max_bytes: int) -> bytes | None:
        """See `inflate`. What becomes large waits as in `make`, and counts as what it may become."""
        if len(data) <= _SMALL_BYTES:
            small = inflate(data, window_bits, min(max_bytes, LARGE_BYTES))
            if small is not None or max_bytes <= LARGE_BYTES:
                return small
        most_bytes = min(max_bytes, _MAX_RATIO * len(data))
        return await self.make(connection, most_bytes, partial(inflate, data, window_bits, max_bytes))

    def drain(self) -> None:
        """Refuses new calls from now on."""
        self._is_draining = True

    def refuse_arriving(self) -> None:
        """Refuses the calls whose messages have not come yet: nothing of them was worked on."""
        self.refuses_arriving = True
        self.arrivals.end_all()

    async def wait_until_idle(self, limit_s: float) -> None:
        """Returns once no call is in flight, and after `limit_s` in any case."""
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            return

    async def wait_until_unused(self, idle_s: float) -> None:
        """Returns once no call has been in flight for so many seconds."""
        while self.count or (left_s := self._idle_since_s + idle_s - time.monotonic()) > 0:
            await (self._idle.wait() if self.count else asyncio.sleep(left_s))

    async def wait_until_quiet(self, limit_s: float) -> bool:
        """Returns True once no new call has come for a moment, and False after `limit_s`."""
        end_s = time.monotonic() + limit_s
        while (left_s := end_s - time.monotonic()) > 0:
            came = self._came
            await asyncio.sleep(min(_QUIET_S, left_s))
            if came == self._came and left_s >= _QUIET_S:
                return True
        return False

    def waited(self, is_late: bool, late: str) -> NeuronpipeError:
        """The error of a call that waited for its caller for too long, as `late` says, or while too many others did."""
        if is_late:
            return DeadlineExceeded(late)
        return Overloaded(f"{_MAX_WAITS} calls wait for their callers, the limit", retry_after_s=1)

    def too_slow(self, is_late: bool) -> NeuronpipeError:
        """The error of a call whose message did not arrive in time, or while too many others waited."""
        if self.refuses_arriving:
            return self.stopping()
        return self.waited(is_late, f"the message took longer than {self._max_receive_s:g} s, the limit")

    def stopping(self) -> Unavailable:
        """The error of calls, and of reads from streams, while the process drains."""
        return Unavailable(f"the {self._service} service is stopping")

    def starting(self) -> Unavailable:
        """The error of calls while the process loads."""
        return Unavailable(f"the {self._service} service is starting")
