"""A cache as its users see it: a value by its key, found in memory, found in Redis, or computed, once however many ask at a time."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.cache.memory import MemoryCache
from neuronpipe.cache.sealing import AS_IT_IS, Codec
from neuronpipe.cache.worth import Worth
from neuronpipe.core.config import CachePolicy, RedisSettings
from neuronpipe.core.metrics import Meters
from neuronpipe.core.telemetry import Metrics

if TYPE_CHECKING:
    from neuronpipe.cache.lookups import Lookups

# Looking them up in the enumeration takes microseconds.
_HIT_MEMORY, _HIT_REDIS, _MISS, _BYPASS = (
    CacheOutcome.CACHE_OUTCOME_HIT_MEMORY,
    CacheOutcome.CACHE_OUTCOME_HIT_REDIS,
    CacheOutcome.CACHE_OUTCOME_MISS,
    CacheOutcome.CACHE_OUTCOME_BYPASS,
)

Kind = Literal["tokens", "results"]


@dataclass(frozen=True, slots=True)
class Computed:
    """A value, and how long computing it took without waiting for anything, in seconds."""

    payload: bytes
    seconds: float


def name_of(kind: Kind, key: bytes) -> bytes:
    """What a key is called in Redis, behind the prefix."""
    return kind.encode() + b":" + key


class Cache:
    """Values in memory and, where there is a URL, in Redis. Make it where an event loop runs, and close it there."""

    def __init__(self, kind: Kind, memory_bytes: int, redis: RedisSettings, policy: CachePolicy, codec: Codec = AS_IT_IS) -> None:
        self._kind: Kind = kind
        self._memory = MemoryCache(memory_bytes)
        self._computing: dict[bytes, asyncio.Future[bytes | None]] = {}
        self._worth = Worth()
        self._lookups = _lookups(redis, policy, self._worth, codec) if redis.redis_url and policy != "never" else None

    def report(self, meters: Meters) -> None:
        """Has what is held, and whether Redis is asked, among the metrics."""
        meters.gauge(Metrics.CACHE_BYTES, lambda: self._memory.size_bytes, self._kind)
        if lookups := self._lookups:
            meters.gauge(Metrics.CACHE_REDIS, lambda: lookups.breaker.is_closed, self._kind)

    async def get(
        self, key: bytes, size: int, compute: Callable[[], Awaitable[Computed]], *, refresh: bool = False
    ) -> tuple[bytes, "CacheOutcome.ValueType"]:
        """The payload of a key, computed if need be, and where it came from.

        `size` is a measure of the input that the time to compute grows with. `refresh` computes whatever the cache holds, and replaces it.
        Raises what `compute` raises; that is nobody's failure but this caller's, and another who waited for it computes for himself.
        """
        key = name_of(self._kind, key)
        while not refresh:
            if (payload := self._memory.get(key)) is not None:
                return payload, _HIT_MEMORY
            if (computing := self._computing.get(key)) is None:
                break
            # Shielded, as one who leaves must not take the answer along.
            if (payload := await asyncio.shield(computing)) is not None:
                return payload, _HIT_MEMORY
        return await self._find_or_compute(key, size, compute, refresh=refresh)

    async def _find_or_compute(
        self, key: bytes, size: int, compute: Callable[[], Awaitable[Computed]], *, refresh: bool
    ) -> tuple[bytes, "CacheOutcome.ValueType"]:
        computing = asyncio.get_running_loop().create_future()
        self._computing.setdefault(key, computing)
        payload: bytes | None = None
        try:
            outcome, was_asked = _MISS, False
            if self._lookups and not refresh:
                payload, was_asked = await self._lookups.find(key, size)
                outcome = _MISS if was_asked else _BYPASS
                if payload is not None:
                    outcome = _HIT_REDIS
            if payload is None:
                computed = await compute()
                payload = computed.payload
                self._worth.computed(size, computed.seconds)
                if self._lookups:
                    self._lookups.store(key, payload, was_asked=was_asked or refresh)
            self._memory.put(key, payload)
            return payload, outcome
        finally:
            if self._computing.get(key) is computing:
                del self._computing[key]
            computing.set_result(payload)

    async def close(self) -> None:
        """Closes what is connected."""
        if self._lookups:
            await self._lookups.close()


def _lookups(settings: RedisSettings, policy: CachePolicy, worth: Worth, codec: Codec) -> "Lookups":
    # Here, since redis-py takes 0.1 s to import, and most processes do without.
    from neuronpipe.cache.lookups import Lookups
    from neuronpipe.cache.remote import Remote

    timeout_s, connections = settings.redis_timeout_ms / 1000, settings.redis_connections
    remote = Remote(settings.redis_url, prefix=settings.redis_prefix, timeout_s=timeout_s, connections=connections)
    return Lookups(remote, policy, worth, codec, ttl_s=settings.redis_ttl_s, connections=connections)
