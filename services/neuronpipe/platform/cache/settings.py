"""The settings of the shared caches in Redis."""

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

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
        "neuronpipe",
        pattern=r"^[^:]{1,64}$",
        description="prefix of all keys, without a colon; give each deployment its own",
    )
    redis_ttl_s: int = Field(604_800, ge=1, description="seconds after which a value in Redis expires")
    redis_timeout_ms: int = Field(
        25, ge=1, le=10_000, description="longest wait for Redis, in milliseconds; then the request goes on without it"
    )
    redis_connections: int = Field(
        8, ge=4, le=256, description="maximum number of connections to Redis, for each cache"
    )


class CacheCommandSettings(RedisSettings):
    """Settings of `neuronpipe cache`."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_CACHE_")
