"""measure/load/generator.py: requests are sent at their times, and recorded as they ended."""

import asyncio
import itertools
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest

from neuronpipe.api.v1.inference_pb2 import (
    GenerateChunk,
    GenerateResponse,
    GenerateStart,
    InferRequest,
    InferResponse,
    Usage,
)
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError, Overloaded, Unavailable
from neuronpipe.measure.load.generator import (
    NOT_SENT,
    OK,
    OUTCOMES,
    UNANSWERED,
    ClientSender,
    LoadGenerator,
    LoadPart,
    pace,
    poisson_arrivals_s,
)


def test_arrivals_are_a_poisson_process() -> None:
    times_s = np.array([*poisson_arrivals_s(1000.0, 20.0, (7, 0))])
    gaps_s = np.diff(times_s)

    # 20,000 arrivals are expected, with a standard deviation of sqrt(20,000) = 141; four of them are 566.
    assert abs(len(times_s) - 20_000) < 566
    # An exponential gap has mean and standard deviation 1/rate; 20,000 of them estimate both within 0.7 %, and 3 % is
    # four times that.
    assert gaps_s.mean() == pytest.approx(1e-3, rel=0.03)
    assert gaps_s.std() == pytest.approx(1e-3, rel=0.03)
    assert (gaps_s >= 0).all()
    assert times_s[-1] < 20


def test_equal_seeds_give_equal_arrivals_and_different_ones_do_not() -> None:
    first, again, other = (list(poisson_arrivals_s(100.0, 1.0, seed)) for seed in ((1, 0), (1, 0), (1, 1)))
    assert first == again
    assert first != other


def test_there_may_be_no_arrival_at_all() -> None:
    # With 1e-6 arrivals expected.
    assert list(poisson_arrivals_s(1e-3, 1e-3, (0,))) == []


def test_nothing_is_sent_before_its_time_and_nothing_is_left_out() -> None:
    begin_s = time.monotonic()
    times_s = [begin_s + offset_s for offset_s in (-0.2, -0.1, 0.02, 0.02, 0.05)]
    sent: list[tuple[float, float]] = []

    pace(iter(times_s), lambda due_s: sent.extend((time_s, time.monotonic()) for time_s in due_s), threading.Event())

    assert [due_s for due_s, _ in sent] == times_s
    assert all(now_s >= due_s for due_s, now_s in sent)


def test_what_is_due_goes_out_before_the_next_one_is_waited_for() -> None:
    stop = threading.Event()
    sent: list[float] = []

    def send(due_s: list[float]) -> None:
        sent.extend(due_s)
        stop.set()

    pace(iter([0.0, 1.0, time.monotonic() + 3600]), send, stop)

    assert sent == [0.0, 1.0]


def test_stopping_ends_the_wait() -> None:
    stop = threading.Event()
    hours_s = (time.monotonic() + 3600 * hour for hour in itertools.count(1))
    thread = threading.Thread(target=pace, args=(hours_s, lambda due_s: None, stop))
    thread.start()
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


_REQUESTS = [InferRequest(model="m")]


class _Client:
    """`infer` does what `answer` does, given the number of the call; `timeouts_s` are those that it was called with."""

    def __init__(self, answer: Callable[[int], Awaitable[None]]) -> None:
        self.timeouts_s: list[float | None] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._answer = answer

    async def infer(self, request: InferRequest, *, timeout_s: float | None = None) -> InferResponse:
        self.timeouts_s.append(timeout_s)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await self._answer(len(self.timeouts_s))
        finally:
            self.in_flight -= 1
        return InferResponse()


class _Writer:
    """Answers with a text in `parts` of so many tokens, each after a while, and then as `end` says."""

    def __init__(self, parts: Sequence[int], end: NeuronpipeError | None = None) -> None:
        self._parts = parts
        self._end = end

    async def stream(
        self, request: InferRequest, *, timeout_s: float | None = None
    ) -> AsyncGenerator[GenerateResponse, None]:
        yield GenerateResponse(start=GenerateStart())
        for tokens in self._parts:
            await asyncio.sleep(0.01)
            yield GenerateResponse(chunk=GenerateChunk(token_ids=[7] * tokens))
        if self._end:
            raise self._end
        await asyncio.sleep(0.001)
        yield GenerateResponse(response=InferResponse(usage=Usage(generated_tokens=5)))


async def _soon(number: int) -> None:
    await asyncio.sleep(0.001)


async def _never(number: int) -> None:
    await asyncio.Event().wait()


def _generator(client: _Client | _Writer, *, is_generating: bool = False, **changes: Any) -> LoadGenerator:
    load = {
        "callers": 1,
        "rate_per_s": None,
        "seed": (0,),
        "max_in_flight": 1000,
        "warm_up_s": 0.0,
        "duration_s": 0.1,
        "deadline_s": None,
        "drain_s": 0.05,
    }
    sender = ClientSender(cast(AsyncClient, client), is_generating=is_generating)
    return LoadGenerator(sender, itertools.cycle(_REQUESTS), LoadPart(**{**load, **changes}), time.monotonic())


def _outcomes(generator: LoadGenerator) -> list[str]:
    return [OUTCOMES[code] for code in generator.recorder.rows()["outcome"]]


async def test_callers_wait_for_their_answers_and_every_request_is_counted_once() -> None:
    client = _Client(_soon)
    generator = _generator(client, callers=3)
    await generator.run()

    assert client.most_in_flight == 3
    assert _outcomes(generator) == [OK] * len(client.timeouts_s)
    assert len(client.timeouts_s) > 3


async def test_open_loop_does_not_wait_for_answers() -> None:
    client = _Client(_never)
    generator = _generator(client, rate_per_s=1000.0)
    await generator.run()

    # 100 are expected, with a standard deviation of 10.
    assert client.most_in_flight == len(client.timeouts_s) > 50


async def test_requests_that_are_never_answered_are_given_up_and_counted() -> None:
    client = _Client(_never)
    generator = _generator(client, callers=3)
    await generator.run()

    assert _outcomes(generator) == [UNANSWERED] * 3
    assert client.in_flight == 0


async def test_requests_in_flight_at_the_end_get_their_time() -> None:
    async def late(number: int) -> None:
        await asyncio.sleep(0.2)

    generator = _generator(_Client(late), callers=2, drain_s=30.0)
    await generator.run()

    assert _outcomes(generator) == [OK] * 2


async def test_what_cannot_be_sent_is_counted_as_that() -> None:
    client = _Client(_never)
    generator = _generator(client, rate_per_s=1000.0, max_in_flight=5)
    await generator.run()

    outcomes = _outcomes(generator)
    assert len(client.timeouts_s) == 5
    assert outcomes.count(UNANSWERED) == 5
    assert outcomes.count(NOT_SENT) == len(outcomes) - 5 > 0


async def test_errors_are_counted_by_their_reason() -> None:
    async def refuse(number: int) -> None:
        await asyncio.sleep(0.01)
        raise Overloaded("full", retry_after_s=1)

    generator = _generator(_Client(refuse))
    await generator.run()

    assert set(_outcomes(generator)) == {"OVERLOADED"}


async def test_latency_counts_from_when_a_request_was_to_be_sent() -> None:
    async def stall_at_first(number: int) -> None:
        if number == 1:
            time.sleep(0.2)  # the whole generator, as a machine that is short of CPU does

    generator = _generator(_Client(stall_at_first), rate_per_s=500.0)
    await generator.run()

    rows = generator.recorder.rows()
    # All were due in 0.1 s, and all but the first were sent after the stall. The first came at once: in 0.1 s with
    # probability e^-50.
    assert (rows["lag_s"] > 0.09).sum() == len(rows) - 1 > 10
    assert (rows["latency_s"] >= rows["lag_s"].astype(float) - 1e-6).all()


async def test_deadline_counts_from_when_a_request_was_to_be_sent() -> None:
    async def stall_at_first(number: int) -> None:
        if number == 1:
            time.sleep(0.2)

    client = _Client(stall_at_first)
    await _generator(client, rate_per_s=500.0, deadline_s=1.0).run()

    first_s, *others_s = cast(list[float], client.timeouts_s)
    assert 0.9 < first_s <= 1
    assert all(timeout_s < 0.91 for timeout_s in others_s)


async def test_no_deadline_is_no_timeout() -> None:
    client = _Client(_soon)
    await _generator(client).run()
    assert set(client.timeouts_s) == {None}


@pytest.mark.parametrize("rate_per_s", [None, 100.0], ids=["closed", "open"])
async def test_a_run_that_is_broken_off_ends_and_keeps_what_it_has(rate_per_s: float | None) -> None:
    answered = asyncio.Event()

    async def answer(number: int) -> None:
        await asyncio.sleep(0.001)
        answered.set()

    generator = _generator(_Client(answer), rate_per_s=rate_per_s, duration_s=30.0)
    running = asyncio.create_task(generator.run())
    await answered.wait()
    generator.break_off()
    await asyncio.wait_for(running, 10)

    assert OK in _outcomes(generator)


async def test_breaking_off_shortens_the_wait_for_answers() -> None:
    waiting = asyncio.Event()

    async def answer(number: int) -> None:
        waiting.set()
        await asyncio.Event().wait()

    generator = _generator(_Client(answer), duration_s=0.5, drain_s=30.0)
    running = asyncio.create_task(generator.run())
    await waiting.wait()
    await asyncio.sleep(0.5)  # into the drain
    generator.break_off()
    await asyncio.wait_for(running, 10)

    assert _outcomes(generator) == [UNANSWERED]


async def test_a_fault_of_ours_ends_the_run_and_is_raised() -> None:
    async def fail(number: int) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(_generator(_Client(fail), duration_s=30.0).run(), 10)


async def test_a_text_is_read_as_it_comes() -> None:
    generator = _generator(_Writer([1, 3, 1]), is_generating=True, drain_s=30.0)
    await generator.run()

    rows, parts = generator.recorder.rows(), generator.recorder.parts()
    assert set(_outcomes(generator)) == {OK}
    assert set(rows["output_tokens"]) == {5}
    assert parts["tokens"].tolist() == [1, 3, 1] * len(rows)
    assert np.isnan(parts["gap_s"]).tolist() == [True, False, False] * len(rows)
    assert (rows["first_token_s"] >= 0.01).all()
    assert (rows["longest_gap_s"] >= 0.01).all()
    assert (rows["latency_s"] >= rows["first_token_s"] + rows["longest_gap_s"]).all()


async def test_a_text_that_comes_as_a_whole_is_one_part() -> None:
    generator = _generator(_Writer([]), is_generating=True)
    await generator.run()

    assert set(generator.recorder.parts()["tokens"]) == {5}
    assert set(generator.recorder.rows()["token_s"]) == {0.0}


async def test_a_text_that_fails_is_an_error_and_its_parts_have_come() -> None:
    generator = _generator(_Writer([2], Unavailable("gone, after 2 tokens of the text")), is_generating=True)
    await generator.run()

    assert set(_outcomes(generator)) == {"UNAVAILABLE"}
    assert set(generator.recorder.parts()["tokens"]) == {2}
