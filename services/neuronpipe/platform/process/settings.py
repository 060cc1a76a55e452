"""The settings that every service has, by parts."""

from pathlib import Path
from typing import Annotated, ClassVar, TypeAlias

from pydantic import AfterValidator, BeforeValidator, Field

from neuronpipe.core.addresses import LAST_PORT, unix_path
from neuronpipe.core.errors import SetupError
from neuronpipe.core.settings import Settings
from neuronpipe.core.units import words_of
from neuronpipe.platform.tls import TlsFiles

# A week. gRPC has milliseconds in 31 bits, less than 25 days.
_LAST_AGE_S = 7 * 86_400
# For services to which callers connect. Gateways keep their streams to stages open, and balance load over them.
CALLERS_CONNECTION_AGE_S = 300.0


def _check_port(listen: str) -> str:
    """Returns the address if its port or path can exist; gRPC would take a port modulo 65536. Raises ValueError."""
    if listen and not unix_path(listen) and int(listen.rpartition(":")[2]) > LAST_PORT:
        raise ValueError(f"ports end at {LAST_PORT}")
    return listen


# An address to listen on, which is checked after its pattern.
Listen: TypeAlias = Annotated[str, AfterValidator(_check_port)]


def optional_listen_field(purpose: str) -> str:
    """Returns the field of an address that is listened on only if it is set."""
    description = f"address for {purpose}, HOST:PORT; port 0 takes a free port, empty has none"
    listen: str = Field("", description=description, pattern=r"^(.+:\d{1,5})?$")
    return listen


class CallerLimits(Settings):
    """Limits of the calls and connections of a caller. Beyond a limit, the call or the connection is ended."""

    max_connections: int = Field(
        4096, ge=1, le=1_000_000, description="open connections at each port of a process; more are closed"
    )
    max_connection_idle_s: float = Field(
        300.0, ge=0, le=_LAST_AGE_S, description="seconds without a call after which a connection is closed; 0: never"
    )

    # gRPC calls of one connection at once. Further calls wait at the caller.
    max_connection_calls: ClassVar[int] = 2048
    # Seconds that a connection's handshakes (TLS and HTTP/2) may take, and the head of an HTTP request.
    max_handshake_s: ClassVar[float] = 30.0
    # Largest metadata of a call, and largest head of an HTTP request.
    max_header_bytes: ClassVar[int] = 16 << 10
    # Seconds that a message, or HTTP body, may take to arrive.
    max_receive_s: ClassVar[float] = 60.0
    # Seconds for which a caller may leave a response unread. Then its call or HTTP connection is ended.
    max_send_s: ClassVar[float] = 300.0
    # Largest gRPC message, and largest HTTP body.
    max_message_bytes: ClassVar[int] = 64 << 20
    # Seconds that calls get to finish on a connection that has reached its maximum age.
    max_connection_age_grace_s: ClassVar[float] = 3600.0


class ServerTlsSettings(Settings):
    """TLS of a service's ports."""

    tls_certificate: str = Field(
        "",
        description="file of the certificate for all ports, in PEM form, with intermediate authorities' certificates "
        "behind it; reloaded when it changes; empty: no TLS",
    )
    tls_key: str = Field("", description="file of the certificate's private key, in PEM form without a passphrase")
    tls_client_ca: str = Field(
        "",
        description="file of the authorities of callers' certificates, in PEM form; callers must show one (mTLS); "
        "empty: callers show none",
    )
    tls_client_crl: str = Field(
        "",
        description="file of the revoked certificates (CRL) of each authority in tls_client_ca, in PEM form; "
        "reloaded when it changes; once it has expired, every caller is refused; empty: none is revoked",
    )

    @property
    def files(self) -> TlsFiles | None:
        """The files of TLS; None for a service without TLS. Raises SetupError."""
        if self.tls_client_ca and not self.tls_certificate:
            raise SetupError("--tls-client-ca: needs --tls-certificate and --tls-key")
        if self.tls_client_crl and not self.tls_client_ca:
            raise SetupError("--tls-client-crl: needs --tls-client-ca, whose certificates it revokes")
        files = TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_ca, self.tls_client_crl)
        return files if files.certificate else None

    def client_files(self, option: str, client_tls: TlsFiles, authorities: str) -> TlsFiles | None:
        """Returns the files of connections to other services; None without TLS. Without a certificate in `client_tls`,
        the service shows its own. Raises SetupError, which names `option`.
        """
        if client_tls.ca:
            return client_tls if client_tls.certificate else TlsFiles(self.tls_certificate, self.tls_key, client_tls.ca)
        if client_tls.certificate:
            raise SetupError(f"{option}: needs --tls-ca, {authorities}")
        return None


class ProcessSettings(CallerLimits):
    """The process: its address, its end, and the memory for what it receives."""

    listen: Listen = Field(
        "127.0.0.1:0",
        description="address to listen on: HOST:PORT, where port 0 takes a free port, or unix:/PATH",
        pattern=r"^(unix:/.+|.+:\d{1,5})$",
    )
    grace_s: float = Field(10.0, ge=0, le=3600, description="seconds that requests in flight get to end after SIGTERM")
    max_receiving_bytes: int = Field(
        512 << 20,
        ge=1 << 10,
        description="memory for large or slow messages while they arrive, in bytes; half for one connection; beyond: "
        "RESOURCE_EXHAUSTED",
    )
    max_connection_age_s: float = Field(
        0,
        ge=0,
        le=_LAST_AGE_S,
        description="seconds after which a connection is asked to reconnect, so that new servers get their share; 0: "
        "never",
    )
    metrics_listen: Listen = optional_listen_field("the Prometheus endpoint")
    kept_traces: int = Field(
        0,
        ge=0,
        le=100_000,
        description="sampled traces kept in memory for `neuronpipe trace`; for development, as every caller "
        "may read them",
    )


class RepositorySettings(Settings):
    """The repository of models."""

    repository: Annotated[str, BeforeValidator(str)] = Field(  # a Path is a folder
        min_length=1,
        description="folder that `neuronpipe compile` wrote, or s3://BUCKET/PREFIX of `neuronpipe bundle push`",
    )
    repository_cache: Path = Field(
        Path("~/.cache/neuronpipe/bundles"),
        description="folder in which bundles of s3:// are kept; processes of a machine share it",
    )
    repository_cache_bytes: int = Field(
        100 << 30,
        ge=1,
        description="largest size of the cache of s3:// bundles, in bytes; the least recently used bundles that no "
        "process uses are deleted; a bundle that has no room beside bundles in use is not loaded",
    )
    trusted_keys: Path | None = Field(
        None,
        description="file or folder of ed25519 public keys in PEM form; bundles that no such key signed (`neuronpipe "
        "bundle sign`) are refused; read at the start; empty: every bundle is loaded",
    )


class ServiceSettings(Settings):
    """The settings that every service has."""

    process: ProcessSettings
    tls: ServerTlsSettings


class ServerSettings(ServiceSettings):
    """The settings that every service with models has."""

    models: RepositorySettings


class StageSettings(ServerSettings):
    """The settings that every stage has."""

    allowed_peers: str = Field(
        "",
        description="names of the callers that are answered, separated by commas: a subject alternative name of "
        "each caller's certificate, as gateway.example or spiffe://example/gateway; needs --tls-client-ca; empty: "
        "every caller",
    )

    @property
    def allowed_names(self) -> frozenset[str]:
        """The allowed names; empty if every caller is answered. Raises SetupError."""
        names = frozenset(words_of(self.allowed_peers))
        if self.allowed_peers and not names:
            raise SetupError("--allowed-peers: names no caller")
        if names and not self.tls.tls_client_ca:
            raise SetupError("--allowed-peers: needs --tls-client-ca, as callers show no certificate otherwise")
        return names
