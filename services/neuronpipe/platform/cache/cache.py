"""A cache: a value is found in the memory of this process, found in Redis, or computed.

Concurrent callers share one computation (single-flight).
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal

from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, Unavailable
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.platform.cache.sealing import ValueCodec, ValueT
from neuronpipe.platform.cache.settings import CachePolicy, RedisSettings

if TYPE_CHECKING:
    from neuronpipe.platform.cache.lookups import Lookups


# Bytes of an entry in addition to its key and value: two objects' headers, a pair, a number and a place in the table
# (measured with tracemalloc on CPython 3.11, 2026-11-22: 239 bytes).
_OVERHEAD_BYTES = 240


class MemoryCache(Generic[ValueT]):
    """Holds at most `max_bytes`, including keys and overhead.

    A value that takes more than an eighth of this limit is not kept.
    """

    def __init__(self, max_bytes: int, size_bytes_of: Callable[[ValueT], int]) -> None:
        """`size_bytes_of`: returns the memory that a value takes when it is put."""
        self._max_bytes = max_bytes
        self._size_bytes_of = size_bytes_of
        # Each value with its bytes in memory.
        self._values: OrderedDict[bytes, tuple[ValueT, int]] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: bytes) -> ValueT | None:
        """Returns the value, marked as used now; None if it is missing."""
        entry = self._values.get(key)
        if entry is None:
            return None
        self._values.move_to_end(key)
        return entry[0]

    def put(self, key: bytes, value: ValueT) -> None:
        """Stores a value, and evicts the least recently used values to make room."""
        size_bytes = len(key) + self._size_bytes_of(value) + _OVERHEAD_BYTES
        if size_bytes * 8 > self._max_bytes:
            return
        replaced = self._values.pop(key, None)
        if replaced is not None:
            self.size_bytes -= replaced[1]
        self._values[key] = value, size_bytes
        self.size_bytes += size_bytes
        while self.size_bytes > self._max_bytes:
            self.size_bytes -= self._values.popitem(last=False)[1][1]


# A lookup in the enumeration takes a microsecond.
_HIT_MEMORY, _HIT_REDIS, _MISS, _BYPASS = (
    CacheOutcome.CACHE_OUTCOME_HIT_MEMORY,
    CacheOutcome.CACHE_OUTCOME_HIT_REDIS,
    CacheOutcome.CACHE_OUTCOME_MISS,
    CacheOutcome.CACHE_OUTCOME_BYPASS,
)

CacheKind = Literal["tokens", "pixels", "results"]
# With the policy `auto`, Redis is asked for an input of at least this size. A text of 2 KiB takes 0.64 ms to tokenize,
# and a look-up 0.31 ms (docs/benchmarks/cache.md).
_MIN_ASKED_BYTES: dict[CacheKind, int] = {"tokens": 2 << 10, "pixels": 0, "results": 0}


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[ValueT]):
    """The outcome of a computation for waiting callers: a value, an error that also applies to them, or neither."""

    value: ValueT | None = None
    error: NeuronpipeError | None = None


def name_of(kind: CacheKind, key: bytes) -> bytes:
    """Returns a key's name in Redis, without the prefix."""
    return kind.encode() + b":" + key


class Cache(Generic[ValueT]):
    """Values in memory and, where a URL is set, in Redis. Create and close it in the same running event loop.

    All callers get the same object, so a value must be immutable, and never None.
    """

    def __init__(
        self, kind: CacheKind, memory_bytes: int, redis: RedisSettings, policy: CachePolicy, codec: ValueCodec[ValueT]
    ) -> None:
        self._kind: CacheKind = kind
        self._memory: MemoryCache[ValueT] = MemoryCache(memory_bytes, codec.size_bytes)
        self._computing: dict[tuple[bytes, bool], asyncio.Future[_Outcome[ValueT]]] = {}
        self._lookups = _lookups(redis, codec) if redis.redis_url and policy != "never" else None
        self._min_asked_bytes = _MIN_ASKED_BYTES[kind] if policy == "auto" else 0

    def report(self, meters: Meters) -> None:
        """Adds the memory in use and the state of Redis to the metrics."""
        meters.gauge(Metrics.CACHE_BYTES, lambda: self._memory.size_bytes, self._kind)
        if lookups := self._lookups:
            meters.gauge(Metrics.CACHE_REDIS, lambda: not lookups.is_away, self._kind)

    async def get(
        self,
        key: bytes,
        size_bytes: int,
        compute: Callable[[], Awaitable[ValueT]],
        *,
        refresh: bool = False,
        is_bulk: bool = False,
    ) -> tuple[ValueT, "CacheOutcome.ValueType"]:
        """Returns the value of a key and the source of the value. Computes the value if it is not cached.

        `size_bytes`: the size of the input. `refresh`: computes always, and replaces the cached value. Interactive and
        bulk requests do not wait for each other's computations, because bulk work may be delayed.

        Raises the errors of `compute`. Callers who wait for the same value get the error as well if it applies to them:
        invalid input, or an unavailable stage. After any other error, such as this caller's deadline, they compute the
        value themselves.
        """
        key = name_of(self._kind, key)
        while not refresh:
            if (value := self._memory.get(key)) is not None:
                return value, _HIT_MEMORY
            if (computing := self._computing.get((key, is_bulk))) is None:
                break
            # Shielded: a caller who leaves must not cancel the computation for the others.
            outcome = await asyncio.shield(computing)
            if outcome.error:
                raise outcome.error
            if outcome.value is not None:
                return outcome.value, _HIT_MEMORY
        lookups = self._lookups if size_bytes >= self._min_asked_bytes else None
        return await self._find_or_compute((key, is_bulk), lookups, compute, refresh=refresh)

    async def _find_or_compute(
        self,
        flight: tuple[bytes, bool],
        lookups: "Lookups[ValueT] | None",
        compute: Callable[[], Awaitable[ValueT]],
        *,
        refresh: bool,
    ) -> tuple[ValueT, "CacheOutcome.ValueType"]:
        key = flight[0]
        computing: asyncio.Future[_Outcome[ValueT]] = asyncio.get_running_loop().create_future()
        # Replaces an older computation, whose value is then not kept.
        self._computing[flight] = computing
        shared_outcome: _Outcome[ValueT] = _Outcome()
        try:
            value, was_asked = await lookups.find(key) if lookups and not refresh else (None, False)
            is_known = value is not None
            if value is None:
                value = await compute()
                if lookups and (was_asked or refresh) and self._computing.get(flight) is computing:
                    lookups.store(key, value)
            if self._computing.get(flight) is computing:
                self._memory.put(key, value)
            shared_outcome = _Outcome(value)
            is_bypassed = self._lookups and not was_asked and not refresh
            return value, _HIT_REDIS if is_known else _BYPASS if is_bypassed else _MISS
        except (InvalidInput, Unavailable) as error:
            shared_outcome = _Outcome(error=error)
            raise
        finally:
            if self._computing.get(flight) is computing:
                del self._computing[flight]
            computing.set_result(shared_outcome)

    async def close(self) -> None:
        if self._lookups:
            await self._lookups.close()


def _lookups(settings: RedisSettings, codec: ValueCodec[ValueT]) -> "Lookups[ValueT]":
    # Imported here, because redis-py takes 0.1 s to import and most processes do not need it.
    from neuronpipe.platform.cache.lookups import Lookups
    from neuronpipe.platform.cache.remote import Remote

    timeout_s, connections = settings.redis_timeout_ms / 1000, settings.redis_connections
    remote = Remote(settings.redis_url, prefix=settings.redis_prefix, timeout_s=timeout_s, connections=connections)
    return Lookups(remote, codec, ttl_s=settings.redis_ttl_s, connections=connections)
