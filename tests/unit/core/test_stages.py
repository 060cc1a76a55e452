"""core/stages.py: deadlines travel, and faults keep their text to themselves."""

import logging
import time

import pytest

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.stages_pb2 import ItemContext
from neuronpipe.core.errors import DeadlineExceeded, InternalError
from neuronpipe.core.stages import Call, internal_error


def test_a_fault_comes_out_as_internal_with_the_request_id_and_nothing_of_its_text() -> None:
    error = internal_error(RuntimeError("the secret"), "id-bad")
    assert isinstance(error, InternalError)
    assert "id-bad" in error.message
    assert "secret" not in error.message


def test_a_fault_goes_to_the_log_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    fault = RuntimeError("the secret")
    with caplog.at_level(logging.ERROR, logger="neuronpipe"):
        internal_error(fault, "id-bad")
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is fault
    assert record.__dict__["fields"] == {"request_id": "id-bad"}


def test_a_faults_log_line_names_the_callers_trace_though_it_is_not_sampled(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, logger="neuronpipe"):
        internal_error(RuntimeError("x"), "id", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00")
    fields = caplog.records[0].__dict__["fields"]
    assert (fields["trace_id"], fields["span_id"]) == ("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7")


def test_what_is_left_of_a_deadline_is_put_on_this_processs_clock() -> None:
    before_s = time.monotonic()
    deadline_s = Call.of_item(ItemContext(remaining_ns=5_000_000_000)).deadline_s
    assert deadline_s is not None
    assert before_s + 5 <= deadline_s <= time.monotonic() + 5


def test_an_item_without_a_deadline_has_none() -> None:
    assert Call.of_item(ItemContext()).deadline_s is None


def test_an_item_sent_on_carries_what_is_left_of_the_deadline() -> None:
    # A minute's deadline, of which this test uses up less than a second.
    remaining_ns = Call(time.monotonic() + 60).item_context().remaining_ns
    assert 59_000_000_000 < remaining_ns <= 60_000_000_000


def test_an_item_sent_on_without_a_deadline_carries_none() -> None:
    assert Call().item_context().remaining_ns == 0


def test_a_deadline_in_the_far_future_fits_on_the_wire() -> None:
    assert Call(time.monotonic() + 1e12).item_context().remaining_ns == (1 << 63) - 1


def test_nothing_is_sent_on_past_the_deadline() -> None:
    with pytest.raises(DeadlineExceeded):
        Call(time.monotonic() - 0.001).item_context()


def test_work_does_not_begin_past_the_deadline() -> None:
    with pytest.raises(DeadlineExceeded):
        Call(time.monotonic() - 0.001).check_deadline()


@pytest.mark.parametrize("call", [Call(), Call(time.monotonic() + 3600)], ids=["none", "later"])
def test_work_begins_before_the_deadline(call: Call) -> None:
    call.check_deadline()


def test_the_trace_context_the_priority_and_the_request_id_travel_with_an_item() -> None:
    call = Call(request_id="id", priority=Priority.PRIORITY_BULK, traceparent="00-aa-bb-01", tracestate="v=1")
    assert Call.of_item(call.item_context()) == call
