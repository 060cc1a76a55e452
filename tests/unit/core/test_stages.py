"""core/stages.py: items fail alone, and deadlines travel."""

import asyncio
import logging
import time

import pytest
from google.rpc.status_pb2 import Status

from neuronpipe.api.v1.stages_pb2 import ItemContext, TokenizeItem
from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput
from neuronpipe.core.stages import Call, each_alone
from neuronpipe.core.status import from_status, to_status


def _items(*names: str) -> list[TokenizeItem]:
    return [TokenizeItem(context=ItemContext(request_id=f"id-{name}"), model=name) for name in names]


def _failed(status: Status) -> str:
    return f"failed: {status.code}"


async def test_outcomes_come_in_the_order_of_the_items() -> None:
    last_is_done = asyncio.Event()

    async def work(item: TokenizeItem) -> str:
        if item.model == "last":
            last_is_done.set()
        await last_is_done.wait()
        return item.model

    assert await each_alone(_items("first", "middle", "last"), work, _failed) == ["first", "middle", "last"]


@pytest.mark.parametrize("fault", [InvalidInput("text", "is empty"), RuntimeError("boom")], ids=["an error", "a fault"])
async def test_an_item_that_fails_leaves_the_others_alone(fault: Exception) -> None:
    async def work(item: TokenizeItem) -> str:
        if item.model == "bad":
            raise fault
        return item.model

    outcomes = await each_alone(_items("good", "bad", "better"), work, lambda status: "failed")
    assert outcomes == ["good", "failed", "better"]


@pytest.mark.parametrize("names", [("bad",), ("bad", "bad")], ids=["alone", "with others"])
async def test_an_error_comes_out_as_its_status(names: tuple[str, ...]) -> None:
    async def work(item: TokenizeItem) -> Status:
        raise InvalidInput("text", "is empty")

    outcomes = await each_alone(_items(*names), work, lambda status: status)
    assert outcomes == [to_status(InvalidInput("text", "is empty"))] * len(names)


@pytest.mark.parametrize("names", [("bad",), ("bad", "bad")], ids=["alone", "with others"])
async def test_a_fault_comes_out_as_internal_with_the_request_id_and_nothing_of_its_text(names: tuple[str, ...]) -> None:
    async def work(item: TokenizeItem) -> Status:
        raise RuntimeError("the secret")

    error = from_status((await each_alone(_items(*names), work, lambda status: status))[0])
    assert isinstance(error, InternalError)
    assert "id-bad" in error.message
    assert "secret" not in error.message


async def test_a_fault_goes_to_the_log_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    fault = RuntimeError("the secret")

    async def work(item: TokenizeItem) -> Status:
        raise fault

    with caplog.at_level(logging.ERROR, logger="neuronpipe"):
        await each_alone(_items("bad"), work, lambda status: status)
    (record,) = caplog.records
    assert record.exc_info is not None
    assert record.exc_info[1] is fault


async def test_whoever_leaves_takes_the_items_along() -> None:
    running, ended = asyncio.Event(), []

    async def work(item: TokenizeItem) -> str:
        running.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(item.model)
        return ""

    task = asyncio.create_task(each_alone(_items("one", "two"), work, _failed))
    await running.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == ["one", "two"]


def test_what_is_left_of_a_deadline_is_put_on_this_processs_clock() -> None:
    before_s = time.monotonic()
    deadline_s = Call.of_item(ItemContext(remaining_ns=5_000_000_000)).deadline_s
    assert deadline_s is not None
    assert before_s + 5 <= deadline_s <= time.monotonic() + 5


def test_an_item_without_a_deadline_has_none() -> None:
    assert Call.of_item(ItemContext()).deadline_s is None


def test_an_item_sent_on_carries_what_is_left_of_the_deadline() -> None:
    # A minute's deadline, of which this test uses up less than a second.
    remaining_ns = Call(time.monotonic() + 60).item_context("id").remaining_ns
    assert 59_000_000_000 < remaining_ns <= 60_000_000_000


def test_an_item_sent_on_without_a_deadline_carries_none() -> None:
    assert Call().item_context("id").remaining_ns == 0


def test_nothing_is_sent_on_past_the_deadline() -> None:
    with pytest.raises(DeadlineExceeded):
        Call(time.monotonic() - 0.001).item_context("id")


def test_work_does_not_begin_past_the_deadline() -> None:
    with pytest.raises(DeadlineExceeded):
        Call(time.monotonic() - 0.001).check_deadline()


@pytest.mark.parametrize("call", [Call(), Call(time.monotonic() + 3600)], ids=["none", "later"])
def test_work_begins_before_the_deadline(call: Call) -> None:
    call.check_deadline()


def test_the_trace_context_and_the_request_id_travel_with_an_item() -> None:
    context = Call(traceparent="00-aa-bb-01", tracestate="v=1").item_context("id")
    assert (context.request_id, context.traceparent, context.tracestate) == ("id", "00-aa-bb-01", "v=1")
    assert Call.of_item(context) == Call(traceparent="00-aa-bb-01", tracestate="v=1")
