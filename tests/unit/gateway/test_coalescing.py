"""gateway/coalescing.py: who travels with whom, to which endpoint, and what becomes of the items of one that is lost.

The streams are written by hand: what was sent is kept as it was when it was sent, and nothing is answered before the test says so, in
whatever order, for whatever item.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from neuronpipe.api.v1 import stages_pb2
from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.stages_pb2 import EncodedInput, ItemContext, TokenizeItem, TokenizeOutcome
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult, TextClassificationInput, TextClassificationResult
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, Unavailable
from neuronpipe.core.metrics import Counter
from neuronpipe.core.status import to_status
from neuronpipe.core.telemetry import Events
from neuronpipe.core.tracing import Span, SpanContext, enter_span
from neuronpipe.gateway.coalescing import Coalescer
from tests.unit.every_error import EVERY_ERROR

_LIMIT_S = 10
_BULK = Priority.PRIORITY_BULK
_UNREACHABLE = r"^the tokenizer service cannot be reached$"


@dataclass
class _Message:
    items: list[Any]
    abandoned: list[int]

    @property
    def names(self) -> list[str]:
        return [item.model for item in self.items]


class _Wire:
    """The stream to one endpoint, and the endpoint itself."""

    serving: "asyncio.Task[None]"

    def __init__(self) -> None:
        self.messages: list[_Message] = []
        self.send_fault: Exception | None = None
        self.is_jammed = False
        self._said: asyncio.Queue[tuple[list[Any], list[int] | None] | Exception] = asyncio.Queue()

    async def send(self, items: Sequence[Any], abandoned_item_ids: Sequence[int]) -> None:
        if self.is_jammed:
            await asyncio.Event().wait()
        if self.send_fault:
            raise self.send_fault
        copies = [TokenizeItem.FromString(item.SerializeToString()) for item in items]
        self.messages.append(_Message(copies, list(abandoned_item_ids)))

    async def receive(self) -> tuple[Sequence[Any], Sequence[int] | None]:
        said = await self._said.get()
        if isinstance(said, Exception):
            raise said
        return said

    @property
    def names(self) -> list[list[str]]:
        """The names of the items of each message."""
        return [message.names for message in self.messages]

    def id_of(self, name: str) -> int:
        (item_id,) = {item.context.item_id for message in self.messages for item in message.items if item.model == name}
        return int(item_id)

    async def say(self, *outcomes: Any) -> None:
        """One message: of no outcome where nothing is ready yet."""
        self._said.put_nowait((list(outcomes), None))
        await _settled()

    async def drain(self, *names: str) -> None:
        """Reads no more, and still works on these."""
        self._said.put_nowait(([], [self.id_of(name) for name in names]))
        await _settled()

    async def answer(self, *names: str) -> None:
        """One message with a value for each item."""
        await self.say(*(_outcome(self.id_of(name), name) for name in names))

    async def fail(self, fault: Exception) -> None:
        self._said.put_nowait(fault)
        await _settled()

    async def die(self) -> None:
        await self.fail(Unavailable("the stream has ended"))
        await asyncio.wait_for(self.serving, _LIMIT_S)


@dataclass
class _System:
    """A coalescer and what it said of the stage."""

    reports: list[bool] = field(default_factory=list)
    tasks: list["asyncio.Task[Any]"] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.coalescer = Coalescer("tokenizer", self._report)

    async def _report(self, is_serving: bool) -> None:
        self.reports.append(is_serving)

    async def connect(self) -> _Wire:
        """A new endpoint."""
        wire = _Wire()
        wire.serving = asyncio.create_task(self.coalescer.serve(wire))
        self.tasks.append(wire.serving)
        await _settled()
        return wire

    async def ask(self, *names: str, **context: Any) -> list["asyncio.Task[Any]"]:
        """Brings items."""
        tasks = [asyncio.create_task(self.coalescer(_item(name, **context))) for name in names]
        self.tasks += tasks
        await _settled()
        return tasks


def _item(name: str, text: str = "", **context: Any) -> TokenizeItem:
    input = TaskInput(text_classification=TextClassificationInput(text=text))
    return TokenizeItem(context=ItemContext(request_id=name, **context), model=name, input=input)


def _value(name: str) -> EncodedInput:
    """A value that tells its item from others."""
    return EncodedInput(tokens=sum(name.encode()))


def _outcome(item_id: int, name: str) -> TokenizeOutcome:
    return TokenizeOutcome(item_id=item_id, encoded=_value(name))


async def _settled() -> None:
    """Lets every task go as far as it can without time passing."""
    for _ in range(30):
        await asyncio.sleep(0)


async def _values(tasks: "list[asyncio.Task[Any]]") -> list[Any]:
    return list(await asyncio.wait_for(asyncio.gather(*tasks), _LIMIT_S))


@pytest.fixture
async def system() -> AsyncIterator[_System]:
    system = _System()
    yield system
    for task in system.tasks:
        task.cancel()
    await asyncio.gather(*system.tasks, return_exceptions=True)


async def test_an_item_is_sent_at_once_and_alone_when_nothing_is_unanswered(system: _System) -> None:
    wire = await system.connect()
    await system.ask("a")
    assert wire.names == [["a"]]


async def test_items_that_come_while_a_message_is_unanswered_travel_together_in_the_order_in_which_they_came(system: _System) -> None:
    wire = await system.connect()
    await system.ask("first")
    await system.ask("a")
    await system.ask("b", "c")
    assert wire.names == [["first"]]
    await wire.say()
    assert wire.names == [["first"], ["a", "b", "c"]]


async def test_an_endpoint_that_has_answered_gets_the_next_item_though_it_works_on_others(system: _System) -> None:
    wire = await system.connect()
    await system.ask("a")
    await wire.say()
    await system.ask("b")
    assert wire.names == [["a"], ["b"]]


async def test_interactive_items_go_before_bulk_items(system: _System) -> None:
    wire = await system.connect()
    await system.ask("first")
    await system.ask("bulk 1", "bulk 2", priority=_BULK)
    await system.ask("interactive", priority=Priority.PRIORITY_INTERACTIVE)
    await system.ask("unspecified")
    await wire.say()
    assert wire.names[1] == ["interactive", "unspecified", "bulk 1", "bulk 2"]


async def test_a_message_holds_no_more_items_than_the_limit_and_bulk_items_wait(system: _System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.gateway.coalescing._MAX_ITEMS", 3)
    wire = await system.connect()
    await system.ask("first")
    await system.ask("bulk 1", "bulk 2", priority=_BULK)
    await system.ask("a", "b")
    await wire.say()
    await wire.say()
    assert wire.names[1:] == [["a", "b", "bulk 1"], ["bulk 2"]]


async def test_a_message_ends_with_the_item_that_passes_the_limit_of_bytes(system: _System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.gateway.coalescing._MAX_BYTES", 1000)
    wire = await system.connect()
    await system.ask("first")
    # 600 bytes and a bit each: the second passes the limit. The last but one is larger than the limit by itself.
    for name, size_bytes in {"a": 600, "b": 600, "c": 600, "d": 5000, "e": 0}.items():
        system.tasks.append(asyncio.create_task(system.coalescer(_item(name, "x" * size_bytes))))
    await _settled()
    for _ in range(3):
        await wire.say()
    assert wire.names[1:] == [["a", "b"], ["c", "d"], ["e"]]


async def test_the_value_of_an_outcome_is_the_items(system: _System) -> None:
    wire = await system.connect()
    asked = await system.ask("a", "b", "c")
    await wire.answer("a")
    await wire.answer("c", "b")
    assert await _values(asked) == [_value("a"), _value("b"), _value("c")]


_RESULT = TaskResult(text_classification=TextClassificationResult())


@pytest.mark.parametrize(
    ("outcome", "value"),
    [
        (stages_pb2.TokenizeOutcome(encoded=EncodedInput(tokens=5)), EncodedInput(tokens=5)),
        (stages_pb2.ExecuteOutcome(prediction=stages_pb2.Prediction(batch_size=5)), stages_pb2.Prediction(batch_size=5)),
        (stages_pb2.PostprocessOutcome(result=_RESULT), _RESULT),
    ],
    ids=["tokenize", "execute", "postprocess"],
)
async def test_every_stages_outcomes_are_understood(system: _System, outcome: Any, value: object) -> None:
    wire = await system.connect()
    asked = await system.ask("a")
    outcome.item_id = wire.id_of("a")
    await wire.say(outcome)
    assert await _values(asked) == [value]


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_an_outcomes_error_is_raised_as_its_class_and_leaves_the_neighbours_alone(system: _System, error: NeuronpipeError) -> None:
    wire = await system.connect()
    await system.ask("first")
    failing, good = await system.ask("failing", "good")
    await wire.say()
    await wire.say(TokenizeOutcome(item_id=wire.id_of("failing"), error=to_status(error)), _outcome(wire.id_of("good"), "good"))
    with pytest.raises(type(error)) as caught:
        await failing
    assert vars(caught.value) == vars(error)
    assert await good == _value("good")


async def test_outcomes_that_nobody_asked_for_change_nothing(system: _System) -> None:
    wire = await system.connect()
    first, second = await system.ask("first", "second")
    await wire.say(_outcome(999, "unknown"), _outcome(wire.id_of("first"), "first"), _outcome(wire.id_of("first"), "again"))
    await wire.say(_outcome(wire.id_of("first"), "late"), _outcome(0, "none"), _outcome(wire.id_of("second"), "second"))
    assert await _values([first, second]) == [_value("first"), _value("second")]
    assert not wire.serving.done()


async def test_every_item_has_a_number_of_its_own(system: _System) -> None:
    wires = [await system.connect() for _ in range(2)]
    for _ in range(5):
        await system.ask("same", "same")
        for wire in wires:
            await wire.say()
    numbers = [item.context.item_id for wire in wires for message in wire.messages for item in message.items]
    assert len(numbers) == 10
    assert len(set(numbers)) == 10


async def test_an_item_whose_caller_left_before_it_was_sent_never_is(system: _System) -> None:
    wire = await system.connect()
    await system.ask("first")
    left, *_ = await system.ask("left", "stays")
    left.cancel()
    await wire.say()
    assert wire.names == [["first"], ["stays"]]
    assert [message.abandoned for message in wire.messages] == [[], []]


async def test_an_item_whose_caller_left_after_it_was_sent_is_told_as_abandoned_at_once(system: _System) -> None:
    wire = await system.connect()
    (left,) = await system.ask("left")
    await wire.say()
    left.cancel()
    await _settled()
    assert wire.messages[1] == _Message([], [wire.id_of("left")])


async def test_an_item_abandoned_while_its_message_is_unanswered_is_told_with_the_next(system: _System) -> None:
    wire = await system.connect()
    (left,) = await system.ask("left")
    await system.ask("next")
    left.cancel()
    await wire.say()
    assert (wire.messages[1].names, wire.messages[1].abandoned) == (["next"], [wire.id_of("left")])


async def test_abandoned_items_are_told_once_and_leave_their_neighbours_alone(system: _System) -> None:
    wire = await system.connect()
    await system.ask("first")
    left, stays = await system.ask("left", "stays")
    await wire.say()
    left.cancel()
    await wire.say()
    # The endpoint had the outcome on its way already.
    await wire.answer("left", "stays")
    assert await stays == _value("stays")
    await system.ask("later")
    assert [message.abandoned for message in wire.messages] == [[], [], [wire.id_of("left")], []]


async def test_a_message_that_only_abandons_is_not_waited_for(system: _System) -> None:
    wire = await system.connect()
    (left,) = await system.ask("left")
    await wire.say()
    left.cancel()
    await _settled()
    await system.ask("next")
    assert wire.names == [["left"], [], ["next"]]


async def test_whoever_has_the_outcome_abandons_nothing(system: _System) -> None:
    wire = await system.connect()
    (asked,) = await system.ask("a")
    await wire.answer("a")
    await asked
    await system.ask("b")
    assert wire.messages[1].abandoned == []


class _Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s

    def monotonic_ns(self) -> int:
        return int(self.now_s * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr("neuronpipe.gateway.coalescing.time", clock)
    return clock


@pytest.mark.parametrize(
    ("remaining_ns", "waits_s", "expected_ns"),
    [
        (3_000_000_000, 0.0, 3_000_000_000),
        (3_000_000_000, 1.0, 2_000_000_000),
        (3_000_000_000, 3.0, 1),  # 0 would be no deadline
        (3_000_000_000, 9.0, 1),
        (0, 9.0, 0),
    ],
)
async def test_an_item_carries_what_is_left_of_its_deadline_when_it_is_sent(
    system: _System, clock: _Clock, remaining_ns: int, waits_s: float, expected_ns: int
) -> None:
    wire = await system.connect()
    await system.ask("first")
    await system.ask("a", remaining_ns=remaining_ns)
    clock.now_s += waits_s
    await wire.say()
    assert wire.messages[1].items[0].context.remaining_ns == expected_ns


async def test_an_item_sent_again_carries_what_is_left_by_then(system: _System, clock: _Clock) -> None:
    first = await system.connect()
    await system.ask("a", remaining_ns=3_000_000_000)
    second = await system.connect()
    clock.now_s += 1
    await first.die()
    assert second.messages[0].items[0].context.remaining_ns == 2_000_000_000


async def test_several_endpoints_share_the_work(system: _System) -> None:
    first, second = await system.connect(), await system.connect()
    await system.ask("a", "b")
    assert sorted(first.names + second.names) == [["a"], ["b"]]
    await system.ask("c", "d", "e", "f")
    # Half for each, though the first could take all: the second is ready as well within a millisecond.
    await first.say()
    assert first.names[1:] == [["c", "d"]]


async def test_a_busy_endpoint_holds_up_nothing_while_another_is_free(system: _System) -> None:
    busy, free = await system.connect(), await system.connect()
    await system.ask("a", "b")
    for name in "cdef":
        await free.say()
        await system.ask(name)
    assert len(busy.messages) == 1
    assert free.names[1:] == [["c"], ["d"], ["e"], ["f"]]


async def test_of_the_endpoints_that_are_free_the_one_with_the_least_in_flight_goes_first(system: _System) -> None:
    loaded = await system.connect()
    await system.ask("a", "b", "c")
    await loaded.say()
    await loaded.say()
    idle = await system.connect()
    for name in "de":
        await system.ask(name)
        await idle.say()
    assert idle.names == [["d"], ["e"]]


async def test_an_endpoint_that_comes_takes_what_waits_for_a_busy_one(system: _System) -> None:
    busy = await system.connect()
    await system.ask("first")
    await system.ask("a")
    fresh = await system.connect()
    assert (busy.names, fresh.names) == ([["first"]], [["a"]])


async def test_an_endpoint_that_dies_loses_only_its_own_items_and_these_are_answered_by_another(system: _System) -> None:
    first = await system.connect()
    a, b = (await system.ask("a"))[0], (await system.ask("b"))[0]
    await first.say()
    second = await system.connect()
    (c,) = await system.ask("c")
    assert second.names == [["c"]]
    await second.say()
    await first.die()
    assert sorted(itertools.chain(*second.names)) == ["a", "b", "c"]
    await second.answer("c", "b", "a")
    assert await _values([a, b, c]) == [_value("a"), _value("b"), _value("c")]


async def test_an_item_that_is_sent_again_is_counted_and_shown_in_its_requests_span(system: _System) -> None:
    retried = Counter()
    system.coalescer = Coalescer("tokenizer", system._report, retried)
    spans = {name: Span("predict", SpanContext.new(is_sampled=True), None, 0) for name in "ab"}
    first, tasks = await system.connect(), []
    for name, span in spans.items():
        enter_span(span)  # the task takes it along
        tasks += await system.ask(name)
    enter_span(None)
    await first.answer("a")
    second = await system.connect()
    await first.die()
    await second.answer("b")
    await _values(tasks)
    assert {name: [event.name for event in span.events] for name, span in spans.items()} == {"a": [], "b": [Events.RETRIED]}
    assert retried.value == 1


async def test_items_of_an_endpoint_that_dies_are_shared_by_all_that_are_left(system: _System) -> None:
    dying = await system.connect()
    await system.ask("a")
    await system.ask("b", "c", "d")
    await dying.say()
    others = [await system.connect() for _ in range(2)]
    await dying.die()
    # Half of the four for whoever comes first, half of the two that are left for the other; the last is for who answers first.
    assert sorted(wire.names for wire in others) == [[["a", "b"]], [["c"]]]


async def test_items_sent_again_go_in_their_order_and_before_those_that_came_later(system: _System) -> None:
    first = await system.connect()
    await system.ask("a", "b")
    await system.ask("c", priority=_BULK)
    await first.say()
    second = await system.connect()
    await system.ask("occupies the second")
    await first.say()
    await system.ask("fills the first")
    await system.ask("d")
    await system.ask("e", priority=_BULK)
    await first.die()
    await second.say()
    assert second.names == [["occupies the second"], ["a", "b", "fills the first", "d", "c", "e"]]


async def test_an_endpoint_that_drains_gets_no_more_and_answers_what_it_has(system: _System) -> None:
    draining = await system.connect()
    (a,) = await system.ask("a")
    other = await system.connect()
    await system.ask("occupies the other")
    await draining.say()
    await draining.drain("a")
    (b,) = await system.ask("b")
    await other.say()
    assert (draining.names, other.names) == ([["a"]], [["occupies the other"], ["b"]])
    await draining.answer("a")
    await other.answer("b")
    assert await _values([a, b]) == [_value("a"), _value("b")]
    await draining.die()
    assert system.reports == [True]


async def test_what_a_draining_endpoint_has_not_read_is_sent_to_another_and_counts_as_no_loss(system: _System) -> None:
    draining = await system.connect()
    (asked,) = await system.ask("a")
    for _ in range(4):  # one more than the endpoints that may die with an item
        other = await system.connect()
        await draining.drain()
        assert other.names == [["a"]]
        draining = other
    await draining.answer("a")
    assert await _values([asked]) == [_value("a")]


async def test_an_endpoint_that_drains_is_told_nothing_of_who_left(system: _System) -> None:
    draining = await system.connect()
    (a,) = await system.ask("a")
    await system.connect()
    await draining.say()
    await draining.drain("a")
    a.cancel()
    await _settled()
    assert [message.abandoned for message in draining.messages] == [[]]


async def test_when_the_last_endpoint_drains_that_is_reported_once_and_whoever_waits_fails(system: _System) -> None:
    draining = await system.connect()
    (a,) = await system.ask("a")
    (unread,) = await system.ask("unread")
    await draining.drain("a")
    assert system.reports == [True, False]
    with pytest.raises(Unavailable, match=_UNREACHABLE):
        await unread
    with pytest.raises(Unavailable, match=_UNREACHABLE):
        await (await system.ask("b"))[0]
    await draining.answer("a")
    assert await _values([a]) == [_value("a")]
    await draining.die()
    assert system.reports == [True, False]


async def test_an_endpoint_that_takes_no_message_loses_it_to_another(system: _System) -> None:
    first, second = await system.connect(), await system.connect()
    for wire in (first, second):
        wire.send_fault = Unavailable("the stream has ended")
    third = await system.connect()
    (asked,) = await system.ask("a")
    await third.answer("a")
    assert await _values([asked]) == [_value("a")]


async def test_an_endpoint_that_dies_as_it_is_woken_leaves_the_item_to_another(system: _System) -> None:
    first, second = await system.connect(), await system.connect()
    for wire in (first, second):
        asyncio.get_running_loop().call_soon(wire.serving.cancel)
    third = await system.connect()
    (asked,) = await system.ask("a")
    await third.answer("a")
    assert await _values([asked]) == [_value("a")]


async def test_items_of_an_endpoint_that_is_dropped_go_to_another(system: _System) -> None:
    first = await system.connect()
    (asked,) = await system.ask("a")
    second = await system.connect()
    first.serving.cancel()
    await _settled()
    await second.answer("a")
    assert await _values([asked]) == [_value("a")]


async def test_an_item_whose_caller_left_is_not_sent_again(system: _System) -> None:
    first = await system.connect()
    left, _ = (await system.ask("left"))[0], await system.ask("stays")
    await first.say()
    second = await system.connect()
    left.cancel()
    await first.die()
    assert second.names == [["stays"]]


async def test_without_an_endpoint_an_item_fails_at_once_by_the_services_name(system: _System) -> None:
    with pytest.raises(Unavailable, match=_UNREACHABLE):
        await asyncio.wait_for(system.coalescer(_item("a")), _LIMIT_S)


async def test_when_the_last_endpoint_goes_whoever_waits_fails_at_once(system: _System) -> None:
    wire = await system.connect()
    asked = await system.ask("sent")
    asked += await system.ask("interactive")
    asked += await system.ask("bulk", priority=_BULK)
    await wire.die()
    for task in asked:
        with pytest.raises(Unavailable, match=_UNREACHABLE):
            await asyncio.wait_for(task, _LIMIT_S)
    with pytest.raises(Unavailable, match=_UNREACHABLE):
        await asyncio.wait_for(system.coalescer(_item("later")), _LIMIT_S)


async def test_a_caller_who_left_does_not_keep_the_others_from_failing_with_the_last_endpoint(system: _System) -> None:
    wire = await system.connect()
    await system.ask("sent")
    left, stays = await system.ask("left", "stays")
    left.cancel()
    await _settled()
    await wire.die()
    with pytest.raises(Unavailable, match=_UNREACHABLE):
        await asyncio.wait_for(stays, _LIMIT_S)


async def test_items_that_failed_with_the_last_endpoint_are_not_sent_to_the_next(system: _System) -> None:
    wire = await system.connect()
    asked = await system.ask("sent") + await system.ask("waiting")
    await wire.die()
    await asyncio.wait(asked)
    fresh = await system.connect()
    await system.ask("new")
    assert fresh.names == [["new"]]
    assert [type(task.exception()) for task in asked] == [Unavailable, Unavailable]


async def test_an_item_that_three_endpoints_died_with_fails_and_is_spared_the_fourth(system: _System) -> None:
    wire = await system.connect()
    (asked,) = await system.ask("deadly")
    for _ in range(3):
        following = await system.connect()
        assert not asked.done()
        await wire.die()
        wire = following
    with pytest.raises(Unavailable, match=_UNREACHABLE):
        await asyncio.wait_for(asked, _LIMIT_S)
    assert wire.names == []
    assert not wire.serving.done()


async def test_what_two_endpoints_died_with_is_sent_one_by_one_so_that_the_guilty_item_takes_no_other_along(system: _System) -> None:
    wires = [await system.connect()]
    innocent, *others = await system.ask("innocent", "guilty", "innocent too")
    for _ in range(2):
        wires.append(await system.connect())
        await wires[-2].die()
    third = wires[-1]
    assert third.names == [["innocent"]]
    (new,) = await system.ask("new")
    await third.say()
    assert third.names == [["innocent"], ["new"]]
    await third.answer("innocent", "new")
    assert third.names[2:] == [["guilty"]]
    fourth = await system.connect()
    assert fourth.names == [["innocent too"]]
    await third.die()
    with pytest.raises(Unavailable, match=_UNREACHABLE):
        await others[0]
    await fourth.answer("innocent too")
    assert await _values([innocent, new, others[1]]) == [_value("innocent"), _value("new"), _value("innocent too")]


@pytest.mark.parametrize("is_jammed", [False, True], ids=["does not answer", "takes nothing in"])
async def test_an_endpoint_that_is_stuck_is_dropped_and_its_items_go_to_another(
    system: _System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_jammed: bool
) -> None:
    stuck = await system.connect()
    stuck.is_jammed = is_jammed
    monkeypatch.setattr("neuronpipe.gateway.coalescing._STUCK_AFTER_S", 0.01)
    (asked,) = await system.ask("a")
    monkeypatch.undo()
    other = await system.connect()
    await asyncio.wait_for(stuck.serving, _LIMIT_S)
    await _settled()
    await other.answer("a")
    assert await _values([asked]) == [_value("a")]
    (record,) = caplog.records
    assert record.message == "a stage's process is stuck"
    assert record.__dict__["fields"] == {"stage": "tokenizer", "limit_s": 10.0, "items": 1}


async def test_an_endpoint_that_has_answered_may_take_its_time_over_the_items(system: _System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.gateway.coalescing._STUCK_AFTER_S", 0.01)
    wire = await system.connect()
    (asked,) = await system.ask("a")
    await wire.say()
    await asyncio.sleep(0.05)  # nothing happens
    assert not wire.serving.done()
    await wire.answer("a")
    assert await _values([asked]) == [_value("a")]


async def test_the_first_endpoint_and_the_end_of_the_last_are_reported(system: _System) -> None:
    assert system.reports == []
    first = await system.connect()
    assert system.reports == [True]
    second = await system.connect()
    await first.die()
    assert system.reports == [True]
    await second.die()
    assert system.reports == [True, False]
    await system.connect()
    assert system.reports == [True, False, True]


async def test_the_end_of_the_last_endpoint_is_reported_when_it_is_dropped(system: _System) -> None:
    wire = await system.connect()
    wire.serving.cancel()
    await asyncio.wait([wire.serving])
    assert system.reports == [True, False]


@pytest.mark.parametrize("fault", [RuntimeError("a bug"), InvalidInput("text", "a bug")], ids=["an exception", "another error of ours"])
async def test_a_bug_in_a_streams_receiving_comes_out(system: _System, fault: Exception) -> None:
    wire = await system.connect()
    await wire.fail(fault)
    with pytest.raises(type(fault), match="a bug"):
        await asyncio.wait_for(wire.serving, _LIMIT_S)


async def test_a_bug_in_a_streams_sending_comes_out_and_leaves_the_item_to_another(system: _System) -> None:
    wire = await system.connect()
    wire.send_fault = RuntimeError("a bug")
    (asked,) = await system.ask("a")
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(wire.serving, _LIMIT_S)
    with pytest.raises(Unavailable, match=_UNREACHABLE):
        await asked
