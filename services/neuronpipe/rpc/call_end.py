"""The status that ends a call for an error."""

from functools import lru_cache

from google.rpc.status_pb2 import Status

from neuronpipe.core.calls import Call, internal_error
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Overloaded
from neuronpipe.core.status import to_status
from neuronpipe.rpc.transport import CallEnd, Metadata

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
