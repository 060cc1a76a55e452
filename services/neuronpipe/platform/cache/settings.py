"""The settings of the shared caches in Redis."""

from typing import ClassVar, Literal

from pydantic import Field

from neuronpipe.core.settings import Settings

CachePolicy = Literal["auto", "always", "never"]


class RedisSettings(Settings):
    """Settings of the shared caches in Redis."""

    redis_url: str = Field(  # may hold a password
        "",
        repr=False,
        description="Redis that shares the caches, as redis://HOST:PORT/0 (see docs/caching.md); empty: none",
    )
    redis_prefix: str = Field(
        "neuronpipe", pattern=r"^[^:]{1,64}$", description="prefix of all keys, no colon; give each deployment its own"
    )
    redis_ttl_s: int = Field(604_800, ge=1, description="seconds after which a value in Redis expires")

    # Longest wait for Redis. Then the request continues without it.
    redis_timeout_ms: ClassVar[int] = 25
    # Connections to Redis of each cache.
    redis_connections: ClassVar[int] = 8


NO_REDIS = RedisSettings()


class CacheCommandSettings(Settings):
    """Settings of `neuronpipe cache`."""

    prefix: ClassVar[str] = "NEURONPIPE_CACHE_"

    redis: RedisSettings
