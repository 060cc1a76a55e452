"""Converts errors to google.rpc.Status and back. Errors cross process borders in this form, alone or inside a batch."""

from collections.abc import Callable
from typing import TypeVar

from google.protobuf import duration
from google.protobuf.any import pack
from google.protobuf.message import Message
from google.rpc import code_pb2
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from neuronpipe.core import errors
from neuronpipe.core.errors import InternalError, InvalidInput, NeuronpipeError, Overloaded

DOMAIN = "neuronpipe"
# The key of gRPC's trailers with the google.rpc.Status of a call.
STATUS_DETAILS = "grpc-status-details-bin"
# The key of the metadata of ErrorInfo with the fields that a problem names.
_MENTIONS = "mentions"

DetailT = TypeVar("DetailT", bound=Message)

CODES: dict[type[NeuronpipeError], int] = {
    errors.Unauthenticated: code_pb2.UNAUTHENTICATED,
    errors.InvalidInput: code_pb2.INVALID_ARGUMENT,
    errors.ModelNotFound: code_pb2.NOT_FOUND,
    errors.WrongTask: code_pb2.FAILED_PRECONDITION,
    errors.JobNotFound: code_pb2.NOT_FOUND,
    errors.AlreadyExists: code_pb2.ALREADY_EXISTS,
    errors.NotAllowed: code_pb2.PERMISSION_DENIED,
    errors.ChangeRefused: code_pb2.FAILED_PRECONDITION,
    errors.NotConfigured: code_pb2.UNIMPLEMENTED,
    errors.Overloaded: code_pb2.RESOURCE_EXHAUSTED,
    errors.DeadlineExceeded: code_pb2.DEADLINE_EXCEEDED,
    errors.Cancelled: code_pb2.CANCELLED,
    errors.Unavailable: code_pb2.UNAVAILABLE,
    errors.InternalError: code_pb2.INTERNAL,
}

# Used for a status without RetryInfo, which comes from other servers.
_DEFAULT_RETRY_AFTER_S = 1.0

_BY_REASON: dict[tuple[int, str], Callable[[str], NeuronpipeError]] = {
    (code, kind.reason): kind for kind, code in CODES.items()
}
# For a status without a reason: the first error in CODES with this code.
_BY_CODE: dict[int, Callable[[str], NeuronpipeError]] = {code: kind for kind, code in reversed(CODES.items())}


def to_status(error: NeuronpipeError) -> Status:
    """Returns the error as a status with ErrorInfo, and BadRequest or RetryInfo where they apply."""
    info = ErrorInfo(reason=error.reason, domain=DOMAIN)
    details: list[Message] = [info]
    if isinstance(error, InvalidInput):
        if error.mentions:
            info.metadata[_MENTIONS] = ",".join(error.mentions)
        violation = BadRequest.FieldViolation(field=error.field, description=error.problem)
        details.append(BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded):
        details.append(RetryInfo(retry_delay=duration.from_nanoseconds(int(error.retry_after_s * 1e9))))
    return Status(code=CODES[type(error)], message=error.message, details=[*map(pack, details)])


def from_status(status: Status) -> NeuronpipeError:
    """Returns the error of a status; a code that neuronpipe never sends becomes InternalError."""
    if status.code == code_pb2.INVALID_ARGUMENT:
        violation = BadRequest.FieldViolation(field="request", description=status.message)
        for bad_request in _unpack(status, BadRequest):
            violation = next(iter(bad_request.field_violations), violation)
        mentions = "".join(info.metadata.get(_MENTIONS, "") for info in _unpack(status, ErrorInfo))
        return InvalidInput(violation.field, violation.description, mentions.split(",") if mentions else ())
    if status.code == code_pb2.RESOURCE_EXHAUSTED:
        retry_after_s = _DEFAULT_RETRY_AFTER_S
        for retry_info in _unpack(status, RetryInfo):
            retry_after_s = retry_info.retry_delay.ToNanoseconds() / 1e9
        return Overloaded(status.message, retry_after_s)
    kind = _BY_CODE.get(status.code, InternalError)
    for info in _unpack(status, ErrorInfo):
        if info.domain == DOMAIN:
            kind = _BY_REASON.get((status.code, info.reason), kind)
    return kind(status.message)


def _unpack(status: Status, kind: type[DetailT]) -> list[DetailT]:
    details = ((packed, kind()) for packed in status.details)
    return [detail for packed, detail in details if packed.Unpack(detail)]
