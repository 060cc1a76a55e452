"""gateway/pipeline.py: what travels to the stages, whose error a caller gets, and what is admitted at all.

The stages are written by hand. By default they carry the input's text through to the result, so that requests mixed up
show.
"""

import asyncio
import gc
import time
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.inference_pb2 import (
    CacheOutcome,
    InferBatchRequest,
    InferRequest,
    InferStreamRequest,
    InferStreamResponse,
    Priority,
)
from neuronpipe.api.v1.tasks_pb2 import LabelScore, TaskInput, TaskResult
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    ModelNotFound,
    NeuronpipeError,
    Overloaded,
    Unavailable,
    WrongTask,
)
from neuronpipe.core.items import (
    EncodedInput,
    Execute,
    ExecuteItem,
    ModelKey,
    Postprocess,
    PostprocessItem,
    Prediction,
    Stages,
    Tokenize,
    TokenizeItem,
)
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import NO_TENSORS, Packed, TensorSets, pack_result
from neuronpipe.core.status import from_status
from neuronpipe.core.tracing import SpanContext
from neuronpipe.doors.native import NativeDoor
from neuronpipe.gateway.catalog import Catalog
from neuronpipe.gateway.coalescing import Coalescer
from neuronpipe.gateway.held_items import HeldItems
from neuronpipe.gateway.loads import ModelLoad
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.gateway.settings import PipelineSettings
from tests.servers.door import Door, door_of, models_of
from tests.suite.constants import with_constants
from tests.suite.waiting import cancelled, settled
from tests.unit.every_error import EVERY_ERROR
from tests.unit.gateway.coalescer import Wire
from tests.unit.model_specs import image_spec, model_spec
from tests.unit.task_messages import task_input, task_result

STAGES = ("tokenize", "execute", "postprocess")


async def _tokenize(item: TokenizeItem) -> EncodedInput:
    text = np.frombuffer(item.input.message.text_classification.text.encode(), np.uint8)
    return EncodedInput(
        sequences=TensorSets(arrays=[{"text": text}]),
        annotations=TensorSets(arrays=[{"note": text}]),
        tokens=7,
        truncated_tokens=3,
        token_cache=CacheOutcome.CACHE_OUTCOME_MISS,
    )


async def _execute(item: ExecuteItem) -> Prediction:
    return Prediction(
        outputs=item.sequences, queue_ns=11, compute_ns=22, batch_size=4, bucket_tokens=8, padded_tokens=16
    )


async def _postprocess(item: PostprocessItem) -> Packed[TaskResult]:
    arrays = [array for by_name in (*item.annotations.arrays, *item.outputs.arrays) for array in by_name.values()]
    seen = [item.input.message.text_classification.text, *(array.tobytes().decode() for array in arrays)]
    label = LabelScore(label=" ".join(seen), score=1)
    return pack_result(task_result(text_classification={"labels": [label]}))


def _pipeline(
    *,
    tokenize: Tokenize = _tokenize,
    execute: Execute = _execute,
    postprocess: Postprocess = _postprocess,
    **limits: Any,
) -> Door:
    models = [model_spec(version=version) for version in (1, 2)]
    return door_of(models, Stages(tokenize, execute, postprocess), with_constants(PipelineSettings, **limits))


def _watched(note: Callable[[Any], None]) -> dict[str, Any]:
    """The stages, each of which notes its item first."""

    def watched(stage: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def watching(item: Any) -> Any:
            note(item)
            return await stage(item)

        return watching

    return {"tokenize": watched(_tokenize), "execute": watched(_execute), "postprocess": watched(_postprocess)}


def _request(text: str = "hello", **changes: Any) -> InferRequest:
    described: dict[str, Any] = {"model": "small", "input": task_input(text_classification={"text": text})}
    return InferRequest(**described | changes)


async def test_an_input_goes_through_all_stages_to_its_result() -> None:
    response = await _pipeline().infer(_request("so"), Call())
    # What the postprocessor saw: the input, the annotations and the outputs.
    assert [label.label for label in response.result.text_classification.labels] == ["so so so"]


async def test_what_the_tokenizer_answers_alone_is_not_predicted() -> None:
    async def tokenize(item: TokenizeItem) -> EncodedInput:
        return EncodedInput(NO_TENSORS, TensorSets(arrays=[{"result": np.zeros(1, np.uint8)}]))

    async def execute(item: ExecuteItem) -> Prediction:
        raise AssertionError("called")

    async def postprocess(item: PostprocessItem) -> Packed[TaskResult]:
        assert len(item.outputs) == 0
        return pack_result(task_result(tokenization={"tokens": [{"text": "a"}]}))

    pipeline = _pipeline(tokenize=tokenize, execute=execute, postprocess=postprocess)
    request = _request(input=task_input(tokenization={"text": "a"}))
    response = await pipeline.infer(request, Call())
    assert [token.text for token in response.result.tokenization.tokens] == ["a"]
    assert (response.usage.tokens, response.usage.batch_size, response.timings.predict_compute_ns) == (0, 0, 0)


async def test_a_model_of_images_has_no_tokenizer() -> None:
    stages = Stages(_tokenize, _execute, _postprocess)
    door = door_of([image_spec()], stages)
    with pytest.raises(WrongTask, match=", not tokenization"):
        await door.infer(_request(input=task_input(tokenization={"text": "a"})), Call())


async def test_the_version_asked_for_runs() -> None:
    assert (await _pipeline().infer(_request(version="1"), Call())).version == "1"


async def test_usage_is_what_the_stages_counted() -> None:
    usage = (await _pipeline().infer(_request(), Call())).usage
    assert (usage.tokens, usage.truncated_tokens, usage.token_cache) == (7, 3, CacheOutcome.CACHE_OUTCOME_MISS)
    assert (usage.batch_size, usage.bucket_tokens, usage.padded_tokens) == (4, 8, 16)


async def test_an_image_has_a_limit_of_its_own() -> None:
    stages = Stages(_tokenize, _execute, _postprocess)
    # The image of 100 bytes, top_k in 2, and 2 for each of the image's and the message's tag and length.
    request = _request(input=task_input(image_classification={"image": bytes(100), "top_k": 2}))
    door, strict = (
        door_of([image_spec()], stages, PipelineSettings(max_input_bytes=1, max_image_bytes=limit))
        for limit in (106, 105)
    )
    assert (await door.infer(request, Call())).version == "1"
    with pytest.raises(InvalidInput, match=r"^input: 106 bytes, the limit is 105 \(the gateway's max_image_bytes\)$"):
        await strict.infer(request, Call())


async def test_every_stage_gets_the_model_the_version_and_the_items_context() -> None:
    seen = list[Any]()
    trace = SpanContext(0xAA, 0xBB, True, "v=1")
    call = Call(deadline_s=time.monotonic() + 60, trace=trace)
    await _pipeline(**_watched(seen.append)).infer(_request(request_id="mine"), call)
    assert [item.model for item in seen] == [("small", 2)] * 3
    contexts = [(item.call.request_id, item.work.trace, item.call.deadline_s) for item in seen]
    assert contexts == [("mine", trace, call.deadline_s)] * 3


async def test_timings_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 1_000

    def taking(duration_ns: int, stage: Callable[[Any], Any]) -> Callable[[Any], Any]:
        async def slow(item: Any) -> Any:
            nonlocal now_ns
            now_ns += duration_ns
            return await stage(item)

        return slow

    monkeypatch.setattr(time, "monotonic_ns", lambda: now_ns)
    pipeline = _pipeline(
        tokenize=taking(10, _tokenize), execute=taking(200, _execute), postprocess=taking(3_000, _postprocess)
    )
    timings = (await pipeline.infer(_request(), Call())).timings
    assert (timings.preprocess_ns, timings.predict_ns, timings.postprocess_ns) == (10, 200, 3_000)
    assert timings.total_ns == 3_210


async def test_queue_and_compute_times_are_the_executors_own() -> None:
    timings = (await _pipeline().infer(_request(), Call())).timings
    assert (timings.predict_queue_ns, timings.predict_compute_ns) == (11, 22)


def _raising(fault: Exception) -> Callable[[Any], Any]:
    async def raising(item: Any) -> Any:
        raise fault

    return raising


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_a_stages_error_is_the_callers(stage: str, error: NeuronpipeError) -> None:
    pipeline = _pipeline(**{stage: _raising(error)})
    with pytest.raises(type(error)) as caught:
        await pipeline.infer(_request(), Call())
    assert vars(caught.value) == vars(error)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "fault", [RuntimeError("the secret"), TimeoutError("the secret"), OSError("the secret")], ids=repr
)
async def test_a_fault_is_internal_with_the_request_id_and_nothing_of_its_text(stage: str, fault: Exception) -> None:
    with pytest.raises(InternalError) as caught:
        await _pipeline(**{stage: _raising(fault)}).infer(_request(request_id="mine"), Call())
    assert "mine" in caught.value.message
    assert "secret" not in caught.value.message


async def test_after_a_stage_failed_the_next_is_not_called() -> None:
    called = list[object]()
    stages = _watched(called.append) | {"tokenize": _raising(InvalidInput("text", "is empty"))}
    with pytest.raises(InvalidInput):
        await _pipeline(**stages).infer(_request(), Call())
    assert called == []


@pytest.mark.parametrize(
    ("changes", "kind", "expected"),
    [
        ({"model": ""}, InvalidInput, "model: is empty"),
        ({"model": "big"}, ModelNotFound, "model 'big' is not served; the served models are: small"),
        ({"version": "3"}, ModelNotFound, "model 'small' has no version 3; it has: 1, 2"),
        ({"version": "new"}, InvalidInput, "version: 'new' is not a whole number"),
        ({"input": TaskInput()}, InvalidInput, "input: holds no task; model 'small' takes text_classification"),
        (
            {"input": task_input(question_answering={})},
            WrongTask,
            "model 'small' supports text-classification, not question-answering",
        ),
        ({"request_id": "x" * 257}, InvalidInput, "request_id: 257 characters, the limit is 256"),
    ],
    ids=lambda value: "" if isinstance(value, str | type) else str(value)[:40],
)
async def test_a_request_that_no_stage_could_answer_reaches_none(
    changes: dict[str, Any], kind: type[NeuronpipeError], expected: str
) -> None:
    with pytest.raises(kind) as caught:
        await _pipeline(tokenize=_raising(AssertionError("called"))).infer(_request(**changes), Call())
    assert caught.value.message == expected


async def test_a_model_answers_its_own_task_and_those_that_its_graph_serves_besides() -> None:
    ranker = model_spec("rerank", also_answers=("text_classification",))
    pipeline = door_of([ranker], Stages(_tokenize, _execute, _postprocess))
    for input in (task_input(rerank={}), task_input(text_classification={})):
        assert (await pipeline.infer(_request(input=input), Call())).version == "1"
    with pytest.raises(WrongTask) as caught:
        await pipeline.infer(_request(input=task_input(question_answering={})), Call())
    assert caught.value.message == "model 'small' supports rerank and text-classification, not question-answering"


async def test_an_input_larger_than_the_limit_is_refused_with_both_sizes() -> None:
    # A text of 100 bytes: tag and length before it, and the same around the message: 2 + 100 + 2.
    request = _request("x" * 100)
    assert (await _pipeline(max_input_bytes=104).infer(request, Call())).version == "2"
    with pytest.raises(InvalidInput, match=r"^input: 104 bytes, the limit is 103 \(the gateway's max_input_bytes\)$"):
        await _pipeline(max_input_bytes=103).infer(request, Call())


class _Gate:
    """A tokenize stage that lets nobody through until it is opened."""

    def __init__(self) -> None:
        self.entered = 0
        self.left = 0
        self.opened = asyncio.Event()

    async def tokenize(self, item: TokenizeItem) -> EncodedInput:
        self.entered += 1
        try:
            await self.opened.wait()
        finally:
            self.left += 1
        return await _tokenize(item)


async def test_a_request_beyond_the_limit_is_refused_at_once() -> None:
    gate = _Gate()
    pipeline = _pipeline(tokenize=gate.tokenize, max_requests_in_flight=2)
    admitted = [asyncio.create_task(pipeline.infer(_request(), Call())) for _ in range(2)]
    await settled()
    with pytest.raises(
        Overloaded, match=r"^2 requests in flight, the limit is 2 \(the gateway's max_requests_in_flight\)$"
    ):
        await pipeline.infer(_request(), Call())
    gate.opened.set()
    await asyncio.gather(*admitted)


async def test_a_request_beyond_the_limit_of_tokens_is_refused_at_once() -> None:
    gate = _Gate()
    pipeline = _pipeline(tokenize=gate.tokenize, max_tokens_in_flight=3)
    # Nine bytes with what protobuf puts around the text: two tokens, until they are counted.
    admitted = asyncio.create_task(pipeline.infer(_request(), Call()))
    await settled()
    with pytest.raises(Overloaded):
        await pipeline.infer(_request(), Call())
    gate.opened.set()
    await admitted


async def test_bulk_work_makes_room_for_an_interactive_request_and_is_told_to_come_again() -> None:
    gate = _Gate()
    pipeline = _pipeline(tokenize=gate.tokenize, max_requests_in_flight=2)
    bulk = asyncio.create_task(pipeline.infer(_request(priority=Priority.PRIORITY_BULK), Call()))
    await settled()
    interactive = [asyncio.create_task(pipeline.infer(_request(), Call())) for _ in range(2)]
    with pytest.raises(Overloaded):
        await bulk
    gate.opened.set()
    assert len(await asyncio.gather(*interactive)) == 2


async def test_a_requests_priority_travels_to_every_stage() -> None:
    seen: list[int] = []
    pipeline = _pipeline(**_watched(lambda item: seen.append(item.call.priority)))
    await pipeline.infer(_request(priority=Priority.PRIORITY_BULK), Call())
    assert seen == [Priority.PRIORITY_BULK] * 3


async def test_a_priority_that_does_not_exist_is_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"^priority: 9 is none of PRIORITY_UNSPECIFIED, PRIORITY_INTERACTIVE, PRIORITY_BULK$"
    ):
        await _pipeline().infer(_request(priority=9), Call())


@pytest.mark.parametrize("ending", ["answered", "failed", "cancelled", "refused for its input"])
async def test_a_request_that_ended_makes_room(ending: str) -> None:
    gate = _Gate()
    execute = _raising(Unavailable("down")) if ending == "failed" else _execute
    pipeline = _pipeline(tokenize=gate.tokenize, execute=execute, max_requests_in_flight=1)
    request = _request(model="none") if ending == "refused for its input" else _request()
    first = asyncio.create_task(pipeline.infer(request, Call()))
    await settled()
    if ending == "cancelled":
        first.cancel()
    gate.opened.set()
    await asyncio.wait([first])
    outcome = (await asyncio.gather(pipeline.infer(_request(), Call()), return_exceptions=True))[0]
    assert not isinstance(outcome, Overloaded)


async def test_who_is_refused_is_told_to_wait_for_as_long_as_a_request_takes() -> None:
    gate = _Gate()
    pipeline = _pipeline(tokenize=gate.tokenize, max_requests_in_flight=1)
    first = asyncio.create_task(pipeline.infer(_request(), Call()))
    await settled()
    gate.opened.set()
    await first
    gate.opened.clear()
    second = asyncio.create_task(pipeline.infer(_request(), Call()))
    await settled()
    with pytest.raises(Overloaded) as caught:
        await pipeline.infer(_request(), Call())
    assert caught.value.retry_after_s > 0
    second.cancel()


async def test_a_stage_that_takes_longer_than_the_deadline_is_left() -> None:
    gate = _Gate()
    with pytest.raises(DeadlineExceeded):
        await _pipeline(tokenize=gate.tokenize).infer(_request(), Call(deadline_s=time.monotonic() + 0.02))
    assert (gate.entered, gate.left) == (1, 1)


async def test_a_request_without_a_deadline_gets_the_gateways_and_leaves_its_place_free() -> None:
    gate = _Gate()
    pipeline = _pipeline(tokenize=gate.tokenize, max_requests_in_flight=1, max_request_s=0.02)
    with pytest.raises(
        DeadlineExceeded, match=r"^the result was not ready after 0\.02 s, the gateway's max_request_s$"
    ):
        await pipeline.infer(_request(), Call())
    gate.opened.set()
    await pipeline.infer(_request(), Call())


async def test_a_deadline_that_the_event_loop_finds_early_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    async def tokenize(item: TokenizeItem) -> EncodedInput:
        # As uvloop's clock, which stands still while the loop is at work and then jumps.
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: time.monotonic() + 0.05)
        await asyncio.sleep(60)
        raise AssertionError("not left")

    with pytest.raises(DeadlineExceeded, match=r"^the deadline passed before the result was ready$"):
        await _pipeline(tokenize=tokenize).infer(_request(), Call(deadline_s=time.monotonic() + 0.06))


async def test_a_deadline_beyond_the_gateways_longest_is_cut_to_it() -> None:
    seen: list[float] = []
    pipeline = _pipeline(**_watched(lambda item: seen.append(item.call.remaining_s)), max_request_s=5)
    await pipeline.infer(_request(), Call(deadline_s=time.monotonic() + 1000))
    assert [0 < remaining_s <= 5 for remaining_s in seen] == [True] * 3


async def test_an_input_of_more_tokens_than_the_limit_is_refused_before_it_is_run() -> None:
    # Seven tokens, as the tokenizer counts them.
    assert (await _pipeline(max_request_tokens=7).infer(_request(), Call())).version == "2"
    with pytest.raises(InvalidInput, match=r"^input: 7 tokens in 1 sequences, the limit is 6; send less at once$"):
        await _pipeline(max_request_tokens=6, execute=_raising(AssertionError("called"))).infer(_request(), Call())


async def test_what_an_item_costs_is_estimated_for_the_tokenizer_and_counted_for_the_others() -> None:
    seen: list[int] = []
    # An input of nine bytes, at a quarter of a token a byte.
    await _pipeline(**_watched(lambda item: seen.append(item.work.cost_tokens))).infer(_request(), Call())
    assert seen == [2, 7, 7]


async def test_past_the_deadline_no_stage_is_called() -> None:
    with pytest.raises(DeadlineExceeded):
        await _pipeline(tokenize=_raising(AssertionError("called"))).infer(
            _request(), Call(deadline_s=time.monotonic() - 1)
        )


async def test_a_deadline_that_passes_between_two_stages_spares_the_next() -> None:
    deadline_s = time.monotonic() + 0.02

    async def tokenize(item: TokenizeItem) -> EncodedInput:
        while time.monotonic() < deadline_s:  # as long as it takes, without giving the event loop a chance to step in
            pass
        return await _tokenize(item)

    with pytest.raises(DeadlineExceeded, match=r"^the deadline passed before the result was ready$"):
        await _pipeline(tokenize=tokenize, execute=_raising(AssertionError("called"))).infer(
            _request(), Call(deadline_s=deadline_s)
        )


async def test_a_caller_who_leaves_cancels_the_stage() -> None:
    gate = _Gate()
    task = asyncio.create_task(_pipeline(tokenize=gate.tokenize).infer(_request(), Call()))
    await settled()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (gate.entered, gate.left) == (1, 1)


_MANY: dict[str, Callable[[Door, Call], Coroutine[Any, Any, object]]] = {
    "one": lambda door, call: door.infer(_request(), call),
    "a batch": lambda door, call: door.infer_batch(InferBatchRequest(requests=[_request()] * 3), call),
    "a stream": lambda door, call: _all(door.infer_stream(_stream("a", "b"), call)),
}


@pytest.mark.parametrize("infer", _MANY.values(), ids=_MANY)
async def test_a_call_that_is_cancelled_leaves_nothing_to_the_garbage_collector(
    infer: Callable[[Door, Call], Coroutine[Any, Any, object]],
) -> None:
    kept: list[weakref.ref[object]] = []

    async def execute(_: ExecuteItem) -> Prediction:
        of_this_frame = _Gate()
        kept.append(weakref.ref(of_this_frame))
        await asyncio.sleep(60)
        raise AssertionError("answered")

    door = _pipeline(execute=execute)
    gc.disable()
    try:
        task = asyncio.create_task(infer(door, Call(deadline_s=time.monotonic() + 60)))
        await settled()
        task.cancel()
        await asyncio.wait([task])
        del task
        assert kept
        assert not any(reference() for reference in kept)
    finally:
        gc.enable()


async def _last_comes_first(item: TokenizeItem, others: asyncio.Event) -> EncodedInput:
    if item.input.message.text_classification.text == "last":
        others.set()
    await others.wait()
    return await _tokenize(item)


async def test_outcomes_of_a_batch_come_in_the_order_of_its_requests() -> None:
    others = asyncio.Event()
    pipeline = _pipeline(tokenize=lambda item: _last_comes_first(item, others))
    requests = [_request(text, request_id=text) for text in ("first", "middle", "last")]
    outcomes = (await pipeline.infer_batch(InferBatchRequest(requests=requests), Call())).outcomes
    assert [outcome.response.request_id for outcome in outcomes] == ["first", "middle", "last"]


_BAD: dict[str, InferRequest] = {
    "of no task": _request(input=TaskInput()),
    "for no model": _request(model="none"),
    "that a stage refuses": _request("refuse"),
    "that finds a fault": _request("fault"),
    "with a version of thousands of digits": _request(version="9" * 5000),
}


async def _picky(item: TokenizeItem) -> EncodedInput:
    text = item.input.message.text_classification.text
    if text == "fault":
        raise RuntimeError("boom")
    if text == "refuse":
        raise InvalidInput("text", "refused")
    return await _tokenize(item)


@pytest.mark.parametrize("bad", _BAD.values(), ids=_BAD)
async def test_a_bad_request_leaves_the_others_of_its_batch_alone(bad: InferRequest) -> None:
    requests = [_request("good"), bad, _request("better")]
    outcomes = (await _pipeline(tokenize=_picky).infer_batch(InferBatchRequest(requests=requests), Call())).outcomes
    assert [outcome.WhichOneof("outcome") for outcome in outcomes] == ["response", "error", "response"]


async def test_a_batch_of_no_requests_or_too_many_is_refused_with_the_limit() -> None:
    pipeline = _pipeline(max_batch_items=3)
    for count in (0, 4):
        with pytest.raises(InvalidInput, match=rf"^requests: {count} requests, a batch takes 1 to 3$"):
            await pipeline.infer_batch(InferBatchRequest(requests=[_request()] * count), Call())
    assert len((await pipeline.infer_batch(InferBatchRequest(requests=[_request()] * 3), Call())).outcomes) == 3


class _Requests:
    """The requests of a stream, which counts how many were taken from it."""

    def __init__(self, requests: Iterator[InferRequest]) -> None:
        self._requests = requests
        self.taken = 0

    def __aiter__(self) -> AsyncIterator[InferStreamRequest]:
        return self

    async def __anext__(self) -> InferStreamRequest:
        request = next(self._requests, None)
        if request is None:
            raise StopAsyncIteration
        self.taken += 1
        return InferStreamRequest(request=request)


def _stream(*texts: str) -> _Requests:
    return _Requests(_request(text, request_id=text) for text in texts)


def _endless() -> _Requests:
    return _Requests(_request(request_id="same") for _ in iter(int, 1))


async def _all(answers: AsyncIterator[InferStreamResponse]) -> list[InferStreamResponse]:
    return [answer async for answer in answers]


async def test_results_that_are_too_large_for_one_response_are_errors_and_leave_the_others_alone() -> None:
    requests = [_request(text) for text in ("a", "b" * 600, "c")]
    outcomes = (
        await _pipeline(max_batch_response_bytes=1024).infer_batch(InferBatchRequest(requests=requests), Call())
    ).outcomes
    # The label repeats the text three times.
    assert [outcome.WhichOneof("outcome") for outcome in outcomes] == ["response", "error", "response"]
    error = from_status(outcomes[1].error)
    assert isinstance(error, InvalidInput)
    assert error.message.startswith("requests: the results are too large for one response, the limit is 1024 bytes;")


async def test_a_stream_answers_what_is_ready_first() -> None:
    others = asyncio.Event()
    pipeline = _pipeline(tokenize=lambda item: _last_comes_first(item, others))
    answers = pipeline.infer_stream(_stream("first", "last"), Call())
    assert {answer.request_id for answer in await _all(answers)} == {"first", "last"}


async def test_a_stream_without_requests_ends() -> None:
    assert await _all(_pipeline().infer_stream(_stream(), Call())) == []


@pytest.mark.parametrize("bad", _BAD.values(), ids=_BAD)
async def test_a_bad_request_leaves_the_others_of_its_stream_alone(bad: InferRequest) -> None:
    named = InferRequest()
    named.CopyFrom(bad)
    named.request_id = "bad"
    requests = _Requests(iter([_request("good", request_id="good"), named, _request("better", request_id="better")]))
    answers = await _all(_pipeline(tokenize=_picky).infer_stream(requests, Call()))
    outcomes = {answer.request_id: answer.outcome.WhichOneof("outcome") for answer in answers}
    assert outcomes == {"good": "response", "bad": "error", "better": "response"}


async def test_a_request_of_a_stream_needs_an_id() -> None:
    requests = _Requests(iter([_request(), _request(request_id="named")]))
    answers = {answer.request_id: answer.outcome for answer in await _all(_pipeline().infer_stream(requests, Call()))}
    assert from_status(answers[""].error).message == "request_id: is required on a stream"
    assert answers["named"].HasField("response")


async def test_a_stream_reads_ahead_no_further_than_its_limit() -> None:
    gate, requests = _Gate(), _endless()
    pipeline = _pipeline(tokenize=gate.tokenize, max_stream_in_flight=3)
    answers = pipeline.infer_stream(requests, Call())
    reading = asyncio.ensure_future(anext(answers))
    await settled()
    # Three are worked on; a fourth is in hand, waiting for a place.
    assert (gate.entered, requests.taken) == (3, 4)
    await cancelled(reading)


async def test_a_caller_who_stops_reading_stops_the_stream() -> None:
    requests = _endless()
    answers = _pipeline(max_stream_in_flight=3).infer_stream(requests, Call())
    await anext(answers)
    await settled()
    # Three answers lie ready, of which the caller has one in hand; a fourth request waits for a place.
    assert requests.taken == 4
    await answers.aclose()  # type: ignore[attr-defined]


async def test_a_caller_who_reads_on_gets_the_stream_going_again() -> None:
    requests = _endless()
    answers = _pipeline(max_stream_in_flight=3).infer_stream(requests, Call())
    for _ in range(20):
        await anext(answers)
    assert requests.taken >= 20
    await answers.aclose()  # type: ignore[attr-defined]


async def test_a_caller_who_leaves_a_stream_cancels_its_stages() -> None:
    gate = _Gate()
    reading = asyncio.create_task(_all(_pipeline(tokenize=gate.tokenize).infer_stream(_stream("a", "b"), Call())))
    await settled()
    assert gate.entered == 2
    await cancelled(reading)
    assert gate.left == 2


async def test_a_message_that_cannot_be_read_ends_the_stream_with_its_error() -> None:
    async def requests() -> AsyncIterator[InferStreamRequest]:
        yield InferStreamRequest(request=_request(request_id="a"))
        raise InvalidInput("request", "is broken")

    with pytest.raises(InvalidInput, match="is broken"):
        await _all(_pipeline().infer_stream(requests(), Call()))


async def test_past_the_deadline_a_streams_requests_are_told_so() -> None:
    gate = _Gate()
    pipeline = _pipeline(tokenize=gate.tokenize)
    (answer,) = await _all(pipeline.infer_stream(_stream("a"), Call(deadline_s=time.monotonic() + 0.02)))
    assert isinstance(from_status(answer.outcome.error), DeadlineExceeded)


async def test_the_time_in_which_a_request_was_held_is_not_expected_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    held_items, learned = HeldItems(1, 1), list[float]()
    monkeypatch.setattr(ModelLoad, "note_answer", lambda self, tenant_load, seconds: learned.append(seconds))

    async def execute(item: ExecuteItem) -> Prediction:
        held = held_items.hold("neuron-executor", 0, held_time=item.work.held)
        held.began_ns -= 60 * 10**9  # of which admission control knows nothing: it takes them off
        held_items.release(held, is_sent=True)
        return await _execute(item)

    models, settings = models_of([model_spec()], Telemetry()), PipelineSettings()
    pipeline = Pipeline(models, Stages(_tokenize, execute, _postprocess), settings, held_items=held_items)
    await Door(NativeDoor(pipeline, Catalog(models), settings)).infer(_request(), Call())
    assert learned == [pytest.approx(-60, abs=5)]


@pytest.mark.parametrize("is_there_at_first", [True, False])
async def test_deadlines_that_pass_while_requests_are_held_are_no_overload(is_there_at_first: bool) -> None:
    """Whether the only process has gone while they waited for it, or was never there."""

    async def report(is_reached: bool) -> None:
        """Nobody asks."""

    held_items, wire = HeldItems(100, 1 << 20), Wire(frozenset({ModelKey("small", 1)}))
    execute = Coalescer("neuron-executor", report, held_items=held_items)
    models, settings = models_of([model_spec()], Telemetry()), PipelineSettings()
    pipeline = Pipeline(models, Stages(_tokenize, execute.send, _postprocess), settings, held_items=held_items)
    door = Door(NativeDoor(pipeline, Catalog(models), settings))

    def ask(seconds: float, count: int) -> list[asyncio.Task[Any]]:
        deadline_s = time.monotonic() + seconds
        return [asyncio.create_task(door.infer(_request(), Call(deadline_s=deadline_s))) for _ in range(count)]

    if is_there_at_first:
        serving = asyncio.create_task(execute.serve(wire))
    late, others = ask(0.3, 20), ask(20, 20)
    await settled()
    if is_there_at_first:
        assert len(wire.messages) == 1
        await wire.fail(Unavailable("the stream has ended"))
        await serving
    for outcome in await asyncio.gather(*late, return_exceptions=True):
        assert isinstance(outcome, DeadlineExceeded)
        assert outcome.message.startswith("the deadline passed while the request was held: no process of the neuron-ex")
    new = ask(1, 10)
    await asyncio.sleep(0.1)  # to prove that nothing happens: they are held, too
    assert not any(task.done() for task in new)
    for task in (*others, *new):
        task.cancel()
    await asyncio.gather(*others, *new, return_exceptions=True)
