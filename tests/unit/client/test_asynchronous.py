"""client/asynchronous.py: deadlines, and requests that cannot be read."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from neuronpipe.api.v1.inference_pb2 import InferRequest, Priority
from neuronpipe.api.v1.tasks_pb2 import ImageClassificationInput, ScoreFunction, TaskInput, Truncation
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import DeadlineExceeded
from tests.unit.client.fake_gateway import FakeGateway, fake_gateway
from tests.unit.task_messages import task_input


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with fake_gateway() as gateway:
        yield gateway


class _Fault(Exception):
    pass


def _unreadable(fault: Exception) -> Iterator[InferRequest]:
    yield InferRequest(request_id="1")
    raise fault


async def _unreadable_later(fault: Exception) -> AsyncIterator[InferRequest]:
    for request in _unreadable(fault):
        yield request


@pytest.mark.parametrize("unreadable", [_unreadable, _unreadable_later])
async def test_what_reading_the_requests_raises_is_the_callers(
    gateway: FakeGateway, unreadable: Callable[[Exception], Iterator[InferRequest] | AsyncIterator[InferRequest]]
) -> None:
    fault = _Fault("the file of texts is gone")
    async with AsyncClient(gateway.target) as client:
        with pytest.raises(_Fault) as caught:
            async for _ in client.infer_stream(unreadable(fault)):
                pass
    assert caught.value is fault


async def test_a_stream_that_is_left_by_its_caller_is_not_blamed_on_the_requests(gateway: FakeGateway) -> None:
    async with AsyncClient(gateway.target) as client:
        answers = client.infer_stream([InferRequest(request_id="1")])
        assert (await anext(answers)).request_id == "1"
        await answers.aclose()
    assert gateway.has_ended.wait(10)


async def _never() -> AsyncIterator[InferRequest]:
    await asyncio.Event().wait()
    yield InferRequest()


@pytest.mark.parametrize("timeout_s", [0, 0.0, -1])
async def test_a_deadline_that_has_passed_fails_at_once(gateway: FakeGateway, timeout_s: float) -> None:
    async with AsyncClient(gateway.target) as client:
        with pytest.raises(DeadlineExceeded):
            await client.infer(InferRequest(), timeout_s=timeout_s)
        with pytest.raises(DeadlineExceeded):
            await client.infer_batch([InferRequest()], timeout_s=timeout_s)
        with pytest.raises(DeadlineExceeded):
            await anext(client.infer_stream(_never(), timeout_s=timeout_s))


async def test_a_call_without_a_deadline_has_the_clients(gateway: FakeGateway) -> None:
    async with AsyncClient(gateway.target, timeout_s=0.2) as client:
        with pytest.raises(DeadlineExceeded):
            await client.infer(InferRequest())


async def test_a_calls_deadline_replaces_the_clients(gateway: FakeGateway) -> None:
    gateway.answering.set()
    async with AsyncClient(gateway.target, timeout_s=0) as client:
        assert (await client.infer(InferRequest(model="m"), timeout_s=30)).model == "m"


async def test_a_stream_has_no_deadline_but_its_own(gateway: FakeGateway) -> None:
    async with AsyncClient(gateway.target, timeout_s=0) as client:
        assert [answer.request_id async for answer in client.infer_stream([InferRequest(request_id="1")])] == ["1"]


async def test_requests_are_read_no_more_when_their_call_has_ended(gateway: FakeGateway) -> None:
    before = asyncio.all_tasks()
    async with AsyncClient(gateway.target) as client:
        with pytest.raises(DeadlineExceeded):
            await anext(client.infer_stream(_never(), timeout_s=0.2))
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(
    ("is_bulk", "priority"), [(False, Priority.PRIORITY_INTERACTIVE), (True, Priority.PRIORITY_BULK)]
)
async def test_typed_calls_have_the_clients_priority(
    gateway: FakeGateway, is_bulk: bool, priority: "Priority.ValueType"
) -> None:
    gateway.answering.set()
    async with AsyncClient(gateway.target, is_bulk=is_bulk) as client:
        await client.classify("m", "a")
        await client.embed("m", "a")
        await client.answer("m", "a", "b")
        await client.compare("m", "a", ["b"])
        await client.rerank("m", "a", ["b"])
        await client.classify_zero_shot("m", "a", ["b"])
        await client.classify_image("m", b"a")
    assert [request.priority for request in gateway.requests] == [priority] * 7


async def test_an_image_is_sent_as_it_is(gateway: FakeGateway) -> None:
    gateway.answering.set()
    async with AsyncClient(gateway.target) as client:
        await client.classify_image("m", b"\xff\0", top_k=2, function=ScoreFunction.SCORE_FUNCTION_NONE)
    input = ImageClassificationInput(image=b"\xff\0", top_k=2, function=ScoreFunction.SCORE_FUNCTION_NONE)
    assert [request.input for request in gateway.requests] == [TaskInput(image_classification=input)]


async def test_typed_calls_of_many_texts_send_what_they_are_given(gateway: FakeGateway) -> None:
    gateway.answering.set()
    cut, logits = Truncation.TRUNCATION_LEFT, ScoreFunction.SCORE_FUNCTION_NONE
    labels: dict[str, Any] = {"hypothesis_template": "is {}", "multi_label": True, "truncation": cut}
    async with AsyncClient(gateway.target) as client:
        await client.compare("m", "a", ["b", "c"], dimensions=2, truncation=cut)
        await client.rerank("m", "a", iter(["b", "c"]), top_n=1, function=logits, truncation=cut)
        await client.classify_zero_shot("m", "a", ["b", "c"], **labels)
    assert [request.input for request in gateway.requests] == [
        task_input(sentence_similarity={"source": "a", "texts": ["b", "c"], "dimensions": 2, "truncation": cut}),
        task_input(rerank={"query": "a", "texts": ["b", "c"], "top_n": 1, "function": logits, "truncation": cut}),
        task_input(zero_shot_classification={"text": "a", "candidate_labels": ["b", "c"], **labels}),
    ]
