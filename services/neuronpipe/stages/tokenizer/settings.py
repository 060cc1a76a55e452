"""The settings of the tokenizer."""

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from neuronpipe.platform.cache.economics import CachePolicy, RedisSettings
from neuronpipe.platform.process.settings import StageSettings, listen_field


class TokenCacheSettings(RedisSettings):
    """The caches of encoded inputs: texts' tokens, and images' pixels."""

    token_cache_bytes: int = Field(
        64 << 20, ge=0, description="memory for token ids of texts in this process, in bytes; 0: no cache"
    )
    image_cache_bytes: int = Field(
        64 << 20, ge=0, description="memory for pixels of images in this process, in bytes; 0: no cache"
    )
    token_cache_redis: CachePolicy = Field(
        "auto", description="when to look in Redis: auto (where that is faster than encoding), always, never"
    )


class TokenizerSettings(StageSettings, TokenCacheSettings):
    """Settings of the tokenizer."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_TOKENIZER_")

    listen: str = listen_field("127.0.0.1:50051")
