"""A cache as its users see it: a value by its key, found in memory, found in Redis, or computed, once however many ask at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Literal

from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.cache.economics import LookupEconomics
from neuronpipe.cache.memory import MemoryCache
from neuronpipe.cache.sealing import ValueCodec, ValueT
from neuronpipe.cache.settings import CachePolicy, RedisSettings
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, Unavailable
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics

if TYPE_CHECKING:
    from neuronpipe.cache.lookups import Lookups

# Looking them up in the enumeration takes microseconds.
_HIT_MEMORY, _HIT_REDIS, _MISS, _BYPASS = (
    CacheOutcome.CACHE_OUTCOME_HIT_MEMORY,
    CacheOutcome.CACHE_OUTCOME_HIT_REDIS,
    CacheOutcome.CACHE_OUTCOME_MISS,
    CacheOutcome.CACHE_OUTCOME_BYPASS,
)

Kind = Literal["tokens", "pixels", "results"]


@dataclass(frozen=True, slots=True)
class TimedValue(Generic[ValueT]):
    """A value, how long computing it took, and for how much of that it kept the event loop from anything else, in seconds."""

    value: ValueT
    seconds: float
    blocked_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Outcome(Generic[ValueT]):
    """What became of computing a value: neither value nor error where it says nothing to others."""

    value: ValueT | None = None
    error: NeuronpipeError | None = None


def name_of(kind: Kind, key: bytes) -> bytes:
    """What a key is called in Redis, behind the prefix."""
    return kind.encode() + b":" + key


class Cache(Generic[ValueT]):
    """Values in memory and, where there is a URL, in Redis. Make it where an event loop runs, and close it there.

    A value is handed to all who ask for it, so it must be one that nobody changes, and never None.
    """

    def __init__(self, kind: Kind, memory_bytes: int, redis: RedisSettings, policy: CachePolicy, codec: ValueCodec[ValueT]) -> None:
        self._kind: Kind = kind
        self._memory: MemoryCache[ValueT] = MemoryCache(memory_bytes, codec.size_bytes)
        self._computing: dict[tuple[bytes, bool], asyncio.Future[_Outcome[ValueT]]] = {}
        self._worth = LookupEconomics()
        self._lookups = _lookups(redis, policy, self._worth, codec) if redis.redis_url and policy != "never" else None

    def report(self, meters: Meters) -> None:
        """Has what is held, and whether Redis is asked, among the metrics."""
        meters.gauge(Metrics.CACHE_BYTES, lambda: self._memory.size_bytes, self._kind)
        if lookups := self._lookups:
            meters.gauge(Metrics.CACHE_REDIS, lambda: not lookups.is_away, self._kind)

    async def get(
        self, key: bytes, size: int, compute: Callable[[], Awaitable[TimedValue[ValueT]]], *, refresh: bool = False, is_bulk: bool = False
    ) -> tuple[ValueT, "CacheOutcome.ValueType"]:
        """The value of a key, computed if need be, and where it came from.

        `size` is a measure of the input that the time to compute grows with. `refresh` computes whatever the cache holds, and replaces it.
        Interactive work does not wait for what bulk work computes, which may take its time, nor the other way round.

        Raises what `compute` raises. Others who wait for it get that, too, where it is true of them: an input that is refused, a stage that
        is away. Anything else, as a deadline, is nobody's failure but this caller's, and they compute for themselves.
        """
        key = name_of(self._kind, key)
        while not refresh:
            if (value := self._memory.get(key)) is not None:
                return value, _HIT_MEMORY
            if (computing := self._computing.get((key, is_bulk))) is None:
                break
            # Shielded, as one who leaves must not take the answer along.
            outcome = await asyncio.shield(computing)
            if outcome.error:
                raise outcome.error
            if outcome.value is not None:
                return outcome.value, _HIT_MEMORY
        return await self._find_or_compute((key, is_bulk), size, compute, refresh=refresh)

    async def _find_or_compute(
        self, flight: tuple[bytes, bool], size: int, compute: Callable[[], Awaitable[TimedValue[ValueT]]], *, refresh: bool
    ) -> tuple[ValueT, "CacheOutcome.ValueType"]:
        key = flight[0]
        computing: asyncio.Future[_Outcome[ValueT]] = asyncio.get_running_loop().create_future()
        # In the place of an older one, whose value is then no longer kept.
        self._computing[flight] = computing
        known: _Outcome[ValueT] = _Outcome()
        try:
            value, outcome, was_asked = None, _MISS, False
            if self._lookups and not refresh:
                value, was_asked = await self._lookups.find(key, size)
                outcome = _HIT_REDIS if value is not None else _MISS if was_asked else _BYPASS
            if value is None:
                timed = await compute()
                value = timed.value
                self._worth.computed(size, timed.seconds, timed.blocked_s)
                if self._lookups and self._computing.get(flight) is computing:
                    self._lookups.store(key, value, is_wanted=was_asked or refresh)
            if self._computing.get(flight) is computing:
                self._memory.put(key, value)
            known = _Outcome(value)
            return value, outcome
        except (InvalidInput, Unavailable) as error:
            known = _Outcome(error=error)
            raise
        finally:
            if self._computing.get(flight) is computing:
                del self._computing[flight]
            computing.set_result(known)

    async def close(self) -> None:
        """Closes what is connected."""
        if self._lookups:
            await self._lookups.close()


def _lookups(settings: RedisSettings, policy: CachePolicy, worth: LookupEconomics, codec: ValueCodec[ValueT]) -> "Lookups[ValueT]":
    # Here, since redis-py takes 0.1 s to import, and most processes do without.
    from neuronpipe.cache.lookups import Lookups
    from neuronpipe.cache.remote import Remote

    timeout_s, connections = settings.redis_timeout_ms / 1000, settings.redis_connections
    remote = Remote(settings.redis_url, prefix=settings.redis_prefix, timeout_s=timeout_s, connections=connections)
    return Lookups(remote, policy, worth, codec, ttl_s=settings.redis_ttl_s, connections=connections)
