"""rpc/items.py: each item of a shared message joins the trace of its own request."""

import pytest

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded
from neuronpipe.core.items import EncodedInput, ExecuteItem, ModelKey, Work
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import Attributes, Events, Metrics
from neuronpipe.core.packed import TensorSets
from neuronpipe.core.tracing import SpanContext, current_span
from neuronpipe.rpc.items import ItemObservation, ItemObserver
from tests.unit.recorded import Recorded

_METHOD = "neuronpipe.api.v1.TokenizerService/Tokenize"


def _item(trace: SpanContext | None) -> ExecuteItem:
    return ExecuteItem(Call("mine"), ModelKey("m", 1), TensorSets(arrays=()), work=Work(trace))


def test_a_sampled_items_span_is_the_child_of_the_span_that_it_came_with() -> None:
    telemetry, parent = Recorded(), SpanContext.new(is_sampled=True)
    with ItemObservation(ItemObserver(_METHOD, telemetry), _item(parent)) as observation:
        # The stage's own spans are inside of this one.
        inside, current = observation.trace, current_span()
        observation.value = EncodedInput(TensorSets(data=[b"", b""]), tokens=5)
    (span,) = telemetry.spans
    assert (span.name, span.kind, span.parent) == (_METHOD, "server", parent)
    assert inside == span.context
    assert current is span
    expected = {
        Attributes.MODEL: "m",
        Attributes.VERSION: "1",
        Attributes.REQUEST_ID: "mine",
        Attributes.TOKENS: 5,
        Attributes.SEQUENCES: 2,
        Attributes.RPC_STATUS: "OK",
    }
    assert expected.items() <= span.attributes.items()


@pytest.mark.parametrize("trace", [None, SpanContext.new(is_sampled=False)], ids=["none", "unsampled"])
def test_an_item_that_is_not_sampled_is_counted_only(trace: SpanContext | None) -> None:
    telemetry = Recorded()
    with ItemObservation(ItemObserver(_METHOD, telemetry), _item(trace)) as observation:
        assert observation.trace == trace
    assert telemetry.spans == []
    assert telemetry.counts(Metrics.ITEM_DURATION) == {(_METHOD, "OK"): 1}


def test_without_anybody_who_takes_spans_a_sampled_item_is_counted_only() -> None:
    parent = SpanContext.new(is_sampled=True)
    with ItemObservation(ItemObserver(_METHOD, Telemetry()), _item(parent)) as observation:
        assert observation.trace == parent


def test_a_failed_item_says_with_what() -> None:
    telemetry = Recorded()
    observer = ItemObserver(_METHOD, telemetry)
    with pytest.raises(DeadlineExceeded), ItemObservation(observer, _item(SpanContext.new(is_sampled=True))):
        raise DeadlineExceeded("late")
    (span,) = telemetry.spans
    assert (span.is_error, [event.name for event in span.events]) == (True, [Events.EXPIRED])
    assert telemetry.counts(Metrics.ITEM_DURATION) == {(_METHOD, "DEADLINE_EXCEEDED"): 1}
    assert observer.in_flight == 0
