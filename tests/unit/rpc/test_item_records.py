"""rpc/item_records.py: each item of a shared message joins the trace of its own request."""

import pytest

from neuronpipe.api.v1.stages_pb2 import EncodedInput, ItemContext, TokenizeItem
from neuronpipe.core.errors import DeadlineExceeded
from neuronpipe.core.telemetry import Attributes, Events, Metrics
from neuronpipe.core.tracing import SpanContext, current_span
from neuronpipe.rpc.item_records import ItemRecords
from tests.unit.recorded import Recorded

_METHOD = "neuronpipe.api.v1.TokenizerService/Tokenize"


def _item(context: SpanContext | None) -> TokenizeItem:
    return TokenizeItem(context=ItemContext(traceparent=context.traceparent if context else "", request_id="mine"), model="m", version="1")


def test_a_sampled_items_span_is_the_child_of_the_span_that_it_came_with() -> None:
    telemetry, parent = Recorded(), SpanContext.new(is_sampled=True)
    item = _item(parent)
    with ItemRecords(_METHOD, telemetry).one_more(item) as record:
        # The stage's own spans are inside of this one.
        inside, current = item.context.traceparent, current_span()
        record.value = EncodedInput(tokens=5)
    (span,) = telemetry.spans
    assert (span.name, span.kind, span.parent) == (_METHOD, "server", parent)
    assert inside == span.context.traceparent
    assert current is span
    expected = {Attributes.MODEL: "m", Attributes.REQUEST_ID: "mine", Attributes.TOKENS: 5, Attributes.RPC_STATUS: "OK"}
    assert expected.items() <= span.attributes.items()


@pytest.mark.parametrize("context", [None, SpanContext.new(is_sampled=False)], ids=["none", "unsampled"])
def test_an_item_that_is_not_sampled_is_counted_only(context: SpanContext | None) -> None:
    telemetry, item = Recorded(), _item(context)
    before = item.context.traceparent
    with ItemRecords(_METHOD, telemetry).one_more(item):
        assert item.context.traceparent == before
    assert telemetry.spans == []
    assert telemetry.counts(Metrics.ITEM_DURATION) == {(_METHOD, "OK"): 1}


def test_a_failed_item_says_with_what() -> None:
    telemetry = Recorded()
    records = ItemRecords(_METHOD, telemetry)
    with pytest.raises(DeadlineExceeded), records.one_more(_item(SpanContext.new(is_sampled=True))):
        raise DeadlineExceeded("late")
    (span,) = telemetry.spans
    assert (span.is_error, [event.name for event in span.events]) == (True, [Events.EXPIRED])
    assert telemetry.counts(Metrics.ITEM_DURATION) == {(_METHOD, "DEADLINE_EXCEEDED"): 1}
    assert records.in_flight == 0
