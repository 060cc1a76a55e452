"""Records metrics of all batches and items of the executor, and spans for items of sampled requests."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.names import Attributes, Events, Instrument, Metrics, Spans
from neuronpipe.core.streams import Preparation
from neuronpipe.core.tracing import AttributeValue, Link, Span, SpanContext, event_of
from neuronpipe.stages.neuron_executor.batching import Batch

# The outcome of a failed item. Spans have no event for it.
_FAILED = "failed"
# The attributes of a batch that a compute span repeats. All attributes would take a third more to export.
_OF_COMPUTE = (Attributes.BACKEND, Attributes.CORE, Attributes.BATCH_SIZE, Attributes.BUCKET_TOKENS)


@dataclass(frozen=True, slots=True)
class BatchRun:
    """One run of the model. Times are on time.monotonic_ns(). `started_ns`: the time when the core was free for it."""

    batch: Batch
    core: int
    is_alone: bool
    started_ns: int
    ended_ns: int


class ModelObserver:
    """Records the figures that all kinds of models have: their batches, their start, and the items that they drop."""

    # The gauges that end with the model.
    gauges: ClassVar[tuple[Instrument, ...]] = ()

    def __init__(self, telemetry: Telemetry, spec: ModelSpec, backend: str) -> None:
        self._tracer = telemetry.tracer
        self._meters = meters = telemetry.meters
        self._backend = backend
        self.labels = labels = (spec.name, str(spec.version))
        self._sizes = meters.histogram(Metrics.BATCH_SIZE, *labels)
        self._durations = meters.histogram(Metrics.BATCH_DURATION, *labels, backend)
        self._tokens = meters.counter(Metrics.BATCH_TOKENS, *labels)
        # A counter must exist before its first event: a series that begins with 1 has no rate.
        for outcome in (Events.SHED, Events.EXPIRED, Events.CANCELLED, _FAILED):
            meters.counter(Metrics.QUEUE_DROPPED, *labels, outcome)

    def unwatch(self) -> None:
        """Removes the gauges of a model that has left."""
        for instrument in self.gauges:
            self._meters.remove(instrument, *self.labels)

    def ready(self, duration_ns: int) -> None:
        """Records the time that the model took to load and warm up."""
        self._meters.gauge(Metrics.READY_DURATION, lambda: duration_ns, *self.labels, self._backend)

    def count_dropped(self, error: BaseException) -> None:
        """Counts an item that was not computed, or whose result came too late for its caller."""
        self._meters.counter(Metrics.QUEUE_DROPPED, *self.labels, event_of(error) or _FAILED).add()


class BatchObserver(ModelObserver):
    """Records the batches and items of one model."""

    gauges = (
        *(Metrics.CORES, Metrics.QUEUE_SEQUENCES, Metrics.QUEUE_TOKENS, Metrics.QUEUE_WORK),
        *(Metrics.MODEL_SHAPES, Metrics.MODEL_SHAPES_READY, Metrics.LONE_GRAPHS, Metrics.LONE_GRAPH_MEMORY),
    )

    def __init__(
        self,
        telemetry: Telemetry,
        spec: ModelSpec,
        backend: str,
        cores: int,
        part_ns: Callable[[], Sequence[int]] = tuple,
    ) -> None:
        """`part_ns`: see Backend."""
        super().__init__(telemetry, spec, backend)
        meters, labels = self._meters, self.labels
        self._paddings = meters.histogram(Metrics.BATCH_PADDING, *labels)
        self._failures = meters.counter(Metrics.BATCH_FAILURES, *labels)
        self._part_ns, self._seen_ns = part_ns, [*part_ns()]
        self._parts = [meters.counter(Metrics.PART_BUSY, *labels, str(part)) for part, _ in enumerate(self._seen_ns)]
        self._busy = [meters.counter(Metrics.CORE_BUSY, *labels, str(core)) for core in range(cores)]

    def watch(
        self, queued: Callable[[], tuple[int, int]], backlog_s: Callable[[], float], cores_left: Callable[[], int]
    ) -> None:
        """Adds gauges of the model's queue and cores.

        `queued` returns the number of waiting sequences and their padded tokens, `backlog_s` for how long they keep the
        cores busy, `cores_left` the number of cores that are not lost.
        """
        self._meters.gauge(Metrics.CORES, cores_left, *self.labels)
        self._meters.gauge(Metrics.QUEUE_SEQUENCES, lambda: queued()[0], *self.labels)
        self._meters.gauge(Metrics.QUEUE_TOKENS, lambda: queued()[1], *self.labels)
        self._meters.gauge(Metrics.QUEUE_WORK, lambda: backlog_s() * 1e9, *self.labels)

    def watch_shapes(self, prepared: Callable[[], Preparation]) -> None:
        """Adds gauges of planned shapes, ready shapes, and graphs of single lengths."""
        self._meters.gauge(Metrics.MODEL_SHAPES, lambda: prepared().shapes, *self.labels)
        self._meters.gauge(Metrics.MODEL_SHAPES_READY, lambda: prepared().shapes_ready, *self.labels)
        self._meters.gauge(Metrics.LONE_GRAPHS, lambda: prepared().lone_graphs, *self.labels)
        self._meters.gauge(Metrics.LONE_GRAPH_MEMORY, lambda: prepared().lone_graph_bytes, *self.labels)

    def batch(self, run: BatchRun, fault: Exception | None = None) -> None:
        members, computed_tokens = run.batch.members, run.batch.computed_tokens
        size, real_tokens = sum(member.rows for member in members), sum(member.tokens for member in members)
        padding = 1 - real_tokens / computed_tokens
        duration_ns = run.ended_ns - run.started_ns
        self._busy[run.core].add(duration_ns)
        for part, total_ns in enumerate(self._part_ns()):
            self._parts[part].add(total_ns - self._seen_ns[part])
            self._seen_ns[part] = total_ns
        context = SpanContext.new(is_sampled=True) if any(member.trace for member in members) else None
        if fault:
            self._failures.add()
        else:
            self._sizes.record(size, context)
            self._paddings.record(padding, context)
            self._durations.record(duration_ns, context)
            self._tokens.add(computed_tokens)
        if context:
            self._record_spans(run, context, padding, fault)

    def _record_spans(self, run: BatchRun, context: SpanContext, padding: float, fault: Exception | None) -> None:
        """Records the batch's span, with links to its sampled rows, and each item's compute span, which links back."""
        (name, version), batch = self.labels, run.batch
        span = Span(Spans.BATCH, context, None, run.started_ns, run.ended_ns)
        span.attributes |= {
            Attributes.MODEL: name,
            Attributes.VERSION: version,
            Attributes.BACKEND: self._backend,
            Attributes.CORE: run.core,
            Attributes.IS_ALONE: run.is_alone,
            Attributes.BATCH_SIZE: sum(member.rows for member in batch.members),
            Attributes.BUCKET_TOKENS: batch.padded_tokens,
            Attributes.PADDED_TOKENS: batch.computed_tokens,
            Attributes.PADDING_RATIO: padding,
        }
        compute_spans: dict[SpanContext, Span] = {}
        end = 0
        for member in batch.members:
            row, end = end, end + member.rows
            if not member.trace:
                continue
            row_attributes: dict[str, AttributeValue] = {
                Attributes.ROW: row,
                Attributes.TOKENS: member.tokens,
                Attributes.BUCKET_TOKENS: batch.padded_tokens,
            }
            compute = compute_spans.get(member.trace)
            if compute is None:
                compute = compute_spans[member.trace] = Span(
                    Spans.COMPUTE, member.trace.child(), member.trace, run.started_ns, run.ended_ns
                )
                compute.attributes |= {key: span.attributes[key] for key in _OF_COMPUTE}
            span.links.append(Link(compute.context, row_attributes))
            compute.links.append(Link(context, row_attributes))
        for recorded in (span, *compute_spans.values()):
            if fault:
                recorded.fail(fault, run.ended_ns)
            self._tracer.record(recorded)

    def waited(self, trace: SpanContext, began_ns: int, ended_ns: int) -> None:
        """Records a wait of a sampled item, once the item was computed."""
        self._tracer.record(self._queue_span(trace, began_ns, ended_ns))

    def dropped(self, trace: SpanContext | None, arrived_ns: int, error: BaseException) -> None:
        """Records an item that was not computed, or whose result came too late for its caller."""
        self.count_dropped(error)
        if trace:
            span = self._queue_span(trace, arrived_ns, time.monotonic_ns())
            span.fail(error, span.ended_ns)
            self._tracer.record(span)

    def _queue_span(self, trace: SpanContext, began_ns: int, ended_ns: int) -> Span:
        return Span(Spans.QUEUE, trace.child(), trace, began_ns, ended_ns)
