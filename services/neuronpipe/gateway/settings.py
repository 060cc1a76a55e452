"""The settings of the gateway."""

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from neuronpipe.core.addresses import is_loopback, unix_path
from neuronpipe.core.names import EXECUTOR, POSTPROCESSOR, TOKENIZER
from neuronpipe.core.settings import Settings
from neuronpipe.core.units import words_of
from neuronpipe.gateway.callers.settings import CallerSettings
from neuronpipe.platform.process.settings import Listen, ServerTlsSettings, optional_listen_field
from neuronpipe.platform.tls import TlsFiles

# The target of a stage in the gateway's own process.
NEAR = "local"
_MAX_CONCURRENCY = 1_000_000


def parse_limits(written: str) -> dict[str, int]:
    """Parses the limits of models, such as "minilm=10,other=200". Raises ValueError."""
    limits: dict[str, int] = {}
    for part in words_of(written):
        name, _, number = part.rpartition("=")
        if not name or name in limits:
            raise ValueError(f"{part!r}: must be MODEL=NUMBER, once for a model")
        if not (number.isascii() and number.isdigit() and 0 < int(number[:8]) <= _MAX_CONCURRENCY):
            raise ValueError(f"{part!r}: the number must be from 1 to {_MAX_CONCURRENCY}")
        limits[name] = int(number)
    return limits


def parse_aliases(written: str) -> dict[str, str]:
    """Parses other names of models, such as "gpt-4o=llama,BAAI/bge-m3=bge". Raises ValueError."""
    aliases: dict[str, str] = {}
    for part in words_of(written):
        alias, _, model = map(str.strip, part.partition("="))
        if not alias or not model or alias in aliases:
            raise ValueError(f"{part!r}: must be ALIAS=MODEL, once for an alias")
        aliases[alias] = model
    for alias in aliases.keys() & set(aliases.values()):
        raise ValueError(f"{alias!r}: an alias stands for a model, not for another alias")
    return aliases


def _target_field(service: str, default: str) -> str:
    """Makes the field of a stage's target."""
    target: str = Field(
        default,
        description=f"gRPC target of the {service}, several are separated by commas; {NEAR}: the stage runs in this "
        "process",
    )
    return target


class PipelineSettings(Settings):
    """The limits of the gateway's pipeline."""

    max_requests_in_flight: int = Field(
        1024, ge=1, description="requests in flight at once; more are refused with RESOURCE_EXHAUSTED"
    )
    max_tokens_in_flight: int = Field(
        1 << 20,
        ge=1,
        description="tokens in flight at once, estimated until counted; more are refused with RESOURCE_EXHAUSTED",
    )
    model_concurrency: str = Field(
        "",
        description="limits of the requests in flight for single models, as minilm=10,other=200; more are refused "
        "with RESOURCE_EXHAUSTED; models without a number have no separate limit",
    )
    model_aliases: str = Field(
        "",
        description="other names of models, as gpt-4o=llama,BAAI/bge-m3=bge; the name of a served model goes first; a "
        "model that was compiled from the Hub also has its name there",
    )
    max_request_s: float = Field(
        600.0,
        gt=0,
        le=86_400,
        description="longest deadline of a request in seconds; also for requests without a deadline",
    )
    max_input_bytes: int = Field(1 << 20, ge=1, description="largest input, in bytes, except images")
    max_image_bytes: int = Field(10 << 20, ge=1, description="largest input of an image model, in bytes")
    long_texts: Literal["error", "cut", "chunks"] = Field(
        "error",
        description="treatment of a text with more tokens than the model takes, if the request names none: error; cut "
        "(its end is dropped); chunks (rerank and sentence-embedding read all of it, other tasks cut it); prompts of "
        "generated texts are never cut",
    )
    stream_interval: int = Field(
        1,
        ge=1,
        le=64,
        description="tokens of a generated text that are sent together after the first token; with more, a token takes "
        "less CPU time, and comes later",
    )

    # Maximum number of tokens of all sequences of one input.
    max_request_tokens: ClassVar[int] = 1 << 19
    # Maximum number of requests in one InferBatch, rows in one OIP request, and inputs in one HTTP request whose texts
    # are streamed. One HTTP request runs at most this number of requests in the pipeline at once.
    max_batch_items: ClassVar[int] = 256
    # Maximum number of inputs of one HTTP request, as in OpenAI's API.
    max_http_inputs: ClassVar[int] = 2048
    # Largest response of InferBatch, where results beyond it become errors. Also the largest results of an OIP
    # request, and of an HTTP request with several inputs; a request with larger results fails.
    max_batch_response_bytes: ClassVar[int] = 64 << 20
    # Requests of one InferStream in flight at once. Flow control holds back the rest.
    max_stream_in_flight: ClassVar[int] = 64

    @field_validator("model_concurrency")
    @classmethod
    def _check_model_concurrency(cls, written: str) -> str:
        parse_limits(written)
        return written

    @field_validator("model_aliases")
    @classmethod
    def _check_model_aliases(cls, written: str) -> str:
        parse_aliases(written)
        return written


class ResultCacheSettings(Settings):
    """The cache of results."""

    result_cache_models: str = Field(
        "",
        description="models whose results are cached, separated by commas; *: all; in addition to those compiled "
        "with --cache-results",
    )
    result_cache_bytes: int = Field(64 << 20, ge=1 << 10, description="memory for results in this process, in bytes")


class HttpSettings(Settings):
    """HTTP, and the settings that it shares with protocols of servers of one model."""

    http_listen: Listen = optional_listen_field("HTTP")
    http_hosts: str = Field(
        "",
        description="hostnames, in addition to localhost, at which HTTP answers without authentication, with commas; "
        "empty: no others on a loopback address, otherwise all; *: all, also for pages of other sites",
    )
    http_cors_origins: str = Field(
        "",
        description="origins whose pages may call over HTTP from a browser, as https://app.example, with commas; "
        "*: all; empty: none",
    )
    http_path_prefix: str = Field(
        "",
        pattern=r"^(/[^/?#\s]+)*$",
        description="prefix of all paths that a proxy in front leaves in place, as /models; paths without it also work",
    )
    default_models: str = Field(
        "",
        description="models that answer requests without a model, over HTTP and tei.v1, with commas: the first that "
        "supports the task; empty: the only model",
    )

    console: Literal["auto", "on", "off"] = Field(
        "auto", description="the console at / and the API as a page at /docs; auto: on if HTTP is on a loopback address"
    )

    @property
    def has_console(self) -> bool:
        if self.console != "auto":
            return self.console == "on"
        return is_loopback(self.http_listen)


class StageTlsSettings(Settings):
    """TLS of the connections to stages."""

    tls_ca: str = Field(
        "",
        description="file of the authorities of the stages' certificates, in PEM form, for TLS to the stages; "
        "reloaded when it changes; empty: no TLS to them",
    )
    stage_tls_certificate: str = Field(
        "", description="file of the certificate for the stages, as tls_certificate; empty: tls_certificate itself"
    )
    stage_tls_key: str = Field("", description="file of the private key of stage_tls_certificate; empty: tls_key")

    def files(self, server: ServerTlsSettings) -> TlsFiles | None:
        """Returns the files of the connections to stages, None without TLS. Raises SetupError."""
        files = TlsFiles(self.stage_tls_certificate, self.stage_tls_key, self.tls_ca)
        return server.client_files("--stage-tls-certificate", files, "the authorities of the stages' certificates")


class GatewaySettings(Settings):
    """The gateway: its stages, and the changes that callers may make."""

    pipeline: PipelineSettings
    results: ResultCacheSettings
    http: HttpSettings
    callers: CallerSettings
    stage_tls: StageTlsSettings

    registry_service: bool = Field(
        False,
        description="let callers read and change the repository's registry over gRPC (RegistryService); tenants need "
        "the right manages_registry",
    )
    model_control: bool = Field(
        False,
        description="let callers load and unload models over the Open Inference Protocol, which changes the "
        "repository's registry; tenants need the right manages_registry",
    )
    tokenizer_target: str = _target_field(TOKENIZER, "127.0.0.1:50051")
    executor_target: str = _target_field(EXECUTOR, "127.0.0.1:50052")
    postprocessor_target: str = _target_field(POSTPROCESSOR, "127.0.0.1:50053")

    max_held_requests: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="requests held, until their deadlines, for a stage without a process or a model that no process "
        "has yet; more are refused with RESOURCE_EXHAUSTED; 0: all of them fail with UNAVAILABLE at once",
    )
    scaler_listen: Listen = optional_listen_field("KEDA's external scaler of the stages, without TLS and keys")

    @field_validator("tokenizer_target", "executor_target", "postprocessor_target")
    @classmethod
    def _check_target(cls, target: str) -> str:
        addresses = words_of(target)
        for address in addresses:
            unix_path(address)
        if NEAR in addresses and target != NEAR:
            raise ValueError(f"{NEAR} stands alone: a stage is in this process or behind targets")
        return target

    @property
    def far_targets(self) -> dict[str, str]:
        """The targets of the stages that are not in this process, by the names of their services."""
        targets = {
            TOKENIZER: self.tokenizer_target,
            EXECUTOR: self.executor_target,
            POSTPROCESSOR: self.postprocessor_target,
        }
        return {service: target for service, target in targets.items() if target != NEAR}
