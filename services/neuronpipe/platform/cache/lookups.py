"""Look-ups in Redis for a cache: batched, and none while Redis does not work."""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic

from neuronpipe.core.logs import log, log_fault, log_warning
from neuronpipe.platform.cache.remote import Remote, RemoteError
from neuronpipe.platform.cache.sealing import ValueCodec, ValueT, seal, unseal

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
# After this time without a failure, pauses start at the shortest again. Until then pauses keep growing: small probes
# may succeed where real look-ups fail.
_WELL_AFTER_S = 10.0


class Breaker:
    """A circuit breaker: closed while Redis works; the first failure opens it.

    Without Redis, a few cache hits are lost. Waiting for a Redis that hangs costs latency. The breaker is open at
    first, because nothing is connected yet.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._probe_at_s = 0.0
        self._next_pause_s = _FIRST_PAUSE_S
        self._closed_at_s = -math.inf
        self.is_closed = False

    @property
    def pause_s(self) -> float:
        """Seconds until the next probe is due; 0 if it is due now."""
        return max(0.0, self._probe_at_s - self._clock())

    def close(self) -> None:
        self.is_closed = True
        self._closed_at_s = self._clock()

    def open(self) -> bool:
        """Records a failure. Failures of calls that were in flight at that time do not count again.

        Returns whether the breaker had been closed for long.
        """
        if not self.is_closed and self.pause_s:
            return False
        was_well = self.is_closed and self._clock() - self._closed_at_s >= _WELL_AFTER_S
        if was_well:
            self._next_pause_s = _FIRST_PAUSE_S
        self.is_closed = False
        self._probe_at_s = self._clock() + self._next_pause_s
        self._next_pause_s = min(2 * self._next_pause_s, _MAX_PAUSE_S)
        return was_well


# Values beyond this limit are dropped; they are computed again when needed.
_MAX_BYTES = 8 << 20
# Larger values are not stored in the shared cache.
_MAX_VALUE_BYTES = 1 << 20
# Bytes that are packed in one pass of the event loop, which takes 1 ms. A larger value is packed alone.
_MAX_BATCH_BYTES = 256 << 10


class Unstored(Generic[ValueT]):
    """A first-in, first-out queue of values, which are packed only when they are taken out."""

    def __init__(self, codec: ValueCodec[ValueT]) -> None:
        self._codec = codec
        # Each value with its size.
        self._values: dict[bytes, tuple[ValueT, int]] = {}
        self._size_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def add(self, key: bytes, value: ValueT) -> None:
        """Adds a value if there is room for it."""
        size_bytes = self._codec.size_bytes(value)
        if size_bytes > _MAX_VALUE_BYTES or self._size_bytes + size_bytes > _MAX_BYTES:
            return
        if replaced := self._values.get(key):
            self._size_bytes -= replaced[1]
        self._values[key] = value, size_bytes
        self._size_bytes += size_bytes

    def next_sealed(self, max_values: int) -> dict[bytes, bytes]:
        """Removes the next values from the queue, and returns them sealed."""
        batch: dict[bytes, bytes] = {}
        taken_bytes = 0
        while self._values and len(batch) < max_values and taken_bytes < _MAX_BATCH_BYTES:
            key = next(iter(self._values))
            value, size_bytes = self._values.pop(key)
            taken_bytes += size_bytes
            batch[key] = seal(key, self._codec.pack(value))
        self._size_bytes -= taken_bytes
        return batch

    def clear(self) -> None:
        self._values.clear()
        self._size_bytes = 0


# Maximum number of values in one MGET, and in one pipeline of SETs.
_MAX_VALUES = 256
# The limit of a probe, which may have to connect. No request waits for it.
_PROBE_LIMIT_S = 1.0
# A key that no value has.
_PROBED = b"-"
# The pause after Redis refused to store: it is full or read-only, and can still be read.
_NO_STORING_S = 1.0


@dataclass(slots=True, eq=False)
class _Wanted(Generic[ValueT]):
    key: bytes
    # The value, or None; and whether Redis was asked.
    answer: "asyncio.Future[tuple[ValueT | None, bool]]"


class Lookups(Generic[ValueT]):
    """One process's use of Redis for one cache. Create and close it in the same running event loop."""

    def __init__(self, remote: Remote, codec: ValueCodec[ValueT], *, ttl_s: int, connections: int) -> None:
        self._remote = remote
        self._codec = codec
        self._ttl_s = ttl_s
        # Two connections are reserved: for storing and probing.
        self._max_asking = connections - 2
        self._asking = 0
        self._is_closed = False
        self._unanswered: set[_Wanted[ValueT]] = set()
        self.breaker = Breaker()
        self._wanted: list[_Wanted[ValueT]] = []
        self._unstored = Unstored(codec)
        self._store_again_s = 0.0
        self._is_storing = False
        self._is_used, self._has_failed = asyncio.Event(), asyncio.Event()
        self._is_reported = self._is_reached = self._is_fault_logged = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._watch())

    @property
    def is_away(self) -> bool:
        """Whether Redis was asked and does not answer."""
        return self._is_reported and not self.breaker.is_closed

    async def find(self, key: bytes) -> tuple[ValueT | None, bool]:
        """Returns the value of a key, if Redis has it, and whether Redis was asked.

        All keys of one pass of the event loop are looked up together.
        """
        self._is_used.set()
        if not self.breaker.is_closed or self._is_closed:
            return None, False
        loop = asyncio.get_running_loop()
        wanted = _Wanted(key, loop.create_future())
        if not self._wanted:
            loop.call_soon(self._ask)
        self._wanted.append(wanted)
        self._unanswered.add(wanted)
        return await wanted.answer

    def store(self, key: bytes, value: ValueT) -> None:
        """Stores a value soon, in the background."""
        self._is_used.set()
        if not self.breaker.is_closed or self._is_closed or time.monotonic() < self._store_again_s:
            return
        self._unstored.add(key, value)
        if not self._is_storing:
            self._is_storing = True
            self._start(self._store())

    async def close(self) -> None:
        """Cancels calls in flight, releases the waiting callers, and closes the connections."""
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for wanted in list(self._unanswered):
            self._answer(wanted, None, was_asked=False)
        with contextlib.suppress(Exception):  # the connection may be broken already
            await self._remote.close()

    def _ask(self) -> None:
        wanted, self._wanted = self._wanted[:_MAX_VALUES], self._wanted[_MAX_VALUES:]
        if self._wanted:
            asyncio.get_running_loop().call_soon(self._ask)
        if self._is_closed or not self.breaker.is_closed or self._asking >= self._max_asking:
            for entry in wanted:
                self._answer(entry, None, was_asked=False)
        else:
            self._asking += 1
            self._start(self._look_up(wanted))

    async def _look_up(self, wanted: list[_Wanted[ValueT]]) -> None:
        values: list[ValueT | None] = [None] * len(wanted)
        try:
            stored = await self._remote.get([entry.key for entry in wanted])
            values = [self._read(entry.key, value) for entry, value in zip(wanted, stored, strict=True)]
        except RemoteError as error:
            self._fail(error)
        finally:
            self._asking -= 1
            for entry, value in zip(wanted, values, strict=True):
                self._answer(entry, value, was_asked=True)

    def _answer(self, wanted: _Wanted[ValueT], value: ValueT | None, *, was_asked: bool) -> None:
        self._unanswered.discard(wanted)
        if not wanted.answer.done():  # otherwise the caller has left
            wanted.answer.set_result((value, was_asked))

    def _read(self, key: bytes, stored: bytes | None) -> ValueT | None:
        payload = None if stored is None else unseal(key, stored)
        return None if payload is None else self._codec.unpack(payload)

    async def _store(self) -> None:
        try:
            while self._unstored:
                refused = await self._remote.put(self._unstored.next_sealed(_MAX_VALUES), self._ttl_s)
                if refused:
                    if self._store_again_s == 0.0:
                        log_warning("Redis refuses to store: it is full, or read-only", values=refused)
                    self._store_again_s = time.monotonic() + _NO_STORING_S
                    self._unstored.clear()
                elif self._store_again_s:
                    self._store_again_s = 0.0
                    log("Redis stores again")
        except RemoteError as error:
            self._fail(error)
        finally:
            self._is_storing = False

    async def _watch(self) -> None:
        """Probes Redis while it does not work and the cache is used."""
        while True:
            await asyncio.sleep(self.breaker.pause_s)
            await self._is_used.wait()
            self._is_used.clear()
            self._has_failed.clear()
            try:
                await self._remote.get([_PROBED], limit_s=_PROBE_LIMIT_S)
                await self._remote.get([_PROBED])  # connected by now, so within the limit of look-ups
            except RemoteError as error:
                self._fail(error)
                continue
            except Exception as fault:  # a bug: if this task ended, Redis would never be used again
                if not self._is_fault_logged:
                    self._is_fault_logged = True
                    log_fault("probing Redis failed; it is tried again", fault)
                self._fail(RemoteError(type(fault).__name__))
                continue
            self.breaker.close()
            if not self._is_reached:
                self._is_reached = True
                log("Redis reached")
            await self._has_failed.wait()

    def _fail(self, error: RemoteError) -> None:
        # One log line for a loss, even if Redis comes and goes before it is stable again.
        if self.breaker.open() or not self._is_reported:
            self._is_reported, self._is_reached = True, False
            log_warning("no answer from Redis; requests continue without it", reason=str(error))
        self._has_failed.set()
        self._unstored.clear()

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()):  # a bug: it costs a look-up and fails no request
            log_fault("the cache failed", fault)
