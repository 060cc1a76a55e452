"""core/calls.py: what travels with a request, and what is said of a fault."""

import json
import logging
import time

import pytest

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.core.callers import ANONYMOUS
from neuronpipe.core.calls import Call, internal_error
from neuronpipe.core.errors import DeadlineExceeded
from neuronpipe.core.tracing import SpanContext


def test_a_call_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Call().request_id = "x"  # type: ignore[misc]


def test_copies_of_a_call_keep_all_that_they_do_not_change() -> None:
    given = {name: object() for name in Call._fields}
    call = Call(**given)  # type: ignore[arg-type]
    assert call.until(7.0) == call._replace(deadline_s=7.0)
    assert call.for_request("mine", Priority.PRIORITY_BULK) == call._replace(
        request_id="mine", priority=Priority.PRIORITY_BULK
    )


def test_whoever_is_not_known_is_anonymous() -> None:
    assert Call().caller is ANONYMOUS


def test_work_past_its_deadline_is_not_begun() -> None:
    Call().check_deadline()
    Call(deadline_s=time.monotonic() + 60).check_deadline()
    with pytest.raises(DeadlineExceeded):
        Call(deadline_s=time.monotonic() - 1).check_deadline()


def test_a_deadline_between_two_stages_is_not_said_to_be_before_the_work() -> None:
    Call().check_deadline(has_begun=True)
    with pytest.raises(DeadlineExceeded, match=r"^the deadline passed before the result was ready$"):
        Call(deadline_s=time.monotonic() - 1).check_deadline(has_begun=True)


def test_a_fault_is_logged_under_the_callers_trace_and_told_by_the_request_id(caplog: pytest.LogCaptureFixture) -> None:
    call = Call(request_id="mine", trace=SpanContext(0xAB, 0xCD, is_sampled=False))
    with caplog.at_level(logging.ERROR, logger="neuronpipe"):
        error = internal_error(ValueError("secret"), call)
    assert "mine" in error.message
    assert "secret" not in error.message
    (record,) = caplog.records
    expected = {"request_id": "mine", "trace_id": f"{0xAB:032x}", "span_id": f"{0xCD:016x}"}
    assert json.loads(json.dumps(record.__dict__["fields"])) == expected
