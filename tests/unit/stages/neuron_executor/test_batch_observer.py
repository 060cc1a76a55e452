"""stages/neuron_executor/batch_observer.py: what a batch and its members say of each other."""

from dataclasses import dataclass
from typing import Any

import pytest

from neuronpipe.core.errors import DeadlineExceeded
from neuronpipe.core.names import Attributes, Events, Metrics, Spans
from neuronpipe.core.tracing import SpanContext
from neuronpipe.stages.neuron_executor.backends.base import BackendError
from neuronpipe.stages.neuron_executor.batch_observer import BatchObserver, BatchRun
from neuronpipe.stages.neuron_executor.batching import Batch
from tests.unit.model_specs import model_spec
from tests.unit.recorded import Recorded


@dataclass(frozen=True)
class _Member:
    tokens: int
    trace: SpanContext | None = None
    rows: int = 1


def _run(members: list[Any]) -> BatchRun:
    batch = Batch(members, rows=len(members), padded_tokens=10, computed_tokens=20)
    return BatchRun(batch, core=1, is_alone=False, started_ns=1_000, ended_ns=6_000)


def _observer(telemetry: Recorded) -> BatchObserver:
    return BatchObserver(telemetry, model_spec(version=1), "fake", cores=2)


def _trace() -> SpanContext:
    return SpanContext.new(is_sampled=True)


def test_a_batch_links_every_sampled_row_and_each_member_links_back() -> None:
    telemetry, one, two = Recorded(), _trace(), _trace()
    # Rows 0 and 3 belong to one item.
    _observer(telemetry).batch(_run([_Member(4, one), _Member(5), _Member(6, two), _Member(7, one)]))
    batch, computes = telemetry.one(Spans.BATCH), telemetry.named(Spans.COMPUTE)
    assert [compute.parent for compute in computes] == [one, two]
    forth = {
        (link.context, link.attributes[Attributes.ROW], link.attributes[Attributes.TOKENS]) for link in batch.links
    }
    assert forth == {(computes[0].context, 0, 4), (computes[1].context, 2, 6), (computes[0].context, 3, 7)}
    back = {(compute.context, link.attributes[Attributes.ROW]) for compute in computes for link in compute.links}
    assert back == {(context, row) for context, row, _ in forth}
    assert {link.context for compute in computes for link in compute.links} == {batch.context}
    assert {link.attributes[Attributes.BUCKET_TOKENS] for link in batch.links} == {10}


def test_a_batch_is_a_trace_of_its_own_with_what_it_cost() -> None:
    telemetry, trace = Recorded(), _trace()
    _observer(telemetry).batch(_run([_Member(4, trace), _Member(6)]))
    batch = telemetry.one(Spans.BATCH)
    assert batch.parent is None
    assert batch.context.trace_id != trace.trace_id
    assert (batch.started_ns, batch.ended_ns) == (1_000, 6_000)
    # 4 + 6 tokens in 2 rows of 10.
    expected = {Attributes.BATCH_SIZE: 2, Attributes.PADDED_TOKENS: 20, Attributes.PADDING_RATIO: 0.5}
    assert (expected | {Attributes.CORE: 1, Attributes.BACKEND: "fake"}).items() <= batch.attributes.items()


def test_a_batch_without_a_sampled_member_is_only_counted() -> None:
    telemetry = Recorded()
    _observer(telemetry).batch(_run([_Member(4), _Member(6)]))
    assert telemetry.spans == []
    labels = (model_spec(version=1).name, "1")
    assert telemetry.meters.histogram(Metrics.BATCH_SIZE, *labels).total == 2
    assert telemetry.meters.histogram(Metrics.BATCH_PADDING, *labels).total == 0.5
    assert telemetry.meters.counter(Metrics.CORE_BUSY, *labels, "1").value == 5_000
    assert telemetry.meters.counter(Metrics.CORE_BUSY, *labels, "0").value == 0


def test_a_batch_that_fails_is_busy_time_and_an_error_of_all_its_members() -> None:
    telemetry = Recorded()
    _observer(telemetry).batch(_run([_Member(4, _trace())]), BackendError("secret"))
    assert [span.is_error for span in telemetry.spans] == [True, True]
    assert telemetry.counts(Metrics.BATCH_FAILURES) == {(model_spec(version=1).name, "1"): 1}
    assert telemetry.counts(Metrics.BATCH_SIZE) == {}


@pytest.mark.parametrize("trace", [None, _trace()], ids=["unsampled", "sampled"])
def test_an_item_that_expires_in_the_queue_is_counted_and_its_wait_is_shown(trace: SpanContext | None) -> None:
    telemetry = Recorded()
    _observer(telemetry).dropped(trace, 1_000, DeadlineExceeded("late"))
    assert telemetry.counts(Metrics.QUEUE_DROPPED) == {(model_spec(version=1).name, "1", Events.EXPIRED): 1}
    expected = [(Spans.QUEUE, trace, 1_000)] if trace else []
    assert [(span.name, span.parent, span.started_ns) for span in telemetry.spans] == expected
