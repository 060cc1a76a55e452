"""The settings that every service has."""

from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator

from neuronpipe.core.addresses import unix_path
from neuronpipe.core.errors import SetupError
from neuronpipe.core.settings import Settings
from neuronpipe.platform.tls import TlsFiles

_LAST_PORT = 65535
# A week. gRPC takes milliseconds in 31 bits, less than 25 days.
_LAST_AGE_S = 7 * 86_400
# Of streams of requests, where callers open them. Gateways keep theirs to stages open.
CALLERS_STREAM_IDLE_S = 300.0
# For services to which callers connect. Gateways keep their streams to stages open, and balance load over them.
CALLERS_CONNECTION_AGE_S = 300.0


def listen_field(default: str) -> str:
    """The field of an address to listen on."""
    listen: str = Field(
        default,
        description="address to listen on: HOST:PORT, where port 0 takes a free one, or unix:/PATH",
        pattern=r"^(unix:/.+|.+:\d{1,5})$",
    )
    return listen


def optional_listen_field(purpose: str) -> str:
    """The field of an address that is listened on only if it is set."""
    description = f"address for {purpose}, HOST:PORT; port 0 takes a free one, empty has none"
    listen: str = Field("", description=description, pattern=r"^(.+:\d{1,5})?$")
    return listen


def connection_age_field(default_s: float) -> float:
    """The field of the maximum age of connections."""
    description = (
        "seconds after which a connection is asked to reconnect, so that new servers get their share; 0: never"
    )
    age_s: float = Field(default_s, ge=0, le=_LAST_AGE_S, description=description)
    return age_s


def stream_idle_field(default_s: float) -> float:
    """The field of the time for which a stream may be idle."""
    description = (
        "seconds for which a stream of requests may be open with no request in it, as InferStream; then it is ended "
        "with DEADLINE_EXCEEDED; 0: for ever"
    )
    idle_s: float = Field(default_s, ge=0, le=_LAST_AGE_S, description=description)
    return idle_s


class CallerLimits(Settings):
    """What one caller can keep busy, or waiting. Beyond a limit its call, or its connection, is ended."""

    max_connections: int = Field(
        4096, ge=1, le=1_000_000, description="open connections at each port of a process; new ones beyond are closed"
    )
    max_connection_calls: int = Field(
        2048, ge=1, le=1_000_000, description="gRPC calls of one connection at once; more wait at the caller"
    )
    max_connection_idle_s: float = Field(
        300.0,
        ge=0,
        le=_LAST_AGE_S,
        description="seconds without a call after which a connection is closed; 0: never",
    )
    max_handshake_s: float = Field(
        30.0,
        ge=0.1,
        le=3600,
        description="seconds that a connection's handshakes may take, TLS and HTTP/2, and the head of an HTTP request",
    )
    max_header_bytes: int = Field(
        16 << 10,
        ge=1 << 10,
        le=1 << 20,
        description="largest metadata of a call, or head of an HTTP request, in bytes",
    )
    max_receive_s: float = Field(
        60.0, ge=0.1, le=86_400, description="seconds that a message, or HTTP body, may take to arrive"
    )
    max_send_s: float = Field(
        300.0,
        ge=0.1,
        le=86_400,
        description="seconds for which a caller may leave a response unread; then its connection is ended",
    )
    max_stream_idle_s: float = stream_idle_field(0)


class ServerTlsSettings(Settings):
    """TLS of a service's ports."""

    tls_certificate: str = Field(
        "",
        description="file of the certificate for all ports, in PEM form, with those of intermediate authorities behind "
        "it; reloaded when it changes; empty: no TLS",
    )
    tls_key: str = Field("", description="file of the certificate's private key, in PEM form without a passphrase")
    tls_client_ca: str = Field(
        "",
        description="file of the authorities of callers' certificates, in PEM form; callers must show one (mTLS); "
        "empty: callers show none",
    )
    tls_client_crl: str = Field(
        "",
        description="file of the certificates that these authorities have revoked, in PEM form, from each of them; "
        "reloaded when it changes; once it has expired, every caller is refused; empty: none is revoked",
    )

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files, None for a service without TLS. Raises SetupError."""
        if self.tls_client_ca and not self.tls_certificate:
            raise SetupError("--tls-client-ca: needs --tls-certificate and --tls-key")
        if self.tls_client_crl and not self.tls_client_ca:
            raise SetupError("--tls-client-crl: needs --tls-client-ca, whose certificates it revokes")
        files = TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_ca, self.tls_client_crl)
        return files if files.certificate else None


class ProcessSettings(ServerTlsSettings, CallerLimits):
    """The settings that every service has."""

    listen: str = listen_field("127.0.0.1:0")
    grace_s: float = Field(
        10.0, ge=0, le=3600, description="seconds that requests in flight get to finish after SIGTERM"
    )
    max_message_bytes: int = Field(
        64 << 20,
        ge=1 << 10,
        le=(1 << 31) - 1,
        description="largest gRPC message, or HTTP body, that is accepted, in bytes",
    )
    max_receiving_bytes: int = Field(
        512 << 20,
        ge=1 << 10,
        description="memory for large or slow messages while they arrive, in bytes; half for one connection; beyond: "
        "RESOURCE_EXHAUSTED",
    )
    max_connection_age_s: float = connection_age_field(0)
    max_connection_age_grace_s: float = Field(
        3600,
        ge=0,
        le=_LAST_AGE_S,
        description="seconds that calls get to finish on a connection that has reached its maximum age",
    )
    metrics_listen: str = optional_listen_field("the Prometheus endpoint")
    kept_traces: int = Field(
        0,
        ge=0,
        le=100_000,
        description="sampled traces kept in memory for `neuronpipe trace`; for development, as every caller "
        "may read them",
    )

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _check_port(cls, listen: str) -> str:
        return check_port(listen)


class ServerSettings(ProcessSettings):
    """The settings that every service with models has."""

    repository: Annotated[str, BeforeValidator(str)] = Field(  # a Path is a folder
        min_length=1,
        description="folder that `neuronpipe compile` wrote, or s3://BUCKET/PREFIX of `neuronpipe bundle push`",
    )
    repository_endpoint: str = Field(
        "",
        pattern=r"^(https?://.+)?$",
        description="for s3://: URL of the object store; empty: as AWS_ENDPOINT_URL says, else AWS's",
    )
    repository_cache: Path = Field(
        Path("~/.cache/neuronpipe/bundles"),
        description="for s3://: folder in which bundles are kept; processes of a machine share it",
    )
    repository_cache_bytes: int = Field(
        100 << 30,
        ge=1,
        description="for s3://: bytes of bundles that are kept; of those that no process uses the least recently used "
        "are deleted; one that has no room beside those in use is not loaded",
    )
    trusted_keys: Path | None = Field(
        None,
        description="file or folder of ed25519 public keys in PEM form; bundles that none of them signed (`neuronpipe "
        "bundle sign`) are refused; read at the start; without it every bundle is loaded",
    )
    registry_poll_s: float = Field(
        1.0, ge=0.1, le=3600, description="seconds between two looks at the repository's registry.json"
    )


class StageSettings(ServerSettings):
    """The settings that every stage has."""

    allowed_peers: str = Field(
        "",
        description="names of the only callers that are answered, separated by commas: of each, a subject alternative "
        "name of its certificate, as gateway.example or spiffe://example/gateway; needs --tls-client-ca; empty: every "
        "caller",
    )

    @property
    def allowed_names(self) -> frozenset[str]:
        """The names; none where every caller is answered. Raises SetupError."""
        names = frozenset(filter(None, map(str.strip, self.allowed_peers.split(","))))
        if self.allowed_peers and not names:
            raise SetupError("--allowed-peers: names no caller")
        if names and not self.tls_client_ca:
            raise SetupError("--allowed-peers: needs --tls-client-ca, as callers show no certificate otherwise")
        return names


def is_bucket(repository: str) -> bool:
    """Whether a repository is in a bucket, and not a folder."""
    return repository.startswith("s3://")


def check_port(listen: str) -> str:
    """The address, if its port or path can exist; gRPC would take a port modulo 65536. Raises ValueError."""
    if listen and not unix_path(listen) and int(listen.rpartition(":")[2]) > _LAST_PORT:
        raise ValueError(f"ports end at {_LAST_PORT}")
    return listen
