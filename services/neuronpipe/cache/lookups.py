"""Redis as a cache asks it: many values at once, only where it saves time, and not at all while something is wrong with it."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from neuronpipe.cache.breaker import Breaker
from neuronpipe.cache.remote import Remote, RemoteError
from neuronpipe.cache.sealing import Codec, seal, unseal
from neuronpipe.cache.worth import Worth
from neuronpipe.core.config import CachePolicy
from neuronpipe.core.logs import log, log_fault, log_warning

# Values in one MGET, and in one pipeline of SETs.
_MAX_VALUES = 256
# What waits to be stored; more is dropped, since whoever needs it computes it.
_MAX_UNSTORED_BYTES = 8 << 20
# A value larger than this is not worth its place in a shared cache.
_MAX_VALUE_BYTES = 1 << 20
# How often the time of a look-up is measured while the cache is used, and how many missing keys the larger measurement asks for.
_MEASURE_EVERY_S, _MEASURED_VALUES = 2.0, 32
# One key in so many is looked up even where that is not worth it, in the background, so that the share of hits stays known. Which ones
# depends on the key alone, so that all processes look up and store the same.
_SAMPLED_ONE_IN = 64
_SAMPLE_EVERY_S = 0.02
# After Redis refused to store: it is full or read-only, and may still be read.
_NO_STORING_S = 1.0


@dataclass(slots=True, eq=False)
class _Wanted:
    key: bytes
    size: int
    # The payload, or None; whether Redis was asked.
    answer: "asyncio.Future[tuple[bytes | None, bool]]"


class Lookups:
    """One process's use of Redis for one cache. Make it where an event loop runs, and close it there."""

    def __init__(self, remote: Remote, policy: CachePolicy, worth: Worth, codec: Codec, *, ttl_s: int, connections: int) -> None:
        self._remote = remote
        self._codec = codec
        self._policy = policy
        self._worth = worth
        self._ttl_s = ttl_s
        # One connection stores, one measures.
        self._max_asking = max(1, connections - 2)
        self._asking = 0
        self.breaker = Breaker()
        self._wanted: list[_Wanted] = []
        self._unstored: dict[bytes, bytes] = {}
        self._unstored_bytes = 0
        self._store_again_s = 0.0
        self._sample_again_s = 0.0
        self._is_storing = False
        self._is_used, self._has_failed = asyncio.Event(), asyncio.Event()
        self._is_reported = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._watch())

    async def find(self, key: bytes, size: int) -> tuple[bytes | None, bool]:
        """The payload of a key, if Redis has it, and whether Redis was asked. Everything wanted in one pass of the loop goes together."""
        self._is_used.set()
        if self._policy == "never" or not self.breaker.is_closed:
            return None, False
        loop = asyncio.get_running_loop()
        wanted = _Wanted(key, size, loop.create_future())
        if not self._wanted:
            loop.call_soon(self._ask)
        self._wanted.append(wanted)
        return await wanted.answer

    def store(self, key: bytes, payload: bytes, *, was_asked: bool) -> None:
        """Stores a payload some time soon, if others are likely to ask for it."""
        if not self.breaker.is_closed or not (was_asked or _is_sample(key)) or time.monotonic() < self._store_again_s:
            return
        if len(payload) > _MAX_VALUE_BYTES or self._unstored_bytes + len(payload) > _MAX_UNSTORED_BYTES:
            return
        if key not in self._unstored:
            self._unstored_bytes += len(payload)
        self._unstored[key] = seal(key, self._codec.pack(payload))
        if not self._is_storing:
            self._is_storing = True
            self._start(self._store())

    async def close(self) -> None:
        """Ends what is under way and closes the connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(Exception):  # of a connection that is broken already
            await self._remote.close()

    def _ask(self) -> None:
        wanted, self._wanted = self._wanted[:_MAX_VALUES], self._wanted[_MAX_VALUES:]
        if self._wanted:
            asyncio.get_running_loop().call_soon(self._ask)
        choices = [True] * len(wanted) if self._policy == "always" else self._worth.choose([one.size for one in wanted])
        if self._asking >= self._max_asking or not self.breaker.is_closed:
            choices = [False] * len(wanted)
        chosen = [one for one, is_chosen in zip(wanted, choices, strict=True) if is_chosen]
        others = [one for one, is_chosen in zip(wanted, choices, strict=True) if not is_chosen]
        if chosen:
            self._asking += 1
            self._start(self._look_up(chosen))
        for one in others:
            _answer(one, None, was_asked=False)
        self._sample(others)

    async def _look_up(self, wanted: list[_Wanted]) -> None:
        payloads: list[bytes | None] = [None] * len(wanted)
        try:
            payloads = await self._get(wanted)
        except RemoteError as error:
            self._fail(error)
        finally:
            self._asking -= 1
            for one, payload in zip(wanted, payloads, strict=True):
                _answer(one, payload, was_asked=True)

    def _sample(self, others: list[_Wanted]) -> None:
        now_s = time.monotonic()
        if self._policy != "auto" or now_s < self._sample_again_s or not self.breaker.is_closed:
            return
        sample = [one for one in others if _is_sample(one.key) and self._worth.could_save(one.size)]
        if sample:
            self._sample_again_s = now_s + _SAMPLE_EVERY_S
            self._start(self._look_up_in_background(sample))

    async def _look_up_in_background(self, sample: list[_Wanted]) -> None:
        try:
            await self._get(sample, is_timed=False)
        except RemoteError as error:
            self._fail(error)

    async def _get(self, wanted: list[_Wanted], *, is_timed: bool = True) -> list[bytes | None]:
        values = await self._timed_get([one.key for one in wanted]) if is_timed else await self._remote.get([one.key for one in wanted])
        sealed = [None if value is None else unseal(one.key, value) for one, value in zip(wanted, values, strict=True)]
        for one, payload in zip(wanted, sealed, strict=True):
            self._worth.found(one.size, is_hit=payload is not None)
        return [None if payload is None else self._codec.unpack(payload) for payload in sealed]

    async def _timed_get(self, keys: list[bytes]) -> list[bytes | None]:
        began_s, computing_s = time.perf_counter(), self._worth.computing_s
        values = await self._remote.get(keys)
        # The event loop computes meanwhile; that is not what looking up takes.
        self._worth.looked_up(len(keys), time.perf_counter() - began_s - (self._worth.computing_s - computing_s))
        return values

    async def _store(self) -> None:
        try:
            while self._unstored:
                batch = {key: self._unstored.pop(key) for key in list(self._unstored)[:_MAX_VALUES]}
                self._unstored_bytes = sum(map(len, self._unstored.values()))
                refused = await self._remote.put(batch, self._ttl_s)
                if refused:
                    if self._store_again_s == 0.0:
                        log_warning("Redis refuses to store: it is full, or read-only", values=refused)
                    self._store_again_s = time.monotonic() + _NO_STORING_S
                    self._forget_unstored()
                elif self._store_again_s:
                    self._store_again_s = 0.0
                    log("Redis stores again")
        except RemoteError as error:
            self._fail(error)
        finally:
            self._is_storing = False

    async def _watch(self) -> None:
        """Measures look-ups while the cache is used, and so finds out when Redis is back."""
        while True:
            await asyncio.sleep(self.breaker.pause_s)
            await self._is_used.wait()
            self._is_used.clear()
            try:
                if not self.breaker.is_closed:
                    await self._remote.get([b"-"])  # connects, which is not measured
                await self._timed_get([b"-"])
                await self._timed_get([b"-%d" % index for index in range(_MEASURED_VALUES)])
            except RemoteError as error:
                self._fail(error)
                continue
            if not self.breaker.is_closed:
                self.breaker.close()
                self._is_reported = False
                log("Redis reached")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._has_failed.wait(), _MEASURE_EVERY_S)
            self._has_failed.clear()

    def _fail(self, error: RemoteError) -> None:
        if not self._is_reported:
            log_warning("no answer from Redis; requests go on without it", reason=str(error))
            self._is_reported = True
        self.breaker.open()
        self._has_failed.set()
        self._forget_unstored()

    def _forget_unstored(self) -> None:
        self._unstored.clear()
        self._unstored_bytes = 0

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()):  # a fault of ours, which costs a look-up and no request
            log_fault("the cache failed", fault)


def _answer(wanted: _Wanted, payload: bytes | None, *, was_asked: bool) -> None:
    if not wanted.answer.done():  # else nobody waits for it any more
        wanted.answer.set_result((payload, was_asked))


def _is_sample(key: bytes) -> bool:
    return key[-1] % _SAMPLED_ONE_IN == 0
