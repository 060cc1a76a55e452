"""The settings of every service, each from its command line or from the environment, read once in cli.py.

A setting `max_batch_size` of the service `neuron-executor` is `--max-batch-size` on the command line, which wins, or
`NEURONPIPE_NEURON_EXECUTOR_MAX_BATCH_SIZE` in the environment. A variable under the prefix that is no setting is an error, since it
is a typing error more often than not.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from neuronpipe.core.errors import SetupError
from neuronpipe.core.neuron import MAX_CORES, parse_cores

SettingsT = TypeVar("SettingsT", bound="_Settings")

CachePolicy = Literal["auto", "always", "never"]

_LAST_PORT = 65535


def _listen(default: str) -> str:
    listen: str = Field(default, description="address to listen on, HOST:PORT; port 0 takes a free one", pattern=r"^.+:\d{1,5}$")
    return listen


class _Settings(BaseSettings):
    # On all bases alike: of several, pydantic takes the last one's value, were it only a default.
    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_ignore_empty=True)


class ServerSettings(_Settings):
    """What every service has."""

    listen: str = _listen("127.0.0.1:0")
    repository: Path = Field(description="folder of bundles, as `neuronpipe compile` writes it")
    grace_s: float = Field(10.0, ge=0, le=3600, description="seconds that requests in flight get to finish after SIGTERM")
    max_message_bytes: int = Field(64 << 20, ge=1 << 10, le=(1 << 31) - 1, description="largest gRPC message taken, in bytes")
    metrics_listen: str = Field(
        "", description="address for Prometheus, HOST:PORT; port 0 takes a free one, empty has none", pattern=r"^(.+:\d{1,5})?$"
    )
    kept_traces: int = Field(
        0, ge=0, le=100_000, description="sampled traces kept in memory, which whoever reaches this server may read: for development"
    )

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _check_port(cls, listen: str) -> str:
        if listen and int(listen.rpartition(":")[2]) > _LAST_PORT:  # gRPC would take the number modulo 65536
            raise ValueError(f"ports end at {_LAST_PORT}")
        return listen


class PipelineSettings(_Settings):
    """The limits of the gateway's pipeline."""

    max_requests_in_flight: int = Field(1024, ge=1, description="inputs worked on at once; more are refused with RESOURCE_EXHAUSTED")
    max_tokens_in_flight: int = Field(1 << 20, ge=1, description="tokens worked on at once, estimated until they are counted; as above")
    max_input_bytes: int = Field(1 << 20, ge=1, description="largest input, in bytes, but for images")
    max_image_bytes: int = Field(10 << 20, ge=1, description="largest input of a model of images, in bytes")
    max_batch_items: int = Field(256, ge=1, description="most requests in one InferBatch")
    max_batch_response_bytes: int = Field(64 << 20, ge=1 << 10, description="largest response of InferBatch; results beyond it are refused")
    max_stream_in_flight: int = Field(64, ge=1, description="requests of one InferStream worked on at once; the rest wait in the network")


class CoreSettings(_Settings):
    """The cores that models run on."""

    cores: int | str = Field(
        0, description="cores for each model: how many, or which NeuronCores, as 0-3; 0: all NeuronCores, one a CPU thread with openvino"
    )

    @field_validator("cores", mode="before")
    @classmethod
    def _check_cores(cls, cores: object) -> object:
        if isinstance(cores, str) and not cores.isdigit():
            try:
                parse_cores(cores)
            except SetupError as error:
                raise ValueError(str(error)) from error
            return cores
        if not 0 <= int(str(cores)) <= MAX_CORES:
            raise ValueError(f"at most {MAX_CORES}")
        return int(str(cores))

    @property
    def core_count(self) -> int:
        """How many cores; 0 for as many as there are."""
        return len(parse_cores(self.cores)) if isinstance(self.cores, str) else self.cores


class EngineSettings(CoreSettings):
    """How the executor runs models."""

    backend: str = Field("", description="back end to run on; default: the first that the bundle was compiled for")
    cores_per_replica: int = Field(1, ge=1, le=MAX_CORES, description="cores that compute one replica of a model together")
    in_flight: int = Field(1, ge=1, le=4, description="batches handed to a core at once: 1 for latency, 2 keeps a NeuronCore busy")
    threads: int = Field(0, ge=0, le=1024, description="CPU threads shared by a model's cores; 0: one for each available CPU")
    max_batch_size: int = Field(32, ge=1, le=4096, description="most sequences in a batch; buckets have their own")
    max_batch_tokens: int = Field(8192, ge=1, description="most padded tokens in a batch of more than one sequence; not for buckets")
    max_queue_sequences: int = Field(4096, ge=1, description="most sequences that wait for each model; more are refused")


class RedisSettings(_Settings):
    """Where caches are shared."""

    redis_url: str = Field("", description="Redis in which caches are shared, as redis://HOST:PORT/0 (see docs/cache.md); without: none")
    redis_prefix: str = Field(
        "neuronpipe", pattern=r"^[^:]{1,64}$", description="beginning of all keys, without a colon: one for each deployment"
    )
    redis_ttl_s: int = Field(604_800, ge=1, description="seconds that Redis keeps what is stored")
    redis_timeout_ms: int = Field(25, ge=1, le=10_000, description="longest wait for Redis, in milliseconds; then work goes on without")
    redis_connections: int = Field(8, ge=4, le=256, description="most connections to Redis, for each cache")


class TokenCacheSettings(RedisSettings):
    """The cache of tokenizations."""

    token_cache_bytes: int = Field(64 << 20, ge=0, description="memory for tokenizations in this process, in bytes; 0: no token cache")
    token_cache_redis: CachePolicy = Field("auto", description="look in Redis: auto (where that is quicker than tokenizing), always, never")


class ResultCacheSettings(RedisSettings):
    """The cache of results."""

    result_cache_models: str = Field("", description="models whose results are cached, with commas; *: all; also those compiled so")
    result_cache_redis: CachePolicy = Field("auto", description="look in Redis: auto (where that is quicker than computing), always, never")
    result_cache_bytes: int = Field(64 << 20, ge=1 << 10, description="memory for results in this process, in bytes")


class GatewaySettings(ServerSettings, PipelineSettings, ResultCacheSettings):
    """Settings of the gateway."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_GATEWAY_")

    listen: str = _listen("127.0.0.1:50050")
    tokenizer_target: str = Field("127.0.0.1:50051", description="gRPC target of the tokenizer, or several with commas")
    executor_target: str = Field("127.0.0.1:50052", description="gRPC target of the neuron-executor, or several with commas")
    postprocessor_target: str = Field("127.0.0.1:50053", description="gRPC target of the postprocessor, or several with commas")


class TokenizerSettings(ServerSettings, TokenCacheSettings):
    """Settings of the tokenizer."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_TOKENIZER_")

    listen: str = _listen("127.0.0.1:50051")


class NeuronExecutorSettings(ServerSettings, EngineSettings):
    """Settings of the neuron-executor."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_NEURON_EXECUTOR_")

    listen: str = _listen("127.0.0.1:50052")


class PostprocessorSettings(ServerSettings):
    """Settings of the postprocessor."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_POSTPROCESSOR_")

    listen: str = _listen("127.0.0.1:50053")


class AllSettings(ServerSettings, PipelineSettings, EngineSettings, TokenCacheSettings, ResultCacheSettings):
    """Settings of the whole pipeline in one process."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_ALL_")

    listen: str = _listen("127.0.0.1:50050")


class AcceptSettings(CoreSettings):
    """Settings of `neuronpipe accept`."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_ACCEPT_")


class CacheCommandSettings(RedisSettings):
    """Settings of `neuronpipe cache`."""

    model_config = SettingsConfigDict(env_prefix="NEURONPIPE_CACHE_")


def read_settings(kind: type[SettingsT], given: Mapping[str, Any]) -> SettingsT:
    """The settings of one service, or command, from what the command line gave and the environment. Raises SetupError."""
    prefix = str(kind.model_config.get("env_prefix"))
    known = {variable_name(kind, field) for field in kind.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(prefix) and name not in known)
    if unknown:
        raise SetupError(f"{', '.join(unknown)}: no such setting; there are {', '.join(sorted(known))}")
    try:
        return kind(**given)
    except ValidationError as error:
        problems = [f"{variable_name(kind, str(problem['loc'][0]))}: {problem['msg']}" for problem in error.errors()]
        raise SetupError("; ".join(problems)) from error


def variable_name(kind: type[_Settings], field: str) -> str:
    """The environment variable of a setting."""
    return f"{kind.model_config.get('env_prefix')}{field}".upper()
