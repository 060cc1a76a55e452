"""How a gRPC call ends with an error."""

import asyncio
from typing import NoReturn

import grpc
from google.rpc.status_pb2 import Status

from neuronpipe.core.calls import Call, internal_error
from neuronpipe.core.errors import NeuronpipeError, Overloaded
from neuronpipe.core.status import to_status
from neuronpipe.rpc.client import STATUS_DETAILS
from neuronpipe.rpc.rpcs import Context

RETRY_PUSHBACK = "grpc-retry-pushback-ms"

_CODES = {code.value[0]: code for code in grpc.StatusCode}
# A client takes 8 KiB of trailers and calls more RESOURCE_EXHAUSTED. The message travels twice: percent-encoded, at worst three bytes
# for one, and within the status in Base64.
_MAX_STATUS_BYTES = 1500
_SHORTENED_CHARACTERS = 300


async def abort(context: Context, error: Exception) -> NoReturn:
    """Ends a call with the status that its error stands for."""
    if isinstance(error, grpc.aio.AbortError):  # ended already
        raise error
    status = to_status(error if isinstance(error, NeuronpipeError) else internal_error(error, Call()))
    if status.ByteSize() > _MAX_STATUS_BYTES:
        status = Status(code=status.code, message=f"{status.message[:_SHORTENED_CHARACTERS]}…", details=status.details[:1])
    trailer: list[tuple[str, str | bytes]] = [(STATUS_DETAILS, status.SerializeToString())]
    if isinstance(error, Overloaded):
        trailer.append((RETRY_PUSHBACK, str(max(1, round(error.retry_after_s * 1000)))))
    error.__traceback__ = None  # its frames hold the request, which may be large
    try:
        await context.abort(_CODES[status.code], status.message, tuple(trailer))
    except grpc.aio.InternalError:  # the call has ended meanwhile; as gRPC would have said, had it noticed in time
        raise asyncio.CancelledError from None
    raise AssertionError("abort always raises")
