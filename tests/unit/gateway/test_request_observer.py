"""gateway/request_observer.py: a request's timings, spans and metrics are the same numbers, whatever becomes of it."""

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from neuronpipe.api.v1.inference_pb2 import CacheOutcome, InferBatchRequest, InferRequest, InferResponse
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult, TextClassificationInput
from neuronpipe.core.callers import Caller
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import NeuronpipeError, Overloaded
from neuronpipe.core.items import EncodedInput, Prediction, Stages
from neuronpipe.core.names import ADMISSION, UNATTRIBUTED, Attributes, Events, Metrics, Spans
from neuronpipe.core.packed import NO_TENSORS, Packed, TensorSets, pack_result
from neuronpipe.core.tracing import SpanContext, Tracer, current_span
from neuronpipe.doors.native import NativeDoor
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.request_observer import RequestObserver, RequestTimings
from neuronpipe.gateway.settings import PipelineSettings
from tests.servers.door import Door, door_of, models_of
from tests.unit.every_error import EVERY_ERROR
from tests.unit.model_specs import model_spec
from tests.unit.recorded import Recorded

_STAGES = (Spans.PREPROCESS, Spans.PREDICT, Spans.POSTPROCESS)
_UNSAMPLED = SpanContext(0x4BF92F3577B34DA6A3CE929D0E0E4736, 0x00F067AA0BA902B7, is_sampled=False)
_SAMPLED = SpanContext(_UNSAMPLED.trace_id, _UNSAMPLED.span_id, is_sampled=True)


async def _tokenize(item: Any) -> EncodedInput:
    return EncodedInput(
        TensorSets(data=[b""]), tokens=7, truncated_tokens=3, token_cache=CacheOutcome.CACHE_OUTCOME_MISS
    )


async def _execute(item: Any) -> Prediction:
    return Prediction(NO_TENSORS, queue_ns=11, compute_ns=22, batch_size=4, bucket_tokens=8, padded_tokens=16)


async def _postprocess(item: Any) -> Packed[TaskResult]:
    return pack_result(TaskResult())


def _pipeline(telemetry: Recorded, failing: str = "", error: BaseException | None = None, **limits: Any) -> Door:
    async def fail(item: Any) -> Any:
        assert error
        raise error

    stages = dict(zip(_STAGES, (_tokenize, _execute, _postprocess), strict=True)) | ({failing: fail} if failing else {})
    return door_of([model_spec(version=1)], Stages(*stages.values()), PipelineSettings(**limits), telemetry)


def _watched(seen: list[SpanContext | None]) -> Stages:
    """The stages, which keep the trace of each item."""

    def watched(stage: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def watch(item: Any) -> Any:
            seen.append(item.work.trace)
            return await stage(item)

        return watch

    return Stages(watched(_tokenize), watched(_execute), watched(_postprocess))


def _request(**changes: Any) -> InferRequest:
    input = TaskInput(text_classification=TextClassificationInput(text="x"))
    return InferRequest(**{"model": "small", "input": input, **changes})


async def _infer(telemetry: Recorded, **changes: Any) -> InferResponse:
    return await _pipeline(telemetry).infer(_request(**changes), Call())


async def test_spans_and_timings_are_the_same_numbers() -> None:
    telemetry = Recorded()
    timings = (await _infer(telemetry)).timings
    durations = {span.name: span.ended_ns - span.started_ns for span in telemetry.spans}
    expected = (timings.total_ns, timings.preprocess_ns, timings.predict_ns, timings.postprocess_ns)
    assert tuple(durations[name] for name in (Spans.INFER, *_STAGES)) == expected
    unattributed_ns = timings.total_ns - timings.preprocess_ns - timings.predict_ns - timings.postprocess_ns
    assert telemetry.one(Spans.INFER).attributes[Attributes.UNATTRIBUTED_NS] == unattributed_ns


async def test_histograms_and_timings_are_the_same_numbers() -> None:
    telemetry = Recorded()
    timings = (await _infer(telemetry)).timings
    assert telemetry.meters.histogram(Metrics.REQUEST_DURATION, "small", "1", "OK").total == timings.total_ns
    totals = {
        part: telemetry.meters.histogram(Metrics.STAGE_DURATION, "small", "1", part).total
        for part in (*_STAGES, UNATTRIBUTED)
    }
    assert totals == {
        Spans.PREPROCESS: timings.preprocess_ns,
        Spans.PREDICT: timings.predict_ns,
        Spans.POSTPROCESS: timings.postprocess_ns,
        UNATTRIBUTED: timings.total_ns - timings.preprocess_ns - timings.predict_ns - timings.postprocess_ns,
    }
    assert telemetry.meters.histogram(Metrics.STAGE_DURATION, "small", "1", Spans.COMPUTE).total == 22


async def test_the_clock_is_read_once_between_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = itertools.count(1_000, 10)
    monkeypatch.setattr(time, "monotonic_ns", lambda: next(ticks))
    telemetry = Recorded()
    await _infer(telemetry)
    # Arrival, two borders between stages, the end of the last one, the end of the request.
    assert next(ticks) == 1_000 + 5 * 10
    edges = [(telemetry.one(name).started_ns, telemetry.one(name).ended_ns) for name in _STAGES]
    assert edges == [(1_000, 1_010), (1_010, 1_020), (1_020, 1_030)]


async def test_stages_get_the_context_of_their_own_span() -> None:
    seen, telemetry = list[SpanContext | None](), Recorded()
    pipeline = door_of([model_spec(version=1)], _watched(seen), PipelineSettings(), telemetry)
    await pipeline.infer(_request(), Call(trace=_SAMPLED))
    assert seen == [telemetry.one(name).context for name in _STAGES]
    root = telemetry.one(Spans.INFER)
    assert [telemetry.one(name).parent for name in _STAGES] == [root.context] * 3
    assert root.parent == _SAMPLED


async def test_an_unsampled_request_is_counted_and_leaves_no_span() -> None:
    telemetry = Recorded()
    await _pipeline(telemetry).infer(_request(), Call(trace=_UNSAMPLED))
    assert telemetry.spans == []
    assert telemetry.counts(Metrics.REQUEST_DURATION) == {("small", "1", "OK"): 1}


async def test_stages_record_nothing_of_requests_that_the_gateway_does_not_sample_whatever_callers_decide() -> None:
    seen, telemetry = list[SpanContext | None](), Recorded()
    telemetry.tracer = Tracer([telemetry.spans.append], ratio=0.0, honours_parent=False)  # always_off
    await door_of([model_spec()], _watched(seen), telemetry=telemetry).infer(_request(), Call(trace=_SAMPLED))
    assert seen == [_UNSAMPLED] * 3
    assert telemetry.spans == []


async def test_a_gateway_that_takes_no_part_in_tracing_hands_its_callers_trace_on() -> None:
    seen = list[SpanContext | None]()
    await door_of([model_spec()], _watched(seen)).infer(_request(), Call(trace=_SAMPLED))
    assert seen == [_SAMPLED] * 3


async def test_the_requests_of_a_batch_are_sampled_together_or_not_at_all() -> None:
    random.seed(5)
    sampled = []
    for _ in range(40):
        telemetry = Recorded(ratio=0.5)
        await _pipeline(telemetry).infer_batch(InferBatchRequest(requests=[_request()] * 4), Call())
        sampled.append((len(telemetry.named(Spans.INFER_BATCH)), len(telemetry.named(Spans.REQUEST))))
    assert set(sampled) == {(0, 0), (1, 4)}


async def test_no_request_of_an_unsampled_batch_is_sampled() -> None:
    telemetry = Recorded()
    await _pipeline(telemetry).infer_batch(InferBatchRequest(requests=[_request()] * 3), Call(trace=_UNSAMPLED))
    assert telemetry.spans == []


async def test_cache_outcomes_are_counted_and_shown() -> None:
    telemetry = Recorded()
    await _infer(telemetry)
    assert telemetry.counts(Metrics.TOKEN_CACHE) == {("small", "1", "miss"): 1}
    assert telemetry.one(Spans.PREPROCESS).attributes[Attributes.TOKEN_CACHE] == "miss"
    assert (telemetry.counts(Metrics.REQUEST_TOKENS), telemetry.counts(Metrics.REQUEST_TRUNCATED)) == (
        {("small", "1"): 7},
        {("small", "1"): 3},
    )


@pytest.mark.parametrize("stage", _STAGES)
@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_a_failure_shows_where_it_happened(stage: str, error: NeuronpipeError) -> None:
    telemetry = Recorded()
    with pytest.raises(type(error)):
        await _pipeline(telemetry, stage, error).infer(_request(), Call())
    failed = [span.name for span in telemetry.spans if Attributes.ERROR_TYPE in span.attributes]
    assert failed == [stage, Spans.INFER]
    before = _STAGES[: _STAGES.index(stage)]
    assert [span.name for span in telemetry.spans] == [*before, stage, Spans.INFER]
    status = str(telemetry.one(Spans.INFER).attributes[Attributes.RPC_STATUS])
    assert telemetry.counts(Metrics.REQUEST_DURATION) == {("small", "1", status): 1}


async def test_a_fault_is_shown_as_the_internal_error_that_callers_get() -> None:
    telemetry = Recorded()
    with pytest.raises(NeuronpipeError):
        await _pipeline(telemetry, Spans.PREDICT, ValueError("secret")).infer(_request(), Call())
    root = telemetry.one(Spans.INFER)
    assert root.is_error
    assert root.attributes[Attributes.ERROR_TYPE] == "INTERNAL"
    assert "secret" not in str(telemetry.spans)


async def test_a_request_that_is_refused_at_the_gate_is_shed_before_any_stage() -> None:
    telemetry, is_over = Recorded(), asyncio.Event()

    async def wait(item: Any) -> Any:
        await is_over.wait()
        return await _tokenize(item)

    stages = Stages(wait, _execute, _postprocess)
    pipeline = door_of([model_spec(version=1)], stages, PipelineSettings(max_requests_in_flight=1), telemetry)
    first = asyncio.create_task(pipeline.infer(_request(), Call()))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await pipeline.infer(_request(), Call())
    (shed,) = telemetry.spans
    assert [event.name for event in shed.events] == [Events.SHED]
    assert telemetry.counts(Metrics.SHED) == {("small", "1", ADMISSION): 1}
    is_over.set()
    await first


async def test_a_request_that_is_refused_before_it_is_read_is_counted_too() -> None:
    telemetry, began, is_over = Recorded(), asyncio.Event(), asyncio.Event()

    async def wait(item: Any) -> Any:
        began.set()
        await is_over.wait()
        return await _tokenize(item)

    models, settings = models_of([model_spec(version=1)], telemetry), PipelineSettings(max_requests_in_flight=1)
    pipeline = Pipeline(models, Stages(wait, _execute, _postprocess), settings, telemetry)
    door = Door(NativeDoor(pipeline, Catalog(models), settings))
    first = asyncio.create_task(door.infer(_request(), Call()))
    await began.wait()
    with pytest.raises(Overloaded):
        pipeline.check_room(None)
    assert telemetry.counts(Metrics.SHED)["", "", ADMISSION] == 1
    is_over.set()
    await first


async def test_a_caller_that_leaves_is_seen_and_is_no_error() -> None:
    telemetry, is_there = Recorded(), asyncio.Event()

    async def hang(item: Any) -> Any:
        is_there.set()
        await asyncio.Event().wait()

    pipeline = door_of([model_spec(version=1)], Stages(_tokenize, hang, _postprocess), PipelineSettings(), telemetry)
    task = asyncio.create_task(pipeline.infer(_request(), Call()))
    await is_there.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for name in (Spans.PREDICT, Spans.INFER):
        span = telemetry.one(name)
        assert [event.name for event in span.events] == [Events.CANCELLED]
        assert not span.is_error
    assert telemetry.counts(Metrics.CANCELLED) == {("small", "1", Spans.PREDICT): 1}


async def test_words_of_callers_do_not_become_labels() -> None:
    telemetry = Recorded()
    for model in ("one", "two"):
        with pytest.raises(NeuronpipeError):
            await _infer(telemetry, model=model)
    assert telemetry.counts(Metrics.REQUEST_DURATION) == {("", "", "NOT_FOUND"): 2}


async def test_after_a_request_the_task_is_in_no_span() -> None:
    await _infer(Recorded())
    assert current_span() is None


async def test_a_request_over_http_has_a_span_of_a_server_that_names_no_rpc() -> None:
    telemetry = Recorded()
    observer = RequestObserver(telemetry)
    with observer.together(Call(), Spans.HTTP_BATCH) as call:
        RequestTimings(observer, Spans.HTTP_REQUEST, call).finish()
    batch, request = telemetry.one(Spans.HTTP_BATCH), telemetry.one(Spans.HTTP_REQUEST)
    assert (batch.kind, request.kind, request.parent) == ("server", "server", batch.context)
    assert Attributes.RPC_METHOD not in batch.attributes | request.attributes


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    """The fields of the requests' lines in the log, which has them."""
    caplog.set_level(logging.INFO, "neuronpipe.requests")
    return lambda: [vars(record)["fields"] for record in caplog.records if record.message == "request"]


async def test_a_request_is_logged_with_the_duration_of_its_answer(logged: Callable[[], list[dict[str, Any]]]) -> None:
    pipeline = _pipeline(Recorded())
    answer = await pipeline.infer(_request(request_id="r-1"), Call(caller=Caller(tenant="acme")))
    [line] = logged()
    assert line.pop("duration_ms") == round(answer.timings.total_ns / 1e6, 3)
    model = {"model": "small", "version": 1, "task": "text_classification"}
    ids = {"call": str(Spans.INFER), "request_id": "r-1", "tenant": "acme"}
    assert line == {**ids, **model, "status": "OK", "tokens": 7}


async def test_failed_or_refused_requests_have_a_line_with_status(logged: Callable[[], list[dict[str, Any]]]) -> None:
    with pytest.raises(NeuronpipeError):
        await _pipeline(Recorded(), Spans.PREDICT, Overloaded("no room", 1)).infer(_request(request_id="r-2"), Call())
    RequestObserver(Recorded()).refused(Overloaded("no room", 1))
    assert [(line.get("request_id"), line["status"]) for line in logged()] == [
        ("r-2", "RESOURCE_EXHAUSTED"),
        (None, "RESOURCE_EXHAUSTED"),
    ]


async def test_without_being_asked_for_no_request_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "neuronpipe.requests")
    await _infer(Recorded())
    assert [record.message for record in caplog.records] == []
