"""core/tracing.py: what travels, what is sampled, and when things happened."""

import asyncio
import random
import re

import pytest

from neuronpipe.core.errors import DeadlineExceeded, InternalError, InvalidInput, NeuronpipeError, Overloaded
from neuronpipe.core.names import Attributes, Events
from neuronpipe.core.tracing import Clock, Span, SpanContext, Tracer, status_name
from tests.unit.every_error import EVERY_ERROR

# The example of https://www.w3.org/TR/trace-context/#traceparent-header
_TRACE, _SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
_SAMPLED = f"00-{_TRACE}-{_SPAN}-01"
_UNSAMPLED = f"00-{_TRACE}-{_SPAN}-00"


def _tracer(ratio: float = 0.0, *, honours_parent: bool = True) -> Tracer:
    return Tracer([lambda span: None], ratio=ratio, honours_parent=honours_parent)


def test_a_traceparent_is_read_and_written_alike() -> None:
    context = SpanContext.parse(_SAMPLED, "vendor=1")
    assert context == SpanContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, True, "vendor=1")
    assert context.traceparent == _SAMPLED


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "00-aa-bb-01",
        f"00-{'0' * 32}-{_SPAN}-01",  # no trace
        f"00-{_TRACE}-{'0' * 16}-01",  # no span
        f"ff-{_TRACE}-{_SPAN}-01",  # a version that will never be
        f"00-{_TRACE.upper()}-{_SPAN}-01",
        f"{_SAMPLED}-more",  # version 00 has nothing more
        f"{_SAMPLED}\n",
    ],
)
def test_what_is_no_traceparent_means_the_same_as_none(traceparent: str) -> None:
    assert SpanContext.parse(traceparent) is None


@pytest.mark.parametrize(
    ("flags", "is_sampled"), [("00", False), ("01", True), ("02", False), ("03", True), ("ff", True)]
)
def test_only_the_sampled_bit_of_the_flags_counts(flags: str, is_sampled: bool) -> None:
    context = SpanContext.parse(f"00-{_TRACE}-{_SPAN}-{flags}")
    assert context is not None
    assert context.is_sampled is is_sampled


def test_a_newer_versions_traceparent_is_read_as_far_as_it_is_known() -> None:
    assert SpanContext.parse(f"01-{_TRACE}-{_SPAN}-01-extra") == SpanContext.parse(_SAMPLED)


def test_a_child_stays_in_the_trace_with_an_id_of_its_own() -> None:
    context = SpanContext.parse(_SAMPLED, "v=1")
    assert context is not None
    child = context.child()
    assert (child.trace_id, child.is_sampled, child.tracestate) == (context.trace_id, True, "v=1")
    assert child.span_id != context.span_id


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_callers_decision_goes_before_the_ratio(ratio: float) -> None:
    context = _tracer(ratio).begin(SpanContext.parse(_SAMPLED))
    assert context is not None
    assert context.traceparent.startswith(f"00-{_TRACE}-")
    assert _tracer(ratio).begin(SpanContext.parse(_UNSAMPLED)) is None


@pytest.mark.parametrize(("ratio", "is_sampled"), [(0.0, False), (1.0, True)])
def test_a_sampler_that_ignores_parents_stays_in_their_trace(ratio: float, is_sampled: bool) -> None:
    for traceparent in (_SAMPLED, _UNSAMPLED):
        context = _tracer(ratio, honours_parent=False).begin(SpanContext.parse(traceparent))
        assert (context is not None) is is_sampled
        assert context is None or f"{context.trace_id:032x}" == _TRACE


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.5, 1.0])
def test_requests_without_a_caller_are_sampled_at_the_ratio(ratio: float) -> None:
    random.seed(6)
    tracer, count = _tracer(ratio), 20_000
    sampled = sum(tracer.begin(None) is not None for _ in range(count))
    # Five standard deviations of a binomial distribution.
    assert sampled == pytest.approx(count * ratio, abs=5 * (count * ratio * (1 - ratio)) ** 0.5)


def test_without_sinks_nothing_is_sampled_whatever_callers_say() -> None:
    sampled = SpanContext.parse(_SAMPLED)
    assert Tracer(ratio=1.0).begin(sampled) is None
    assert Tracer(ratio=1.0).joined(sampled) is None
    assert Tracer(ratio=1.0).unsampled(sampled) == sampled


def test_stages_never_decide_themselves() -> None:
    tracer = _tracer(1.0)
    assert tracer.joined(None) is None
    assert tracer.joined(SpanContext.parse(_UNSAMPLED)) is None
    assert tracer.joined(SpanContext.parse(_SAMPLED)) == SpanContext.parse(_SAMPLED)


def test_a_request_that_is_not_sampled_is_not_sampled_by_others() -> None:
    assert _tracer().unsampled(SpanContext.parse(_SAMPLED, "v=1")) == SpanContext.parse(_UNSAMPLED, "v=1")
    assert _tracer().unsampled(SpanContext.parse(_UNSAMPLED)) == SpanContext.parse(_UNSAMPLED)
    assert _tracer().unsampled(None) is None


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
def test_every_error_has_the_name_of_a_grpc_status(error: NeuronpipeError) -> None:
    assert re.fullmatch("[A-Z_]+", status_name(error))


@pytest.mark.parametrize(
    ("error", "is_error", "events"),
    [
        (Overloaded("full", 1), True, [Events.SHED]),
        (DeadlineExceeded("late"), True, [Events.EXPIRED]),
        (asyncio.CancelledError(), False, [Events.CANCELLED]),
        (InvalidInput("text", "empty"), False, []),
        (InternalError("bug"), True, []),
        (RuntimeError("secret"), True, []),
    ],
    ids=repr,
)
def test_a_failure_that_is_not_the_callers_is_an_error(error: BaseException, is_error: bool, events: list[str]) -> None:
    span = Span("x", SpanContext.new(is_sampled=True), None, 0)
    span.fail(error, 7)
    assert span.is_error is is_error
    assert [(event.name, event.at_ns) for event in span.events] == [(event, 7) for event in events]
    assert span.attributes == {Attributes.ERROR_TYPE: status_name(error)}  # and nothing of its text


def test_moments_keep_their_distances_on_the_wall_clock() -> None:
    clock = Clock()
    first, second = clock.wall_ns(1_000), clock.wall_ns(4_500)
    assert second - first == 3_500
