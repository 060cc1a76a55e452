"""rpc/client.py: what a failed call means."""

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import code_pb2
from google.rpc.status_pb2 import Status

from neuronpipe.core.errors import (
    DeadlineExceeded,
    InternalError,
    NeuronpipeError,
    NotConfigured,
    Overloaded,
    Unavailable,
)
from neuronpipe.core.status import to_status
from neuronpipe.rpc.client import error_of
from tests.unit.every_error import EVERY_ERROR

_STATUS_WITH_DAMAGED_DETAIL = Status(
    code=code_pb2.RESOURCE_EXHAUSTED,
    message="full",
    details=[AnyMessage(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff" * 9)],
).SerializeToString()


def _failure(code: grpc.StatusCode, message: str, *trailers: tuple[str, str | bytes]) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailers), message)


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
def test_an_error_of_a_service_of_ours_is_that_error(error: NeuronpipeError) -> None:
    # gRPC's own code and text are others on purpose: what the service sent counts.
    details = ("grpc-status-details-bin", to_status(error).SerializeToString())
    back = error_of(_failure(grpc.StatusCode.UNKNOWN, "a proxy's text", ("x-other", "1"), details))
    assert (type(back), vars(back)) == (type(error), vars(error))


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, Unavailable),
        (grpc.StatusCode.DEADLINE_EXCEEDED, DeadlineExceeded),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),
        (grpc.StatusCode.UNKNOWN, InternalError),
        (grpc.StatusCode.UNIMPLEMENTED, NotConfigured),  # a server of an earlier version
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_failure_that_grpc_found_is_the_error_of_its_code(code: grpc.StatusCode, kind: type[NeuronpipeError]) -> None:
    error = error_of(_failure(code, "socket closed"))
    assert (type(error), error.message) == (kind, "socket closed")


@pytest.mark.parametrize("details", [b"\xff" * 9, _STATUS_WITH_DAMAGED_DETAIL], ids=["status", "detail"])
def test_damaged_details_leave_the_status(details: bytes) -> None:
    failure = _failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", ("grpc-status-details-bin", details))
    error = error_of(failure)
    assert (type(error), error.message) == (Overloaded, "full")


def test_a_call_that_the_server_cut_off_may_be_repeated() -> None:
    error = error_of(_failure(grpc.StatusCode.CANCELLED, "CANCELLED"))
    assert (type(error), error.message) == (Unavailable, "the server ended the call: it is overloaded, or stops")


def test_a_call_that_the_server_cut_off_at_its_deadline_came_too_late() -> None:
    failure = _failure(grpc.StatusCode.CANCELLED, "CANCELLED")
    assert type(error_of(failure, remaining_s=0.001)) is DeadlineExceeded
    assert type(error_of(failure, remaining_s=1.0)) is Unavailable


def test_a_failure_without_a_text_is_named_by_its_code() -> None:
    assert error_of(_failure(grpc.StatusCode.UNAVAILABLE, "")).message == "UNAVAILABLE"


def test_a_status_code_of_grpc_is_one_of_google_rpc() -> None:
    assert {code.value[0] for code in grpc.StatusCode} == set(code_pb2.Code.values())
