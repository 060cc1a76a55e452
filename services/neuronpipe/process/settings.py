"""The settings that every service has."""

from pathlib import Path

from pydantic import Field, field_validator

from neuronpipe.core.settings import Settings

_LAST_PORT = 65535
# A week. gRPC takes milliseconds in 31 bits, less than 25 days.
_LAST_AGE_S = 7 * 86_400
# Where callers connect by themselves. Gateways keep their streams to stages, and balance them, themselves.
CALLERS_CONNECTION_AGE_S = 300.0


def listen_field(default: str) -> str:
    """The field of an address to listen on."""
    listen: str = Field(default, description="address to listen on, HOST:PORT; port 0 takes a free one", pattern=r"^.+:\d{1,5}$")
    return listen


def optional_listen_field(purpose: str) -> str:
    """The field of an address that is only listened on where it is set."""
    description = f"address for {purpose}, HOST:PORT; port 0 takes a free one, empty has none"
    listen: str = Field("", description=description, pattern=r"^(.+:\d{1,5})?$")
    return listen


def connection_age_field(default_s: float) -> float:
    """The field of how old connections get."""
    description = "seconds after which a connection is asked to reconnect, so that new servers get their share; 0: never"
    age_s: float = Field(default_s, ge=0, le=_LAST_AGE_S, description=description)
    return age_s


class ServerSettings(Settings):
    """What every service has."""

    listen: str = listen_field("127.0.0.1:0")
    repository: Path = Field(description="folder of bundles, as `neuronpipe compile` writes it")
    grace_s: float = Field(10.0, ge=0, le=3600, description="seconds that requests in flight get to finish after SIGTERM")
    max_message_bytes: int = Field(
        64 << 20, ge=1 << 10, le=(1 << 31) - 1, description="largest gRPC message, or HTTP body, that is accepted, in bytes"
    )
    max_receiving_bytes: int = Field(
        512 << 20,
        ge=1 << 10,
        description="memory for large or slow messages while they arrive, in bytes; half for one connection; beyond: RESOURCE_EXHAUSTED",
    )
    max_connection_age_s: float = connection_age_field(0)
    max_connection_age_grace_s: float = Field(
        3600, ge=0, le=_LAST_AGE_S, description="seconds that calls get to finish on a connection that has reached its maximum age"
    )
    metrics_listen: str = optional_listen_field("the Prometheus endpoint")
    kept_traces: int = Field(
        0,
        ge=0,
        le=100_000,
        description="sampled traces kept in memory for `neuronpipe trace`; for development, as every caller may read them",
    )

    @field_validator("listen", "metrics_listen")
    @classmethod
    def _check_port(cls, listen: str) -> str:
        return check_port(listen)


def check_port(listen: str) -> str:
    """The address, if its port exists; gRPC would take the number modulo 65536. Raises ValueError."""
    if listen and int(listen.rpartition(":")[2]) > _LAST_PORT:
        raise ValueError(f"ports end at {_LAST_PORT}")
    return listen
