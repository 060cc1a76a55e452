"""observer.py: the spans of a sampled text have its first token, its preemptions, and links to some of its steps."""

import asyncio

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.names import Attributes, Events, Metrics, Spans
from neuronpipe.core.tracing import SpanContext
from neuronpipe.stages.neuron_executor.generation.logit_rules import LogitRules
from neuronpipe.stages.neuron_executor.generation.observer import GenerationObserver, StepRecord
from neuronpipe.stages.neuron_executor.generation.sampling import TokenChooser
from neuronpipe.stages.neuron_executor.generation.sequence import GeneratedSequence, Rank, SequenceCaller, TextRow
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderRun
from tests.unit.model_specs import model_spec
from tests.unit.recorded import Recorded

_SPEC = model_spec("text_generation", max_tokens=64, vocabulary_size=64)
_STEPS = 33


def _sequence(trace: SpanContext | None) -> GeneratedSequence:
    options = GenerationOptions(max_new_tokens=_STEPS)
    chooser, future = TokenChooser(LogitRules(options, 3, ())), asyncio.get_running_loop().create_future()
    sequence = GeneratedSequence(
        Rank(False, False, 0), [TextRow([1, 2, 3])], options, chooser, frozenset(), SequenceCaller(future)
    )
    sequence.record.trace = trace.child() if trace else None
    return sequence


def _run_steps(observer: GenerationObserver, sequences: list[GeneratedSequence]) -> None:
    """Every sequence gets a token in every step; the first step has the prompts."""
    for step in range(_STEPS):
        tokens = [1] if step else [1, 2, 3]
        planned = {sequence: [DecoderRun(tokens, 0, [0], 1)] for sequence in sequences}
        observer.step(StepRecord.of(planned, 1_000 * step).ended(1_000 * step + 500))
        for one in sequences:
            one.record.started_ns = one.record.started_ns or one.record.arrived_ns
            one.record.steps += 1
            one.token_ids.append(7)
            one.record.note_token(one.record.arrived_ns + 1_000 * (step + 1))


async def test_a_sampled_text_links_to_its_first_step_and_to_every_16th_and_these_link_back() -> None:
    telemetry, trace = Recorded(), SpanContext.new(is_sampled=True)
    observer = GenerationObserver(telemetry, _SPEC, "fake")
    text, other = _sequence(trace), _sequence(None)
    _run_steps(observer, [other, text])
    observer.finished(text, trace)

    compute, steps = telemetry.one(Spans.COMPUTE), telemetry.named(Spans.BATCH)
    assert compute.parent == trace
    assert [link.context for link in compute.links] == [step.context for step in steps]
    assert [step.started_ns for step in steps] == [0, 16_000, 32_000]
    assert [step.attributes[Attributes.TOKENS] for step in steps] == [6, 2, 2]
    for step in steps:
        assert step.attributes[Attributes.BATCH_SIZE] == 2
        (link,) = step.links
        assert (link.context, link.attributes[Attributes.ROW]) == (compute.context, 1)
    assert telemetry.counts(Metrics.BATCH_DURATION)[(_SPEC.name, "1", "fake")] == _STEPS


async def test_steps_of_texts_that_are_not_sampled_have_no_spans() -> None:
    telemetry = Recorded()
    observer, text = GenerationObserver(telemetry, _SPEC, "fake"), _sequence(None)
    _run_steps(observer, [text])
    observer.finished(text, None)
    assert telemetry.spans == []


async def test_preemptions_are_events_and_are_counted() -> None:
    telemetry, trace = Recorded(), SpanContext.new(is_sampled=True)
    observer, text = GenerationObserver(telemetry, _SPEC, "fake"), _sequence(trace)
    _run_steps(observer, [text])
    text.record.preempted_ns = [text.record.arrived_ns + 10, text.record.arrived_ns + 20]
    observer.finished(text, trace)

    compute = telemetry.one(Spans.COMPUTE)
    events = [(event.name, event.at_ns - text.record.arrived_ns) for event in compute.events]
    assert events == [(Events.FIRST_TOKEN, 1_000), (Events.PREEMPTED, 10), (Events.PREEMPTED, 20)]
    assert compute.attributes[Attributes.PREEMPTIONS] == 2
    assert sum(telemetry.counts(Metrics.PREEMPTIONS).values()) == 2


async def test_a_complete_text_has_its_prefill_its_decode_and_its_time_per_output_token() -> None:
    telemetry = Recorded()
    observer, text = GenerationObserver(telemetry, _SPEC, "fake"), _sequence(None)
    # The prompt's step begins after 200 ns, tokens come after 1,000, 1,300 and 2,000 ns.
    text.record.started_ns = text.record.arrived_ns + 200
    for at_ns in (1_000, 1_300, 2_000):
        text.token_ids.append(7)
        text.record.note_token(text.record.arrived_ns + at_ns)
    observer.finished(text, None)

    sums = {
        Metrics.PREFILL_DURATION: 800,  # 1,000 - 200
        Metrics.DECODE_DURATION: 1_000,  # 2,000 - 1,000
        Metrics.TIME_PER_OUTPUT_TOKEN: 500,  # 1,000 by two tokens
        Metrics.LONGEST_GAP: 700,  # 2,000 - 1,300
    }
    assert {one: telemetry.meters.histogram(one, _SPEC.name, "1").total for one in sums} == sums


async def test_a_text_of_one_token_has_no_time_per_output_token() -> None:
    telemetry = Recorded()
    observer, text = GenerationObserver(telemetry, _SPEC, "fake"), _sequence(None)
    text.record.started_ns = text.record.arrived_ns
    text.token_ids.append(7)
    text.record.note_token(text.record.arrived_ns + 1_000)
    observer.finished(text, None)
    assert telemetry.counts(Metrics.PREFILL_DURATION)[_SPEC.name, "1"] == 1
    assert not sum(telemetry.counts(Metrics.TIME_PER_OUTPUT_TOKEN).values())
    assert not sum(telemetry.counts(Metrics.DECODE_DURATION).values())
