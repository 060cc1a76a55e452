"""The settings of the gateway."""

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from neuronpipe.cache.settings import CachePolicy, RedisSettings
from neuronpipe.core.settings import Settings
from neuronpipe.process.settings import (
    CALLERS_CONNECTION_AGE_S,
    ServerSettings,
    check_port,
    connection_age_field,
    listen_field,
    optional_listen_field,
)


class PipelineSettings(Settings):
    """The limits of the gateway's pipeline."""

    max_requests_in_flight: int = Field(1024, ge=1, description="requests in flight at once; more are refused with RESOURCE_EXHAUSTED")
    max_tokens_in_flight: int = Field(
        1 << 20, ge=1, description="tokens in flight at once, estimated until counted; more are refused likewise"
    )
    max_request_tokens: int = Field(1 << 19, ge=1, description="maximum number of tokens in all sequences of one input")
    max_request_s: float = Field(
        600.0, gt=0, le=86_400, description="longest deadline of a request, in seconds; also for requests without one"
    )
    max_input_bytes: int = Field(1 << 20, ge=1, description="largest input, in bytes, except images")
    max_image_bytes: int = Field(10 << 20, ge=1, description="largest input of an image model, in bytes")
    max_batch_items: int = Field(256, ge=1, description="maximum number of requests in one InferBatch")
    max_batch_response_bytes: int = Field(
        64 << 20, ge=1 << 10, description="largest response of InferBatch, in bytes; results beyond it become errors"
    )
    max_stream_in_flight: int = Field(
        64, ge=1, description="requests of one InferStream in flight at once; flow control holds back the rest"
    )


class ResultCacheSettings(RedisSettings):
    """The cache of results."""

    result_cache_models: str = Field(
        "", description="models whose results are cached, separated by commas; *: all; besides those compiled with --cache-results"
    )
    result_cache_redis: CachePolicy = Field(
        "auto", description="when to look in Redis: auto (where that is faster than computing), always, never"
    )
    result_cache_bytes: int = Field(64 << 20, ge=1 << 10, description="memory for results in this process, in bytes")


class HttpSettings(Settings):
    """The HTTP door."""

    http_listen: str = optional_listen_field("HTTP")
    http_default_models: str = Field(
        "", description="models that answer HTTP requests which name none, with commas: the first that has the task; empty: the only one"
    )

    @field_validator("http_listen")
    @classmethod
    def _check_http_port(cls, listen: str) -> str:
        return check_port(listen)


class GatewaySettings(ServerSettings, PipelineSettings, ResultCacheSettings, HttpSettings):
    """Settings of the gateway."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_GATEWAY_")

    listen: str = listen_field("127.0.0.1:50050")
    max_connection_age_s: float = connection_age_field(CALLERS_CONNECTION_AGE_S)
    tokenizer_target: str = Field("127.0.0.1:50051", description="gRPC target of the tokenizer; several are separated by commas")
    executor_target: str = Field("127.0.0.1:50052", description="gRPC target of the neuron-executor; several are separated by commas")
    postprocessor_target: str = Field("127.0.0.1:50053", description="gRPC target of the postprocessor; several are separated by commas")
