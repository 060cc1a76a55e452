"""gateway/many.py: batches begin in turns, and answers in the order of the requests of a stream."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from neuronpipe.core.callers import Caller
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput
from neuronpipe.gateway.many import answer_in_order, answer_stream, infer_batch
from neuronpipe.gateway.pipeline import Pipeline
from neuronpipe.platform.process.background import Places


async def _numbers(count: int, read: list[int]) -> AsyncIterator[int]:
    for number in range(count):
        read.append(number)
        yield number


async def test_a_quick_answer_waits_for_those_before_it() -> None:
    first_may_end = asyncio.Event()
    ended: list[int] = []

    async def answer(number: int) -> int:
        if number == 0:
            await first_may_end.wait()
        ended.append(number)
        if number == 2:
            first_may_end.set()
        return number

    assert [value async for value in answer_in_order(_numbers(3, []), answer, 3)] == [0, 1, 2]
    assert ended == [1, 2, 0]


async def test_no_more_than_the_limit_is_read_until_the_caller_takes_an_answer() -> None:
    read: list[int] = []

    async def answer(number: int) -> int:
        return number

    answers = answer_in_order(_numbers(9, read), answer, 2)
    assert await anext(answers) == 0
    for _ in range(10):
        await asyncio.sleep(0)
    # Two are inside, and the next one is read and waits for a place.
    assert read == [0, 1, 2]
    await answers.aclose()


async def test_whatever_ends_a_stream_is_raised_as_it_is_behind_the_answers_to_what_came_before() -> None:
    may_answer = asyncio.Event()

    async def requests() -> AsyncIterator[int]:
        yield 7
        may_answer.set()
        raise EOFError("cut")  # the transport's own, of which this room knows nothing

    async def answer(number: int) -> AsyncIterator[int]:
        await may_answer.wait()
        yield number

    answers = answer_stream(requests(), answer, 2)
    assert await anext(answers) == 7
    with pytest.raises(EOFError, match="cut"):
        await anext(answers)


async def test_the_first_error_ends_it_and_what_runs_behind_it() -> None:
    cancelled: list[int] = []

    async def answer(number: int) -> int:
        if number == 1:
            raise InvalidInput("text", "is empty")
        if number > 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.append(number)
                raise
        return number

    answers = answer_in_order(_numbers(9, []), answer, 4)
    assert await anext(answers) == 0
    with pytest.raises(InvalidInput):
        await anext(answers)
    assert cancelled == [2, 3, 4][: len(cancelled)]
    assert cancelled


async def test_an_error_of_reading_comes_after_the_answers_to_what_was_read() -> None:
    async def requests() -> AsyncIterator[int]:
        yield 0
        raise InvalidInput("request", "is broken")

    async def answer(number: int) -> int:
        return number

    answers = answer_in_order(requests(), answer, 4)
    assert await anext(answers) == 0
    with pytest.raises(InvalidInput, match="is broken"):
        await anext(answers)


class _Beginning(Pipeline):
    """Counts the requests that begin."""

    def __init__(self, *, are_several: bool) -> None:
        self.admission_control = SimpleNamespace(tenants=SimpleNamespace(are_several=are_several))  # type: ignore[assignment]
        self._beginnings = Places(4)
        self.begun: list[str] = []

    @contextmanager
    def observe_together(self, call: Call, *_: Any) -> Iterator[Call]:
        yield call

    async def infer(self, request: Any, *_: Any) -> Any:
        self.begun.append(request)
        return request


@pytest.mark.parametrize(("are_several", "most"), [(False, 64), (True, 16)])
async def test_requests_of_large_batches_begin_a_few_a_turn_and_tenants_alternate(are_several: bool, most: int) -> None:
    pipeline = _Beginning(are_several=are_several)

    def batch(tenant: str, count: int) -> "asyncio.Task[list[Any]]":
        call = Call("", caller=Caller(tenant))
        return asyncio.create_task(infer_batch(pipeline, call, lambda _: [tenant] * count))  # type: ignore[list-item]

    flood = [batch("mallory", 500) for _ in range(10)]
    victim = batch("victim", 16)
    begun = 0
    while not victim.done():
        for _ in range(8):
            await asyncio.sleep(0)
        assert len(pipeline.begun) - begun <= most  # a place that is given back is taken in the same turn
        begun = len(pipeline.begun)
    assert begun < 500
    assert [len(answers) for answers in await asyncio.gather(*flood)] == [500] * 10
