"""Where caches are shared."""

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from neuronpipe.core.settings import Settings

CachePolicy = Literal["auto", "always", "never"]


class RedisSettings(Settings):
    """Where caches are shared."""

    redis_url: str = Field("", description="Redis in which caches are shared, as redis://HOST:PORT/0 (see docs/cache.md); without: none")
    redis_prefix: str = Field(
        "neuronpipe", pattern=r"^[^:]{1,64}$", description="beginning of all keys, without a colon: one for each deployment"
    )
    redis_ttl_s: int = Field(604_800, ge=1, description="seconds that Redis keeps what is stored")
    redis_timeout_ms: int = Field(25, ge=1, le=10_000, description="longest wait for Redis, in milliseconds; then work goes on without")
    redis_connections: int = Field(8, ge=4, le=256, description="most connections to Redis, for each cache")


class CacheCommandSettings(RedisSettings):
    """Settings of `neuronpipe cache`."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_CACHE_")
