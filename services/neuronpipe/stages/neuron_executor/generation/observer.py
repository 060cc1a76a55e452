"""Records metrics of a generating model's steps and texts, and spans for texts of sampled requests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.names import Attributes, Events, Metrics, Spans
from neuronpipe.core.tracing import AttributeValue, Link, Span, SpanContext, SpanEvent
from neuronpipe.stages.neuron_executor.batch_observer import ModelObserver
from neuronpipe.stages.neuron_executor.generation.sequence import GeneratedSequence
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderRun

# A text's span links to every 16th step, because a text may take thousands of steps.
_LINKED_STEPS = 16


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step with its rows and tokens.

    - `linked`: the sampled texts to which the span of the step has links, each with its row and its tokens.
    - `began_ns`, `ended_ns`: times of time.monotonic_ns().
    """

    began_ns: int
    rows: int
    tokens: int
    linked: list[tuple[GeneratedSequence, int, int]]
    ended_ns: int = 0

    @classmethod
    def of(cls, planned: Mapping[GeneratedSequence, list[DecoderRun]], began_ns: int) -> "StepRecord":
        """Makes the record of a step that begins."""
        rows = tokens = 0
        linked = []
        for sequence, runs in planned.items():
            computed = sum(len(run.token_ids) for run in runs)
            if sequence.record.trace and sequence.record.steps % _LINKED_STEPS == 0:
                linked.append((sequence, rows, computed))
            rows += len(runs)
            tokens += computed
        return cls(began_ns, rows, tokens, linked)

    def ended(self, ended_ns: int) -> "StepRecord":
        """Returns the record with the end of the step."""
        return replace(self, ended_ns=ended_ns)


class GenerationObserver(ModelObserver):
    """Records the steps and texts of one model."""

    gauges = (Metrics.STEP_SEQUENCES, Metrics.QUEUE_SEQUENCES, Metrics.BLOCKS_IN_USE)

    def __init__(self, telemetry: Telemetry, spec: ModelSpec, backend: str) -> None:
        super().__init__(telemetry, spec, backend)
        meters, labels = self._meters, self.labels
        self._first_tokens = meters.histogram(Metrics.TIME_TO_FIRST_TOKEN, *labels)
        self._gaps = meters.histogram(Metrics.INTER_TOKEN_LATENCY, *labels)
        self._prefills = meters.histogram(Metrics.PREFILL_DURATION, *labels)
        self._decodes = meters.histogram(Metrics.DECODE_DURATION, *labels)
        self._paces = meters.histogram(Metrics.TIME_PER_OUTPUT_TOKEN, *labels)
        self._longest_gaps = meters.histogram(Metrics.LONGEST_GAP, *labels)
        self._generated = meters.counter(Metrics.GENERATED, *labels)
        self._prompts = meters.counter(Metrics.PROMPT_TOKENS, *labels)
        self._cached = meters.counter(Metrics.CACHED_PROMPT_TOKENS, *labels)
        self._drafted = meters.counter(Metrics.DRAFT_TOKENS, *labels)
        self._accepted = meters.counter(Metrics.ACCEPTED_TOKENS, *labels)
        self._preemptions = meters.counter(Metrics.PREEMPTIONS, *labels)

    def watch(self, running: Callable[[], int], waiting: Callable[[], int], blocks: Callable[[], float]) -> None:
        """Adds gauges of the model's sequences and blocks."""
        for instrument, value in zip(self.gauges, (running, waiting, blocks), strict=True):
            self._meters.gauge(instrument, value, *self.labels)

    def step(self, record: StepRecord) -> None:
        """Records a step. The first step of a sampled text, and one step in _LINKED_STEPS, get a span."""
        context = None
        if record.linked:
            context = SpanContext.new(is_sampled=True)
            self._record_step(Span(Spans.BATCH, context, None, record.began_ns, record.ended_ns), record)
        self._sizes.record(record.rows, context)
        self._durations.record(record.ended_ns - record.began_ns, context)
        self._tokens.add(record.tokens)

    def tokens(self, count: int, gap_ns: int, *, is_first: bool) -> None:
        """Records tokens of a text that come together. `gap_ns`: time since the tokens before, or since arrival."""
        (self._first_tokens if is_first else self._gaps).record(gap_ns)
        self._generated.add(count)

    def finished(self, sequence: GeneratedSequence, trace: SpanContext | None) -> None:
        figures, later_tokens = sequence.record.figures, sequence.generated - 1
        self._prefills.record(figures.prefill_ns, trace)
        if later_tokens > 0:
            self._decodes.record(figures.decode_ns, trace)
            self._paces.record(figures.decode_ns / later_tokens, trace)
            self._longest_gaps.record(figures.longest_gap_ns, trace)
        self._prompts.add(sequence.input_tokens)
        self._cached.add(sequence.record.cached_tokens)
        self._count_work(sequence)
        if trace:
            self._record_spans(sequence, trace, None)

    def failed(self, sequence: GeneratedSequence, trace: SpanContext | None, error: BaseException) -> None:
        """Records a text that failed, or whose caller left."""
        self._count_work(sequence)
        self.count_dropped(error)
        if trace:
            self._record_spans(sequence, trace, error)

    def _count_work(self, sequence: GeneratedSequence) -> None:
        self._drafted.add(sequence.drafts.drafted)
        self._accepted.add(sequence.drafts.accepted)
        self._preemptions.add(len(sequence.record.preempted_ns))

    def _record_step(self, span: Span, record: StepRecord) -> None:
        """Records the span of a step. The step's span and the spans of its texts link to each other."""
        name, version = self.labels
        span.attributes |= {
            Attributes.MODEL: name,
            Attributes.VERSION: version,
            Attributes.BACKEND: self._backend,
            Attributes.BATCH_SIZE: record.rows,
            Attributes.TOKENS: record.tokens,
        }
        for sequence, row, computed in record.linked:
            assert sequence.record.trace  # noqa: S101 (it is linked)
            row_attributes: dict[str, AttributeValue] = {Attributes.ROW: row, Attributes.TOKENS: computed}
            span.links.append(Link(sequence.record.trace, row_attributes))
            sequence.record.links.append(Link(span.context, row_attributes))
        self._tracer.record(span)

    def _record_spans(self, sequence: GeneratedSequence, trace: SpanContext, error: BaseException | None) -> None:
        record = sequence.record
        begun_ns = record.started_ns  # read once, because a step of a text may begin after its caller has left
        ended_ns = record.last_token_ns or begun_ns or record.arrived_ns
        started_ns = begun_ns or ended_ns
        queue = Span(Spans.QUEUE, trace.child(), trace, record.arrived_ns, started_ns)
        spans = [queue]
        if begun_ns and record.trace:
            compute = Span(Spans.COMPUTE, record.trace, trace, started_ns, ended_ns)
            compute.links += record.links
            compute.attributes |= {
                Attributes.BACKEND: self._backend,
                Attributes.TOKENS: sequence.input_tokens,
                Attributes.GENERATED_TOKENS: sequence.generated,
                Attributes.CACHED_TOKENS: record.cached_tokens,
                Attributes.STEPS: record.steps,
                Attributes.PREEMPTIONS: len(record.preempted_ns),
            }
            if record.first_token_ns:
                compute.events.append(SpanEvent(Events.FIRST_TOKEN, record.first_token_ns))
            compute.events += [SpanEvent(Events.PREEMPTED, at_ns) for at_ns in record.preempted_ns]
            spans.append(compute)
        if error:
            spans[-1].fail(error, ended_ns)
        for span in spans:
            self._tracer.record(span)
