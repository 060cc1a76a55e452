"""The contract between a gRPC door and the transport below it (rpc/http2/): calls as bytes, and the ends of calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeAlias

from google.rpc.status_pb2 import Status

from neuronpipe.core.calls import Call, internal_error
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Overloaded
from neuronpipe.core.status import STATUS_DETAILS, to_status
from neuronpipe.core.tracing import new_request_id
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.tls import ServerTls

# Names in lower case. A value whose name ends with "-bin" is bytes.
Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]


class CallEnd(Exception):
    """Ends a call with a status.

    - `code`: a google.rpc.Code.
    - `message`: text for the caller.
    - `trailers`: metadata that is sent with the status.
    """

    def __init__(self, code: int, message: str = "", trailers: Metadata = ()) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.trailers = trailers


class ServerCall(Protocol):
    """A call at the server. `deadline_s`: a time of time.monotonic, or None without a deadline.

    `peer`: the address of the connection in gRPC's notation, such as ipv4:127.0.0.1:1234. `metadata_bytes`: the size
    of all names and values, also of those that the transport itself uses.
    """

    deadline_s: float | None
    metadata: Metadata
    metadata_bytes: int

    @property
    def peer(self) -> str: ...

    def peer_names(self) -> Sequence[str]:
        """Returns the subject alternative names of the caller's verified certificate: DNS names, IP addresses, and URIs
        such as SPIFFE ids. Empty if the caller has shown no certificate.
        """

    async def read(self) -> bytes | None:
        """Returns the next message of the caller, or None once the caller has sent all.

        Raises CallEnd, and the error that stop_reading got.
        """

    def stop_reading(self, error: NeuronpipeError) -> None:
        """Makes the waiting read, and later reads, raise an error."""

    async def send(self, message: bytes) -> None:
        """Sends a message. Returns when there is room for the next message."""


class Method(Protocol):
    """The work of a door on the calls of one path. `takes_stream`: the caller sends a stream of messages."""

    takes_stream: bool

    def accept(self, call: ServerCall) -> None:
        """Counts a call when its head has come. Raises CallEnd to refuse the call, which is then not read."""

    async def answer(self, call: ServerCall, request: bytes | None) -> bytes | None:
        """Answers an accepted call, in the context in which it was accepted. Raises CallEnd.

        `request`: the message of a caller that sends one message. None if it is missing, and for a stream. Returns the
        last message; None if all messages were sent.
        """

    def done(self, call: ServerCall) -> None:
        """Notes that an accepted call is over: it is answered, or will never be."""


# Finds the method of a path; None for an unknown path.
FindMethod: TypeAlias = Callable[[str], Method | None]


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The settings and methods with which a transport serves a port. `tls`: None for Unix sockets."""

    settings: ProcessSettings
    in_flight: InFlight
    find_method: FindMethod
    tls: ServerTls | None
    shares_port: bool


RETRY_PUSHBACK = "grpc-retry-pushback-ms"

# A client accepts 8 KiB of trailers and reports RESOURCE_EXHAUSTED for more. The message is sent twice:
# percent-encoded, with up to three bytes per byte, and within the status in Base64.
_MAX_STATUS_BYTES = 1500
_SHORTENED_CHARACTERS = 300


def end_of(error: Exception) -> CallEnd:
    """Returns the end of a call that failed with an error."""
    if isinstance(error, CallEnd):
        return error
    if isinstance(error, Overloaded):
        end = _frequent_end_of(Overloaded, error.message, error.retry_after_s)
    elif isinstance(error, DeadlineExceeded):
        end = _frequent_end_of(DeadlineExceeded, error.message)
    else:
        end = _end_of(error if isinstance(error, NeuronpipeError) else internal_error(error, Call(new_request_id())))
    error.__traceback__ = None  # the traceback's frames hold the request, which may be large
    return CallEnd(*end)


def _end_of(error: NeuronpipeError) -> tuple[int, str, Metadata]:
    status = to_status(error)
    if status.ByteSize() > _MAX_STATUS_BYTES:
        status = Status(
            code=status.code, message=f"{status.message[:_SHORTENED_CHARACTERS]}…", details=status.details[:1]
        )
    return status.code, status.message, ((STATUS_DETAILS, status.SerializeToString()),)


# The results are cached, because under overload thousands of calls per second end in the same way.
@lru_cache(maxsize=128)
def _frequent_end_of(kind: type[NeuronpipeError], *fields: Any) -> tuple[int, str, Metadata]:
    code, message, trailers = _end_of(error := kind(*fields))
    if isinstance(error, Overloaded):
        trailers = (*trailers, (RETRY_PUSHBACK, str(max(1, round(error.retry_after_s * 1000)))))
    return code, message, trailers
