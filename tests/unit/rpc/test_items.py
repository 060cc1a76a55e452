"""rpc/items.py: what the service of a stage makes of a gateway's stream of items."""

import asyncio
import logging
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.forward.v1 import stages_pb2 as wire
from neuronpipe.api.forward.v1.stages_pb2 import TokenizeOutcome, TokenizeRequest, TokenizeResponse
from neuronpipe.api.v1 import stages_pb2
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult, TextClassificationResult
from neuronpipe.core.calls import Call
from neuronpipe.core.changes import Changes
from neuronpipe.core.errors import InternalError, InvalidInput, ModelNotFound, NeuronpipeError, Overloaded, Unavailable
from neuronpipe.core.generated import NewTokens, TokenSink
from neuronpipe.core.items import EncodedInput, ExecuteItem, ModelKey, Prediction, TokenizeItem
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.names import Metrics
from neuronpipe.core.packed import NO_TENSORS, Packed, TensorSets, pack_result
from neuronpipe.core.status import from_status, to_status
from neuronpipe.core.streams import ModelNeeds, Preparation, ProcessModels
from neuronpipe.core.tensors import to_tensor_set
from neuronpipe.core.tracing import SpanContext
from neuronpipe.gateway.coalescing import Coalescer
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.life import Life
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.rpc import items
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.endpoints import follow_endpoints
from neuronpipe.rpc.items import EXECUTE, POSTPROCESS, TOKENIZE, StageMethod, StageRpc
from tests.suite.waiting import cancelled, happens, settled
from tests.unit.every_error import EVERY_ERROR
from tests.unit.recorded import Recorded

_LIMIT_S = 10
# The service's patience with a message of which nothing is ready, where a test is about something else.
_FOREVER_S = 3600.0
_ANSWER_AFTER_S = items._ANSWER_AFTER_S


class _Stage:
    """A stage that works on each item until the test says what becomes of it."""

    def __init__(self) -> None:
        self.items: list[TokenizeItem] = []
        self.cancelled: list[int] = []
        self._ends: defaultdict[int, asyncio.Future[EncodedInput]] = defaultdict(
            asyncio.get_running_loop().create_future
        )

    async def __call__(self, item: TokenizeItem) -> EncodedInput:
        self.items.append(item)
        try:
            return await self._ends[_number(item)]
        except asyncio.CancelledError:
            self.cancelled.append(_number(item))
            raise

    @property
    def began(self) -> list[int]:
        return [_number(item) for item in self.items]

    def finish(self, *item_ids: int, annotation_bytes: int = 0) -> None:
        """Lets items end with a value that tells them apart."""
        annotations = TensorSets(data=[b"x" * annotation_bytes]) if annotation_bytes else NO_TENSORS
        for item_id in item_ids:
            self._ends[item_id].set_result(EncodedInput(NO_TENSORS, annotations, tokens=_tokens(item_id)))

    def fail(self, item_id: int, fault: Exception) -> None:
        self._ends[item_id].set_exception(fault)


class _Needs(ModelNeeds):
    """Keeps all that gateways said."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[frozenset[ModelKey] | None] = []

    def set(self, gateway: object, keys: frozenset[ModelKey] | None) -> None:
        self.said.append(keys)

    def forget(self, gateway: object) -> None:
        self.said.append(frozenset())


class _Models:
    """The models of a process."""

    def __init__(self, *keys: ModelKey) -> None:
        self.announced = ProcessModels(frozenset(keys))
        needs = _Needs()
        self.needs: ModelNeeds = needs
        self.said = needs.said
        self.changes = Changes()

    def replace(self, *keys: ModelKey) -> None:
        self.announced = ProcessModels(frozenset(keys))
        self.changes.notify()


class _Gateway:
    """The gateway's end of a stream, played by the test. Never asks twice: what the service says unasked shows in
    `received`.
    """

    def __init__(
        self, stage: Any, telemetry: Telemetry | None = None, models: "_Models | None" = None, **options: Any
    ) -> None:
        self._messages: asyncio.Queue[TokenizeRequest | Exception | None] = asyncio.Queue()
        self.answers = StageMethod(TOKENIZE, stage, telemetry or Telemetry(), models=models or _Models(), **options)(
            self._requests(), None
        )
        self.received: asyncio.Queue[TokenizeResponse] = asyncio.Queue()
        # How many messages the service has begun to read.
        self.asked = 0
        self.takes = asyncio.Event()
        self.takes.set()
        self.reading = asyncio.create_task(self._read())

    async def _requests(self) -> AsyncIterator[TokenizeRequest]:
        while True:
            self.asked += 1
            message = await self._messages.get()
            if message is None:
                return
            if isinstance(message, Exception):
                raise message
            yield message

    async def _read(self) -> None:
        async for response in self.answers:
            self.received.put_nowait(response)
            await self.takes.wait()

    def send(self, *item_ids: int, abandoned: tuple[int, ...] = ()) -> None:
        self._messages.put_nowait(_request(*item_ids, abandoned=abandoned))

    def end(self, error: Exception | None = None) -> None:
        """Ends what the service reads, like a gateway, or like a server that drains."""
        self._messages.put_nowait(error)

    async def receive(self) -> list[TokenizeOutcome]:
        """The outcomes of the next message."""
        return list((await asyncio.wait_for(self.received.get(), _LIMIT_S)).outcomes)

    async def drained(self) -> list[int]:
        """What the service still works on, as it says in a message of its own."""
        response = await asyncio.wait_for(self.received.get(), _LIMIT_S)
        assert response.HasField("draining")
        assert not response.outcomes
        return sorted(response.draining.item_ids)


def _request(*item_ids: int, abandoned: tuple[int, ...] = ()) -> TokenizeRequest:
    request = TokenizeRequest(abandoned_item_ids=abandoned)
    for item_id in item_ids:
        item = request.items.add(model="m", version="1")
        item.context.request_id, item.context.item_id = f"id-{item_id}", item_id
    return request


def _number(item: TokenizeItem) -> int:
    return int(item.call.request_id.removeprefix("id-"))


def _tokens(item_id: int) -> int:
    return item_id % 1000 + 7


def _outcome(item_id: int) -> TokenizeOutcome:
    return TokenizeOutcome(item_id=item_id, encoded=wire.EncodedInput(tokens=_tokens(item_id)))


@pytest.fixture
async def stage() -> _Stage:
    return _Stage()


@pytest.fixture
async def gateway(stage: _Stage) -> AsyncIterator[_Gateway]:
    """A gateway that has the service's first message."""
    gateway = _Gateway(stage)
    assert await gateway.receive() == []
    yield gateway
    await cancelled(gateway.reading)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is answered but with outcomes, unless a test is impatient."""
    monkeypatch.setattr(items, "_ANSWER_AFTER_S", _FOREVER_S)


@pytest.fixture
def impatient(patient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The service is as patient as it is."""
    monkeypatch.setattr(items, "_ANSWER_AFTER_S", _ANSWER_AFTER_S)


async def test_an_empty_message_comes_before_anything_is_sent(stage: _Stage) -> None:
    gateway = _Gateway(stage)
    assert await gateway.receive() == []
    gateway.end()
    await asyncio.wait_for(gateway.reading, _LIMIT_S)


async def test_an_outcome_is_sent_as_soon_as_it_is_ready(stage: _Stage, gateway: _Gateway) -> None:
    gateway.send(1, 2, 3)
    stage.finish(2)
    assert await gateway.receive() == [_outcome(2)]
    stage.finish(1)
    assert await gateway.receive() == [_outcome(1)]


async def test_an_item_that_needs_no_waiting_has_no_task(stage: _Stage) -> None:
    def at_once(item: TokenizeItem) -> EncodedInput | None:
        if _number(item) == 3:
            raise InvalidInput("text", "is wrong")
        return EncodedInput(NO_TENSORS, tokens=_tokens(_number(item))) if _number(item) == 2 else None

    telemetry = Recorded()
    gateway = _Gateway(stage, telemetry=telemetry, at_once=at_once)
    assert await gateway.receive() == []
    gateway.send(1, 2, 3)
    second, third = await gateway.receive()
    assert second == _outcome(2)
    assert isinstance(from_status(third.error), InvalidInput)
    assert stage.began == [1]
    stage.finish(1)
    assert await gateway.receive() == [_outcome(1)]
    method = TOKENIZE.path.removeprefix("/")
    counts = {(method, "OK"): 2, (method, "INVALID_ARGUMENT"): 1}
    assert telemetry.counts(Metrics.ITEM_DURATION) == counts
    gateway.end()
    await asyncio.wait_for(gateway.reading, _LIMIT_S)


async def test_outcomes_that_are_ready_together_share_a_message(stage: _Stage, gateway: _Gateway) -> None:
    gateway.send(1, 2)
    gateway.send(3)
    await settled()
    stage.finish(3, 1)
    assert await gateway.receive() == [_outcome(3), _outcome(1)]


async def test_outcomes_that_become_ready_while_the_gateway_does_not_read_share_a_message(stage: _Stage) -> None:
    async def requests() -> AsyncIterator[TokenizeRequest]:
        yield _request(1, 2, 3)

    answers = StageMethod(TOKENIZE, stage, Telemetry(), models=_Models())(requests(), None)
    await anext(answers)
    stage.finish(1)
    assert (await anext(answers)).outcomes == [_outcome(1)]
    for item_id in (2, 3):
        stage.finish(item_id)
        await settled()
    assert (await anext(answers)).outcomes == [_outcome(2), _outcome(3)]


@pytest.mark.usefixtures("impatient")
async def test_a_message_is_answered_after_about_a_millisecond_though_nothing_is_ready(gateway: _Gateway) -> None:
    took_s = []
    for item_id in range(10):
        began_s = time.monotonic()
        gateway.send(item_id)
        assert await gateway.receive() == []
        took_s.append(time.monotonic() - began_s)
    # stages.proto says about a millisecond; the best of ten, since the machine may be busy with something else.
    assert min(took_s) < 0.005


@pytest.mark.usefixtures("impatient")
async def test_outcomes_are_the_answer_so_that_no_empty_message_follows(stage: _Stage, gateway: _Gateway) -> None:
    gateway.send(1, 2)
    stage.finish(1)
    assert await gateway.receive() == [_outcome(1)]
    await asyncio.sleep(0.02)  # nothing happens
    assert gateway.received.empty()


@pytest.mark.usefixtures("impatient")
async def test_a_message_that_only_abandons_is_not_answered(gateway: _Gateway) -> None:
    gateway.send(1)
    assert await gateway.receive() == []
    gateway.send(abandoned=(1,))
    await asyncio.sleep(0.02)  # nothing happens
    assert gateway.received.empty()


async def test_an_abandoned_item_is_cancelled_and_its_neighbours_are_not(stage: _Stage, gateway: _Gateway) -> None:
    gateway.send(1, 2, 3)
    await settled()
    gateway.send(abandoned=(2,))
    await settled()
    assert stage.cancelled == [2]
    stage.finish(1, 3)
    assert await gateway.receive() == [_outcome(1), _outcome(3)]


async def test_an_item_abandoned_before_it_began_never_begins(stage: _Stage, gateway: _Gateway) -> None:
    gateway.send(1)
    gateway.send(2, abandoned=(1,))
    stage.finish(2)
    assert await gateway.receive() == [_outcome(2)]
    assert stage.began == [2]


async def test_abandoning_what_is_done_or_was_never_there_does_nothing(stage: _Stage, gateway: _Gateway) -> None:
    gateway.send(1, 2)
    stage.finish(1)
    assert await gateway.receive() == [_outcome(1)]
    gateway.send(abandoned=(1, 99))
    stage.finish(2)
    assert await gateway.receive() == [_outcome(2)]


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_an_item_that_fails_has_its_error_and_leaves_the_others_alone(
    stage: _Stage, gateway: _Gateway, error: NeuronpipeError
) -> None:
    gateway.send(1, 2, 3)
    stage.finish(1)
    stage.fail(2, error)
    stage.finish(3)
    assert await gateway.receive() == [_outcome(1), TokenizeOutcome(item_id=2, error=to_status(error)), _outcome(3)]


@pytest.mark.parametrize(
    "fault", [RuntimeError("the secret"), TimeoutError("the secret")], ids=lambda fault: type(fault).__name__
)
async def test_a_fault_is_internal_with_the_request_id_and_nothing_of_its_text(
    stage: _Stage, gateway: _Gateway, fault: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    gateway.send(1, 2)
    with caplog.at_level(logging.ERROR, logger="neuronpipe"):
        stage.fail(2, fault)
        stage.finish(1)
        failed, good = sorted(await gateway.receive(), key=lambda outcome: -outcome.item_id)
    error = from_status(failed.error)
    assert isinstance(error, InternalError)
    assert "id-2" in error.message
    assert "secret" not in error.message
    assert good == _outcome(1)
    assert "the secret" in caplog.text  # where an operator finds it


@pytest.mark.parametrize("item_id", [0, 1, (1 << 64) - 1])
async def test_an_outcome_repeats_the_items_number(stage: _Stage, gateway: _Gateway, item_id: int) -> None:
    gateway.send(item_id)
    stage.finish(item_id)
    assert await gateway.receive() == [_outcome(item_id)]


async def test_a_gateway_that_goes_takes_its_items_along(stage: _Stage, gateway: _Gateway) -> None:
    gateway.send(1, 2)
    gateway.send(3)
    await settled()
    await cancelled(gateway.reading)
    assert sorted(stage.cancelled) == [1, 2, 3]


async def test_a_gateway_that_goes_while_it_does_not_read_takes_its_items_along(stage: _Stage) -> None:
    async def requests() -> AsyncIterator[TokenizeRequest]:
        yield _request(1, 2)
        await asyncio.Event().wait()

    answers: Any = StageMethod(TOKENIZE, stage, Telemetry(), models=_Models())(requests(), None)
    await anext(answers)
    stage.finish(1)
    await anext(answers)
    await answers.aclose()
    assert stage.cancelled == [2]


async def test_what_was_read_before_draining_is_answered_before_the_end(stage: _Stage, gateway: _Gateway) -> None:
    gateway.send(1, 2, 3)
    stage.finish(3)
    assert await gateway.receive() == [_outcome(3)]
    gateway.end(Unavailable("the tokenizer service is stopping"))
    assert await gateway.drained() == [1, 2]
    stage.finish(2)
    assert await gateway.receive() == [_outcome(2)]
    assert not gateway.reading.done()
    stage.finish(1)
    assert await gateway.receive() == [_outcome(1)]
    with pytest.raises(Unavailable, match=r"^the tokenizer service is stopping$"):
        await asyncio.wait_for(gateway.reading, _LIMIT_S)


async def test_a_process_that_drains_begins_no_items_and_still_learns_which_items_are_abandoned(stage: _Stage) -> None:
    in_flight = InFlight("tokenizer", 1 << 20, 1 << 20)
    gateway = _Gateway(stage, in_flight=in_flight)
    assert await gateway.receive() == []
    gateway.send(1, 2, 3)
    await settled()
    in_flight.drain()
    assert await gateway.drained() == [1, 2, 3]
    gateway.send(4, abandoned=(2,))
    await settled()
    assert (stage.began, stage.cancelled) == ([1, 2, 3], [2])
    stage.finish(1)
    assert await gateway.receive() == [_outcome(1)]
    assert not gateway.reading.done()
    gateway.send(abandoned=(3,))  # the last one
    with pytest.raises(Unavailable, match=r"^the tokenizer service is stopping$"):
        await asyncio.wait_for(gateway.reading, _LIMIT_S)
    assert stage.cancelled == [2, 3]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("ends", ["before", "after"])
async def test_a_gateway_may_end_its_stream_while_the_process_drains(stage: _Stage, ends: str) -> None:
    in_flight = InFlight("tokenizer", 1 << 20, 1 << 20)
    gateway = _Gateway(stage, in_flight=in_flight)
    assert await gateway.receive() == []
    gateway.send(1)
    await settled()
    if ends == "before":
        gateway.end()
        await settled()
    in_flight.drain()
    if ends == "after":
        gateway.end()
    stage.finish(1)
    await asyncio.wait_for(gateway.reading, _LIMIT_S)


async def test_what_is_left_unanswered_has_no_outcome_and_does_not_keep_the_stream_from_ending(stage: _Stage) -> None:
    gateway = _Gateway(stage, leaves_unavailable=True)
    assert await gateway.receive() == []
    gateway.send(1, 2, 3)
    await settled()
    stage.fail(1, Unavailable("the process ends"))
    stage.finish(2)
    assert await gateway.receive() == [_outcome(2)]
    gateway.end(Unavailable("the service is stopping"))  # as a server that drains
    assert await gateway.drained() == [3]
    stage.fail(3, Unavailable("the process ends"))
    with pytest.raises(Unavailable, match="the service is stopping"):
        await asyncio.wait_for(gateway.reading, _LIMIT_S)
    assert gateway.received.empty()


async def test_what_was_sent_before_the_gateway_ends_its_stream_is_answered(stage: _Stage, gateway: _Gateway) -> None:
    gateway.send(1, 2)
    stage.finish(2)
    assert await gateway.receive() == [_outcome(2)]
    gateway.end()
    assert await gateway.drained() == [1]
    stage.finish(1)
    assert await gateway.receive() == [_outcome(1)]
    await asyncio.wait_for(gateway.reading, _LIMIT_S)


async def test_what_is_ready_when_draining_begins_is_not_what_is_worked_on(stage: _Stage, gateway: _Gateway) -> None:
    gateway.send(1, 2)
    await settled()
    stage.finish(1)
    gateway.end(Unavailable("the tokenizer service is stopping"))
    messages = [await asyncio.wait_for(gateway.received.get(), _LIMIT_S)]
    while not messages[-1].HasField("draining"):
        messages.append(await asyncio.wait_for(gateway.received.get(), _LIMIT_S))
    assert [outcome.item_id for message in messages for outcome in message.outcomes] == [1]
    assert messages[-1].draining.item_ids == [2]
    stage.finish(2)
    assert await gateway.receive() == [_outcome(2)]


@pytest.mark.parametrize("ending", ["nothing to do", "an abandoned item"])
async def test_draining_ends_a_stream_at_once_when_nobody_waits(gateway: _Gateway, ending: str) -> None:
    if ending == "an abandoned item":
        gateway.send(1)
        gateway.send(abandoned=(1,))
    gateway.end(Unavailable("the tokenizer service is stopping"))
    with pytest.raises(Unavailable):
        await asyncio.wait_for(gateway.reading, _LIMIT_S)


async def test_an_item_beyond_the_limit_is_refused_and_the_others_are_not(
    stage: _Stage, gateway: _Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.rpc.items._MAX_ITEMS", 2)
    gateway.send(1, 2, 3)
    (refused,) = await gateway.receive()
    assert refused.item_id == 3
    error = from_status(refused.error)
    assert isinstance(error, Overloaded)
    assert (error.message, error.retry_after_s) == ("2 items in one stream, the limit", 1)
    stage.finish(1, 2)
    assert await gateway.receive() == [_outcome(1), _outcome(2)]


@pytest.mark.parametrize("ending", ["answered", "failed", "abandoned"])
async def test_an_item_that_ended_makes_room(
    stage: _Stage, gateway: _Gateway, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr("neuronpipe.rpc.items._MAX_ITEMS", 1)
    gateway.send(1)
    if ending == "answered":
        stage.finish(1)
    if ending == "failed":
        stage.fail(1, RuntimeError("boom"))
    if ending == "abandoned":
        gateway.send(abandoned=(1,))
    else:
        await gateway.receive()
    gateway.send(2)
    stage.finish(2)
    assert await gateway.receive() == [_outcome(2)]


@pytest.mark.parametrize("is_sent", [True, False], ids=["sent", "waiting"])
async def test_an_item_counts_against_the_limit_until_its_outcome_is_sent(
    stage: _Stage, gateway: _Gateway, monkeypatch: pytest.MonkeyPatch, is_sent: bool
) -> None:
    monkeypatch.setattr("neuronpipe.rpc.items._MAX_ITEMS", 1)
    if not is_sent:
        gateway.takes.clear()
    gateway.send(1)
    stage.finish(1)
    assert await gateway.receive() == [_outcome(1)]
    gateway.send(2)
    await settled()
    assert stage.began == ([1, 2] if is_sent else [1])


async def test_outcomes_are_split_into_messages_of_about_a_mebibyte(stage: _Stage) -> None:
    async def requests() -> AsyncIterator[TokenizeRequest]:
        yield _request(*range(1, 7))

    answers = StageMethod(TOKENIZE, stage, Telemetry(), models=_Models())(requests(), None)
    await anext(answers)
    stage.finish(1)
    assert (await anext(answers)).outcomes == [_outcome(1)]
    # 250 KiB each: the fifth would pass the mebibyte.
    stage.finish(*range(2, 7), annotation_bytes=250 << 10)
    await settled()
    assert [outcome.item_id for outcome in (await anext(answers)).outcomes] == [2, 3, 4, 5]
    assert [outcome.item_id for outcome in (await anext(answers)).outcomes] == [6]


async def test_an_outcome_larger_than_a_message_of_outcomes_travels_alone(stage: _Stage, gateway: _Gateway) -> None:
    gateway.send(1, 2)
    stage.finish(1, annotation_bytes=3 << 20)
    (large,) = await gateway.receive()
    assert (large.item_id, len(large.encoded.annotations[0])) == (1, 3 << 20)
    stage.finish(2)
    assert await gateway.receive() == [_outcome(2)]


async def test_no_more_items_are_read_while_too_many_bytes_of_outcomes_wait(
    stage: _Stage, gateway: _Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.rpc.items._MAX_UNSENT_BYTES", 1000)
    gateway.takes.clear()  # the next message is the last that the gateway takes for now
    gateway.send(1)
    stage.finish(1)
    assert await gateway.receive() == [_outcome(1)]
    gateway.send(2)
    stage.finish(2, annotation_bytes=2000)
    await settled()
    gateway.send(3)
    gateway.send(4)
    gateway.send(5)
    await settled()
    assert stage.began == [1, 2, 3]  # the message that was asked for before
    gateway.takes.set()
    await settled()
    assert stage.began == [1, 2, 3, 4, 5]


async def test_refusals_count_as_outcomes_that_wait_so_that_they_are_bounded_too(
    gateway: _Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.rpc.items._MAX_UNSENT_BYTES", 1000)
    monkeypatch.setattr("neuronpipe.rpc.items._MAX_ITEMS", 0)
    gateway.takes.clear()
    for item_id in range(100):
        gateway.send(item_id)
        await settled()
    assert gateway.asked < 20


async def test_outcomes_that_wait_as_draining_begins_are_named_with_what_is_worked_on(
    stage: _Stage, gateway: _Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gateway sends elsewhere what has no outcome yet and is not named."""
    monkeypatch.setattr("neuronpipe.rpc.items._MAX_RESPONSE_BYTES", 1)
    gateway.send(1, 2, 3)
    await settled()
    stage.finish(1, 2)
    gateway.end(Unavailable("the tokenizer service is stopping"))
    message = await asyncio.wait_for(gateway.received.get(), _LIMIT_S)
    assert [outcome.item_id for outcome in message.outcomes] == [1]
    assert sorted(message.draining.item_ids) == [2, 3]
    assert await gateway.receive() == [_outcome(2)]
    stage.finish(3)
    assert await gateway.receive() == [_outcome(3)]


@pytest.mark.usefixtures("impatient")
async def test_large_values_become_bytes_in_a_thread() -> None:
    threads: list[str] = []

    class Noted(TensorSets):
        @property
        def data(self) -> Any:
            threads.append(threading.current_thread().name)
            return super().data

    async def stage(item: TokenizeItem) -> EncodedInput:
        size = 1 if _number(item) == 1 else 100_000
        return EncodedInput(Noted(arrays=[{"input_ids": np.zeros(size, np.int32)}]))

    gateway = _Gateway(stage)
    await gateway.receive()
    for item_id in (1, 2):
        threads.clear()
        gateway.send(item_id)
        while not await gateway.receive():
            pass
        assert (threads[0] == threading.main_thread().name) == (item_id == 1)
    gateway.end()
    await gateway.reading


_A, _B = ModelKey("a", 1), ModelKey("b", 12)


async def test_the_first_message_announces_the_models_and_the_largest_message(stage: _Stage) -> None:
    gateway = _Gateway(stage, models=_Models(_B, _A), max_message_bytes=1234)
    first = await asyncio.wait_for(gateway.received.get(), _LIMIT_S)
    expected = stages_pb2.Announcement(
        models=[stages_pb2.ServedModel(name="a", version="1"), stages_pb2.ServedModel(name="b", version="12")],
        max_message_bytes=1234,
    )
    assert first == TokenizeResponse(announcement=expected)
    gateway.send(1)
    stage.finish(1)
    assert await asyncio.wait_for(gateway.received.get(), _LIMIT_S) == TokenizeResponse(outcomes=[_outcome(1)])
    gateway.end()
    await gateway.reading


async def test_models_are_announced_again_when_they_change_and_no_longer_when_the_stream_ended(stage: _Stage) -> None:
    models = _Models(_A)
    gateway = _Gateway(stage, models=models)
    await gateway.receive()
    models.replace(_A, _B)
    said = await asyncio.wait_for(gateway.received.get(), _LIMIT_S)
    assert [model.name for model in said.announcement.models] == ["a", "b"]
    models.replace()
    said = await asyncio.wait_for(gateway.received.get(), _LIMIT_S)
    assert said.HasField("announcement")
    assert not said.announcement.models
    gateway.end()
    await gateway.reading
    assert models.changes._watchers == []


async def test_versions_that_could_not_be_loaded_are_announced_with_the_reason(stage: _Stage) -> None:
    models = _Models()
    models.announced = ProcessModels(frozenset({_A}), problems={_B: "no room"})
    gateway = _Gateway(stage, models=models)
    first = await asyncio.wait_for(gateway.received.get(), _LIMIT_S)
    failed = stages_pb2.FailedModel(name="b", version="12", problem="no room")
    assert list(first.announcement.failed) == [failed]
    gateway.end()
    await gateway.reading


async def test_how_far_models_are_prepared_is_announced(stage: _Stage) -> None:
    models = _Models()
    models.announced = ProcessModels(frozenset({_A, _B}), prepared={_B: Preparation(138, 40, 3, 41_000_000)})
    gateway = _Gateway(stage, models=models)
    first = await asyncio.wait_for(gateway.received.get(), _LIMIT_S)
    assert list(first.announcement.prepared) == [
        stages_pb2.PreparedModel(
            name="b", version="12", shapes=138, shapes_ready=40, lone_graphs=3, lone_graph_bytes=41_000_000
        )
    ]
    gateway.end()
    await gateway.reading


async def test_a_gateway_needs_anything_until_it_says_so_and_nothing_when_its_stream_ended(stage: _Stage) -> None:
    models = _Models(_A, _B)
    gateway = _Gateway(stage, models=models)
    await gateway.receive()
    assert models.said == [None]
    needed = stages_pb2.NeededModels(models=[stages_pb2.ServedModel(name="a", version="1")])
    needed.models.add(name="a", version="9" * 5000)  # no version has so many digits
    gateway._messages.put_nowait(TokenizeRequest(needed=needed))
    gateway._messages.put_nowait(TokenizeRequest(needed=stages_pb2.NeededModels()))
    gateway.end()
    await gateway.reading
    assert models.said == [None, frozenset({_A}), frozenset(), frozenset()]


async def test_an_item_whose_tensors_are_broken_fails_alone() -> None:
    async def stage(item: ExecuteItem) -> Prediction:
        return Prediction(NO_TENSORS, padded_tokens=len(item.sequences.arrays[0]["input_ids"]))

    async def requests() -> AsyncIterator[Any]:
        request = wire.ExecuteRequest()
        good = to_tensor_set({"input_ids": np.zeros(5, np.int32)}).SerializeToString()
        for item_id, data in {1: good, 2: b"\x0a\x05a", 3: good}.items():
            item = request.items.add(model="m", version="1", sequences=[data])
            item.context.item_id = item_id
        yield request
        await asyncio.Event().wait()

    answers: Any = StageMethod(EXECUTE, stage, Telemetry(), models=_Models())(requests(), None)
    await anext(answers)
    outcomes = {outcome.item_id: outcome for outcome in (await anext(answers)).outcomes}
    await answers.aclose()
    assert [outcomes[item_id].prediction.padded_tokens for item_id in (1, 3)] == [5, 5]
    assert isinstance(from_status(outcomes[2].error), InvalidInput)


@pytest.mark.usefixtures("impatient")
async def test_the_tokens_of_a_text_are_outcomes_of_their_own_before_its_value() -> None:
    async def stage(item: ExecuteItem, sink: TokenSink) -> Prediction:
        for token_id in (7, 8):
            sink.put(NewTokens([token_id]))
        return Prediction(NO_TENSORS, batch_size=3)

    async def requests() -> AsyncIterator[Any]:
        request = wire.ExecuteRequest()
        item = request.items.add(model="m", version="1")
        item.context.item_id = 1
        item.options.max_new_tokens = 2
        yield request
        await asyncio.Event().wait()

    answers: Any = StageMethod(EXECUTE, stage, Telemetry(), models=_Models())(requests(), None)
    await anext(answers)
    *tokens, last = (await anext(answers)).outcomes
    await answers.aclose()
    assert [list(outcome.new_tokens.token_ids) for outcome in tokens] == [[7], [8]]
    assert (last.item_id, last.prediction.batch_size) == (1, 3)


async def test_an_item_for_no_version_fails_alone(stage: _Stage, gateway: _Gateway) -> None:
    request = _request(1, 2)
    request.items[0].version = "newest"
    gateway._messages.put_nowait(request)
    stage.finish(2)
    failed, good = await gateway.receive() + await gateway.receive()
    assert (failed.item_id, type(from_status(failed.error))) == (1, ModelNotFound)
    assert good == _outcome(2)


@pytest.mark.parametrize("is_sampled", [True, False])
async def test_a_stage_makes_spans_of_only_what_the_gateway_sampled(stage: _Stage, is_sampled: bool) -> None:
    telemetry = Recorded()
    gateway = _Gateway(stage, telemetry=telemetry)
    await gateway.receive()
    trace = SpanContext.new(is_sampled=is_sampled)
    request = _request(1)
    request.items[0].context.traceparent = trace.traceparent
    gateway._messages.put_nowait(request)
    stage.finish(1)
    await gateway.receive()
    (item,) = stage.items
    assert [span.context for span in telemetry.spans] == ([item.work.trace] if is_sampled else [])
    assert item.work.trace
    assert (item.work.trace == trace) == (not is_sampled)
    gateway.end()
    await gateway.reading


_RESULT = TaskResult(text_classification=TextClassificationResult())


@pytest.mark.parametrize(
    ("rpc", "value", "outcome"),
    [
        (
            TOKENIZE,
            EncodedInput(NO_TENSORS, tokens=5),
            wire.TokenizeOutcome(item_id=9, encoded=wire.EncodedInput(tokens=5)),
        ),
        (
            EXECUTE,
            Prediction(NO_TENSORS, batch_size=5),
            wire.ExecuteOutcome(item_id=9, prediction=wire.Prediction(batch_size=5)),
        ),
        (POSTPROCESS, pack_result(_RESULT), wire.PostprocessOutcome(item_id=9, result=_RESULT.SerializeToString())),
    ],
    ids=["tokenize", "execute", "postprocess"],
)
async def test_every_stage_answers_with_its_own_kind_of_outcome(rpc: StageRpc, value: object, outcome: object) -> None:
    async def stage(item: Any) -> Any:
        return value

    async def requests() -> AsyncIterator[Any]:
        request = rpc.request_class()
        request.items.add(version="1").context.item_id = 9
        yield rpc.decode(request.SerializeToString())

    answers = [
        rpc.response_class.FromString(rpc.encode(part))
        async for part in StageMethod(rpc, stage, Telemetry(), models=_Models())(requests(), None)
    ]
    assert [returned for answer in answers for returned in answer.outcomes] == [outcome]


@pytest.mark.usefixtures("impatient")
async def test_a_text_whose_caller_leaves_while_the_process_drains_is_not_computed_to_its_end(stage: _Stage) -> None:
    settings = ProcessSettings(listen="127.0.0.1:0")
    door = GrpcDoor(settings, [TOKENIZE.service])
    life = Life("tokenizer", settings, [door])
    await life.listen()
    models = _Models(ModelKey("m", 1))
    method = StageMethod(TOKENIZE, stage, Telemetry(), models=models, in_flight=life.in_flight)
    life.open(partial(door.open, [(TOKENIZE, method)]))
    reports: list[bool] = []

    async def report(is_reached: bool) -> None:
        reports.append(is_reached)

    gateway = Coalescer("tokenizer", report)
    following = asyncio.create_task(follow_endpoints(TOKENIZE, f"127.0.0.1:{door.port}", gateway.serve))
    await happens(lambda: reports == [True])
    items = [TokenizeItem(Call(f"id-{number}"), ModelKey("m", 1), Packed(TaskInput, data=b"")) for number in (1, 2)]
    left, asked = [asyncio.create_task(gateway.send(item)) for item in items]
    await happens(lambda: stage.began == [1, 2])
    draining = asyncio.create_task(life.drain(_LIMIT_S))
    await happens(lambda: reports == [True, False])
    left.cancel()
    await happens(lambda: stage.cancelled == [1])
    stage.finish(2)
    assert (await asked).tokens == _tokens(2)
    await asyncio.wait_for(draining, _LIMIT_S / 2)
    await cancelled(following)
