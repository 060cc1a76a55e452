"""core/status.py: errors keep their meaning across a process border."""

from typing import TypeVar

import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import Message
from google.rpc import code_pb2
from google.rpc.error_details_pb2 import BadRequest, DebugInfo, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from neuronpipe.core import errors
from neuronpipe.core.errors import InternalError, InvalidInput, ModelNotFound, NeuronpipeError, Overloaded
from neuronpipe.core.status import CODES, from_status, to_status
from tests.unit.every_error import EVERY_ERROR

DetailT = TypeVar("DetailT", bound=Message)

# The numbers of google/rpc/code.proto.
_NUMBERS = {
    errors.InvalidInput: 3,
    errors.ModelNotFound: 5,
    errors.WrongTask: 9,
    errors.Overloaded: 8,
    errors.DeadlineExceeded: 4,
    errors.Cancelled: 1,
    errors.Unavailable: 14,
    errors.InternalError: 13,
    errors.Unauthenticated: 16,
    errors.JobNotFound: 5,
    errors.AlreadyExists: 6,
    errors.NotAllowed: 7,
    errors.ChangeRefused: 9,
    errors.NotConfigured: 12,
}


def test_the_fields_that_a_problem_names_cross_a_border() -> None:
    error = InvalidInput("text", "9 tokens; set truncation to cut, or top_k to 1", ["truncation", "options.top_k"])
    received = from_status(to_status(error))
    assert isinstance(received, InvalidInput)
    assert (received.message, received.mentions) == (error.message, ["truncation", "options.top_k"])


each_error = pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)


def _packed(detail: Message) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(detail)
    return packed


def _detail(status: Status, kind: type[DetailT]) -> DetailT:
    (found,) = [packed for packed in status.details if packed.Is(kind.DESCRIPTOR)]
    detail = kind()
    found.Unpack(detail)
    return detail


@each_error
def test_every_error_has_the_code_that_the_api_promises(error: NeuronpipeError) -> None:
    assert to_status(error).code == _NUMBERS[type(error)]


def test_no_two_errors_share_a_code_and_a_reason() -> None:
    assert len({(code, kind.reason) for kind, code in CODES.items()}) == len(CODES)


def test_of_errors_that_share_a_code_the_first_is_meant_where_no_reason_is_given() -> None:
    assert type(from_status(Status(code=code_pb2.NOT_FOUND, message="gone"))) is ModelNotFound


@each_error
def test_an_error_comes_back_as_its_class_with_its_message_field_and_time_to_wait(error: NeuronpipeError) -> None:
    received = from_status(to_status(error))
    assert (type(received), vars(received)) == (type(error), vars(error))


@each_error
def test_every_status_says_its_reason(error: NeuronpipeError) -> None:
    assert _detail(to_status(error), ErrorInfo) == ErrorInfo(reason=error.reason, domain="neuronpipe")


def test_an_invalid_input_names_its_field() -> None:
    status = to_status(InvalidInput("top_k", "5, the model has 4 labels"))
    (violation,) = _detail(status, BadRequest).field_violations
    assert (violation.field, violation.description) == ("top_k", "5, the model has 4 labels")


def test_an_overload_says_when_to_come_back() -> None:
    delay = _detail(to_status(Overloaded("full", 1.5)), RetryInfo).retry_delay
    assert (delay.seconds, delay.nanos) == (1, 500_000_000)


@pytest.mark.parametrize("code", [code_pb2.UNKNOWN, code_pb2.DATA_LOSS, 99])
def test_a_code_that_no_service_of_ours_sends_becomes_an_internal_error(code: int) -> None:
    error = from_status(Status(code=code, message="odd"))
    assert (type(error), error.message) == (InternalError, "odd")


@pytest.mark.parametrize("details", [[], [_packed(BadRequest())]], ids=["no details", "no field"])
def test_an_invalid_argument_that_names_no_field_blames_the_request(details: list[AnyMessage]) -> None:
    error = from_status(Status(code=code_pb2.INVALID_ARGUMENT, message="bad", details=details))
    assert isinstance(error, InvalidInput)
    assert (error.field, error.problem) == ("request", "bad")


def test_an_exhausted_resource_without_details_has_some_time_to_wait() -> None:
    error = from_status(Status(code=code_pb2.RESOURCE_EXHAUSTED, message="full"))
    assert isinstance(error, Overloaded)
    assert error.retry_after_s > 0


def test_details_that_nobody_here_knows_are_passed_over() -> None:
    status = to_status(Overloaded("full", 2.0))
    status.details.insert(0, _packed(DebugInfo(detail="odd")))
    error = from_status(status)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.0
