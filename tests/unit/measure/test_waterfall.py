"""measure/waterfall.py: a waterfall from OTLP JSON."""

from neuronpipe.core.errors import DeadlineExceeded
from neuronpipe.core.names import Attributes, Events, Spans
from neuronpipe.core.tracing import AttributeValue, Clock, Link, Span, SpanContext, SpanEvent
from neuronpipe.measure.waterfall import Mate, Trace, draw, read_trace, split
from neuronpipe.platform.telemetry.start import Json, to_otlp_json

_MS = 1_000_000
_ROOT, _BATCH, _MATE = (SpanContext.new(is_sampled=True) for _ in range(3))
_ID = f"{_ROOT.trace_id:032x}"


def _span(name: str, parent: Span | None, begin_ms: float, end_ms: float, **attributes: AttributeValue) -> Span:
    context = parent.context.child() if parent else _ROOT
    return Span(
        name, context, parent.context if parent else None, int(begin_ms * _MS), int(end_ms * _MS), attributes=attributes
    )


def _otlp(*, is_failing: bool = False) -> Json:
    """Ten milliseconds: 1 of pre-process, 7 of prediction with 2 of queue and 4 of compute, 1.5 of post-process, 0.5 of
    rest.
    """
    model: dict[str, AttributeValue] = {
        Attributes.MODEL: "minilm",
        Attributes.VERSION: "1",
        Attributes.TASK: "sentence_embedding",
    }
    root = _span(Spans.INFER, None, 0, 10, **model, **{Attributes.TOKENS: 5})
    predict = _span(Spans.PREDICT, root, 1, 8)
    queue, compute = _span(Spans.QUEUE, predict, 1.5, 3.5), _span(Spans.COMPUTE, predict, 3.5, 7.5)
    row: dict[str, AttributeValue] = {Attributes.ROW: 1, Attributes.TOKENS: 5, Attributes.BUCKET_TOKENS: 8}
    compute.links.append(Link(_BATCH, row))
    batch = Span(Spans.BATCH, _BATCH, None, int(3.5 * _MS), int(7.5 * _MS))
    batch.attributes |= {Attributes.BATCH_SIZE: 3, Attributes.BACKEND: "fake", Attributes.CORE: 0}
    batch.attributes |= {Attributes.PADDING_RATIO: 0.25, Attributes.BUCKET_TOKENS: 8}
    batch.links += [Link(_MATE, {**row, Attributes.ROW: 0, Attributes.TOKENS: 8}), Link(compute.context, row)]
    if is_failing:
        for span in (root, predict):
            span.fail(DeadlineExceeded("late"), span.ended_ns)
    gateway = [_span(Spans.PREPROCESS, root, 0, 1), predict, _span(Spans.POSTPROCESS, root, 8, 9.5), root]
    clock = Clock()
    found = to_otlp_json(gateway, {"service.name": "gateway"}, clock)
    found["resourceSpans"] += to_otlp_json([queue, compute, batch], {"service.name": "neuron-executor"}, clock)[
        "resourceSpans"
    ]
    return found


def _trace(*, is_failing: bool = False) -> Trace:
    trace = read_trace(_otlp(is_failing=is_failing), _ID)
    assert trace
    return trace


def test_spans_of_several_services_are_one_tree_in_the_order_of_time() -> None:
    assert [(row.depth, row.span.name) for row in _trace().rows] == [
        (0, Spans.INFER),
        (1, Spans.PREPROCESS),
        (1, Spans.PREDICT),
        (2, Spans.QUEUE),
        (2, Spans.COMPUTE),
        (1, Spans.POSTPROCESS),
    ]


def test_attributes_are_what_they_were() -> None:
    trace = _trace()
    assert trace.root.attributes[Attributes.TOKENS] == 5
    assert trace.batches[0].attributes[Attributes.PADDING_RATIO] == 0.25


def test_the_split_adds_up_to_the_request() -> None:
    # Of prediction's 7 ms, 2 and 4 are the executor's, 1 the way there and back.
    assert split(_trace()) == (
        "pre-process 10.0 % + prediction 70.0 % (queue 20.0 %, compute 40.0 %, hop 10.0 %) + post-process 15.0 % + "
        "unattributed 5.0 % = 10.000 ms"
    )


def test_spans_of_several_sequences_that_overlap_count_once_so_that_no_share_is_impossible() -> None:
    root = _span(Spans.INFER, None, 0, 10)
    predict = _span(Spans.PREDICT, root, 1, 9)
    # Three sequences in three batches: compute covers 3 to 7 ms, queue 1.5 to 3.5 ms, of which 0.5 ms are spent
    # computing another.
    computed = [_span(Spans.COMPUTE, predict, *times) for times in ((3, 6), (3, 5), (5.5, 7))]
    queued = [_span(Spans.QUEUE, predict, *times) for times in ((1.5, 3), (2, 3.5))]
    trace = read_trace(to_otlp_json([root, predict, *queued, *computed], {"service.name": "all"}, Clock()), _ID)
    assert trace
    assert split(trace) == (
        "pre-process 0.0 % + prediction 80.0 % (queue 15.0 %, compute 40.0 %, hop 25.0 %) + post-process 0.0 % + "
        "unattributed 20.0 % = 10.000 ms"
    )


def _generated() -> Trace:
    """Ten milliseconds, of which the first 4 end with the first of 4 tokens, in two steps, the first one linked."""
    figures: dict[str, AttributeValue] = {Attributes.FIRST_TOKEN_NS: 4 * _MS, Attributes.PREFILL_NS: 2 * _MS}
    figures |= {Attributes.DECODE_NS: 3 * _MS, Attributes.LONGEST_GAP_NS: 2 * _MS}
    root = _span(Spans.INFER, None, 0, 10, **figures)
    predict = _span(Spans.PREDICT, root, 1, 9)
    queue = _span(Spans.QUEUE, predict, 1.5, 2)
    compute = _span(Spans.COMPUTE, predict, 2, 8, **{Attributes.GENERATED_TOKENS: 4})
    compute.events += [SpanEvent(Events.FIRST_TOKEN, 4 * _MS), SpanEvent(Events.PREEMPTED, 5 * _MS)]
    row: dict[str, AttributeValue] = {Attributes.ROW: 1, Attributes.TOKENS: 9}
    compute.links.append(Link(_BATCH, row))
    step = Span(Spans.BATCH, _BATCH, None, 2 * _MS, 4 * _MS)
    step.attributes |= {Attributes.BATCH_SIZE: 2, Attributes.BACKEND: "fake", Attributes.TOKENS: 10}
    step.links.append(Link(compute.context, row))
    spans = [root, _span(Spans.PREPROCESS, root, 0, 1), predict, queue, compute, step]
    trace = read_trace(to_otlp_json(spans, {"service.name": "all"}, Clock()), _ID)
    assert trace
    return trace


def test_a_generated_text_has_the_parts_of_its_time_to_first_token() -> None:
    lines = list(draw(_generated(), 12 * _MS))
    # 4 ms less 1, 0.5 and 2; 3 ms for 3 tokens.
    assert (
        "first token after 4.000 ms = pre-process 1.000 + queue 0.500 + prefill 2.000 + hops 0.500; then 3 tokens, "
        "1.000 ms each, the longest gap 2.000 ms"
    ) in lines
    assert not [line for line in draw(_trace(), 12 * _MS) if line.startswith("first token")]
    (marked,) = [line for line in lines if "!" in line]
    assert marked.endswith("ms  ! preempted")


def test_a_step_has_no_padding_and_names_the_text() -> None:
    lines = list(draw(_generated(), 12 * _MS))
    assert lines[-3:] == [
        "step of 2 on fake: 2.000 ms, 10 tokens",
        "  row   0  another text",
        "  row   1     9 tokens  this request",
    ]


def test_a_batch_shows_who_shared_it_and_who_is_not_known() -> None:
    trace = _trace()
    (batch,) = trace.batches
    assert trace.mates(batch) == [Mate(0, 8, f"{_MATE.trace_id:032x}"), Mate(1, 5, _ID), Mate(2, 0, "")]


def test_a_bar_begins_and_ends_where_its_span_does() -> None:
    (line,) = [line for line in draw(_trace(), 12 * _MS) if line.strip().startswith(Spans.COMPUTE)]
    bar = line.split("|")[1]
    # 3.5 to 7.5 of 10 ms on 48 columns.
    assert (len(bar), bar.index("█"), bar.count("█")) == (48, 16, 20)


def test_what_the_caller_waited_beyond_the_request_is_a_number_of_its_own() -> None:
    assert any("waited 12.000 ms: 2.000 ms of it outside" in line for line in draw(_trace(), 12 * _MS))


def test_a_failure_is_marked_where_it_happened() -> None:
    marked = [line for line in draw(_trace(is_failing=True), 12 * _MS) if "! expired, DEADLINE_EXCEEDED" in line]
    assert [line.split()[0] for line in marked] == ["Infer", "predict"]


def test_a_trace_without_spans_is_none() -> None:
    assert read_trace({"resourceSpans": []}, _ID) is None
