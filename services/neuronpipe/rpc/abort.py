"""Ends a gRPC call with an error."""

import asyncio
from functools import lru_cache
from typing import NoReturn, TypeAlias

import grpc
from google.rpc.status_pb2 import Status

from neuronpipe.core.calls import Call, internal_error
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Overloaded
from neuronpipe.core.status import to_status
from neuronpipe.rpc.client import STATUS_DETAILS
from neuronpipe.rpc.rpcs import Context

RETRY_PUSHBACK = "grpc-retry-pushback-ms"

# Code, message and trailing metadata.
_End: TypeAlias = tuple[grpc.StatusCode, str, tuple[tuple[str, str | bytes], ...]]

_CODES = {code.value[0]: code for code in grpc.StatusCode}
# A client accepts 8 KiB of trailers and reports RESOURCE_EXHAUSTED for more. The message is sent twice:
# percent-encoded, with up to three bytes for one, and within the status in Base64.
_MAX_STATUS_BYTES = 1500
_SHORTENED_CHARACTERS = 300


async def abort(context: Context, error: Exception) -> NoReturn:
    """Ends a call with the status that its error stands for."""
    if isinstance(error, grpc.aio.AbortError):  # ended already
        raise error
    if isinstance(error, Overloaded):
        code, message, trailer = _end_of_overloaded(error.message, error.retry_after_s)
    elif isinstance(error, DeadlineExceeded):
        code, message, trailer = _end_of_late(error.message)
    else:
        code, message, trailer = _end_of(error if isinstance(error, NeuronpipeError) else internal_error(error, Call()))
    error.__traceback__ = None  # its frames hold the request, which may be large
    try:
        await context.abort(code, message, trailer)
    except grpc.aio.InternalError:  # the call has ended meanwhile; as gRPC would have said, had it noticed in time
        raise asyncio.CancelledError from None
    raise AssertionError("abort always raises")


def _end_of(error: NeuronpipeError) -> _End:
    status = to_status(error)
    if status.ByteSize() > _MAX_STATUS_BYTES:
        status = Status(
            code=status.code, message=f"{status.message[:_SHORTENED_CHARACTERS]}…", details=status.details[:1]
        )
    return _CODES[status.code], status.message, ((STATUS_DETAILS, status.SerializeToString()),)


# Kept, since under overload thousands of calls a second end alike.
@lru_cache(maxsize=64)
def _end_of_overloaded(message: str, retry_after_s: float) -> _End:
    code, message, trailer = _end_of(Overloaded(message, retry_after_s))
    return code, message, (*trailer, (RETRY_PUSHBACK, str(max(1, round(retry_after_s * 1000)))))


@lru_cache(maxsize=64)
def _end_of_late(message: str) -> _End:
    return _end_of(DeadlineExceeded(message))
