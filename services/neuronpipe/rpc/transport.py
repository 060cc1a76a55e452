"""The contract between a gRPC door and the transport below it, rpc/http2/: calls as bytes, and the end that an error
stands for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, TypeAlias

from google.rpc.status_pb2 import Status

from neuronpipe.core.calls import Call, internal_error
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Overloaded
from neuronpipe.core.status import to_status
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.tls import ServerTls

# Names in lower case. Values of names that end with "-bin" are bytes.
Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]


class CallEnd(Exception):
    """Ends a call with a status.

    `code`: of google.rpc.Code. `message`: for the caller. `trailers`: sent with it.
    """

    def __init__(self, code: int, message: str = "", trailers: Metadata = ()) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.trailers = trailers


class ServerCall(Protocol):
    """A call, at the server. `deadline_s`: as time.monotonic counts; None without a deadline.

    `peer`: the address of the connection, as gRPC writes it, such as ipv4:127.0.0.1:1234. `metadata_bytes`: the size
    of all names and values, also of those that the transport itself uses.
    """

    deadline_s: float | None
    metadata: Metadata
    metadata_bytes: int

    @property
    def peer(self) -> str: ...

    def peer_names(self) -> Sequence[str]:
        """The subject alternative names of the caller's certificate, which has been verified: DNS names, IP addresses,
        URIs such as SPIFFE ids. Empty where the caller has shown no certificate.
        """

    async def read(self) -> bytes | None:
        """The next message of the caller; None once the caller has sent all. Raises CallEnd, and what stop_reading
        gives.
        """

    def stop_reading(self, error: NeuronpipeError) -> None:
        """Makes the read that waits, and later ones, raise an error."""

    async def send(self, message: bytes) -> None:
        """Sends a message. Returns when there is room for the next one."""


class Method(Protocol):
    """What a door does with the calls of one path.

    `takes_stream`: the caller sends a stream of messages.
    """

    takes_stream: bool

    def accept(self, call: ServerCall) -> None:
        """Counts a call when its head has come. Raises CallEnd to refuse it: nothing of it is read then."""

    async def answer(self, call: ServerCall, request: bytes | None) -> None:
        """Answers a call that was accepted, in the context in which it was accepted. Raises CallEnd.

        `request`: the message of a caller that sends one; None where it was missing, and where it sends a stream.
        """

    def done(self, call: ServerCall) -> None:
        """An accepted call is over: it is answered, or will never be."""


# The method of a path; None for an unknown one.
FindMethod: TypeAlias = Callable[[str], Method | None]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What a transport needs to serve a port. `tls`: not for Unix sockets."""

    settings: ProcessSettings
    in_flight: InFlight
    find_method: FindMethod
    tls: ServerTls | None
    shares_port: bool


STATUS_DETAILS = "grpc-status-details-bin"
RETRY_PUSHBACK = "grpc-retry-pushback-ms"

# A client accepts 8 KiB of trailers and reports RESOURCE_EXHAUSTED for more. The message is sent twice:
# percent-encoded, with up to three bytes for one, and within the status in Base64.
_MAX_STATUS_BYTES = 1500
_SHORTENED_CHARACTERS = 300


def end_of(error: Exception) -> CallEnd:
    """The end that an error stands for."""
    if isinstance(error, CallEnd):
        return error
    if isinstance(error, Overloaded):
        end = _end_of_overloaded(error.message, error.retry_after_s)
    elif isinstance(error, DeadlineExceeded):
        end = _end_of_late(error.message)
    else:
        end = _end_of(error if isinstance(error, NeuronpipeError) else internal_error(error, Call()))
    error.__traceback__ = None  # its frames hold the request, which may be large
    return CallEnd(*end)


def _end_of(error: NeuronpipeError) -> tuple[int, str, Metadata]:
    status = to_status(error)
    if status.ByteSize() > _MAX_STATUS_BYTES:
        status = Status(
            code=status.code, message=f"{status.message[:_SHORTENED_CHARACTERS]}…", details=status.details[:1]
        )
    return status.code, status.message, ((STATUS_DETAILS, status.SerializeToString()),)


# Kept, since under overload thousands of calls a second end alike.
@lru_cache(maxsize=64)
def _end_of_overloaded(message: str, retry_after_s: float) -> tuple[int, str, Metadata]:
    code, message, trailer = _end_of(Overloaded(message, retry_after_s))
    return code, message, (*trailer, (RETRY_PUSHBACK, str(max(1, round(retry_after_s * 1000)))))


@lru_cache(maxsize=64)
def _end_of_late(message: str) -> tuple[int, str, Metadata]:
    return _end_of(DeadlineExceeded(message))
