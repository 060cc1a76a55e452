"""gateway/coalescing.py: who travels with whom, and what becomes of an item."""

import asyncio
from typing import Any

import pytest

from neuronpipe.api.v1 import stages_pb2
from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.stages_pb2 import EncodedInput, TokenizeOutcome
from neuronpipe.api.v1.tasks_pb2 import TaskResult, TextClassificationResult
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.core.status import to_status
from tests.unit.every_error import EVERY_ERROR
from tests.unit.gateway.coalescer import BULK, Message, System, item, outcome, settled, value, values


async def test_an_item_is_sent_at_once_and_alone_when_nothing_is_unanswered(system: System) -> None:
    wire = await system.connect()
    await system.ask("a")
    assert wire.names == [["a"]]


async def test_items_that_come_while_a_message_is_unanswered_travel_together_in_the_order_in_which_they_came(system: System) -> None:
    wire = await system.connect()
    await system.ask("first")
    await system.ask("a")
    await system.ask("b", "c")
    assert wire.names == [["first"]]
    await wire.say()
    assert wire.names == [["first"], ["a", "b", "c"]]


async def test_an_endpoint_that_has_answered_gets_the_next_item_though_it_works_on_others(system: System) -> None:
    wire = await system.connect()
    await system.ask("a")
    await wire.say()
    await system.ask("b")
    assert wire.names == [["a"], ["b"]]


async def test_interactive_items_go_before_bulk_items(system: System) -> None:
    wire = await system.connect()
    await system.ask("first")
    await system.ask("bulk 1", "bulk 2", priority=BULK)
    await system.ask("interactive", priority=Priority.PRIORITY_INTERACTIVE)
    await system.ask("unspecified")
    await wire.say()
    assert wire.names[1] == ["interactive", "unspecified", "bulk 1", "bulk 2"]


async def test_a_message_holds_no_more_items_than_the_limit_and_bulk_items_wait(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.gateway.coalescing._MAX_ITEMS", 3)
    wire = await system.connect()
    await system.ask("first")
    await system.ask("bulk 1", "bulk 2", priority=BULK)
    await system.ask("a", "b")
    await wire.say()
    await wire.say()
    assert wire.names[1:] == [["a", "b", "bulk 1"], ["bulk 2"]]


async def test_a_message_ends_with_the_item_that_passes_the_limit_of_bytes(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.gateway.coalescing._MAX_BYTES", 1000)
    wire = await system.connect()
    await system.ask("first")
    # 600 bytes and a bit each: the second passes the limit. The last but one is larger than the limit by itself.
    for name, size_bytes in {"a": 600, "b": 600, "c": 600, "d": 5000, "e": 0}.items():
        system.tasks.append(asyncio.create_task(system.coalescer(item(name, "x" * size_bytes))))
    await settled()
    for _ in range(3):
        await wire.say()
    assert wire.names[1:] == [["a", "b"], ["c", "d"], ["e"]]


async def test_the_value_of_an_outcome_is_the_items(system: System) -> None:
    wire = await system.connect()
    asked = await system.ask("a", "b", "c")
    await wire.answer("a")
    await wire.answer("c", "b")
    assert await values(asked) == [value("a"), value("b"), value("c")]


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
async def test_every_stages_outcomes_are_understood(system: System, outcome: Any, value: object) -> None:
    wire = await system.connect()
    asked = await system.ask("a")
    outcome.item_id = wire.id_of("a")
    await wire.say(outcome)
    assert await values(asked) == [value]


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_an_outcomes_error_is_raised_as_its_class_and_leaves_the_neighbours_alone(system: System, error: NeuronpipeError) -> None:
    wire = await system.connect()
    await system.ask("first")
    failing, good = await system.ask("failing", "good")
    await wire.say()
    await wire.say(TokenizeOutcome(item_id=wire.id_of("failing"), error=to_status(error)), outcome(wire.id_of("good"), "good"))
    with pytest.raises(type(error)) as caught:
        await failing
    assert vars(caught.value) == vars(error)
    assert await good == value("good")


async def test_outcomes_that_nobody_asked_for_change_nothing(system: System) -> None:
    wire = await system.connect()
    first, second = await system.ask("first", "second")
    await wire.say(outcome(999, "unknown"), outcome(wire.id_of("first"), "first"), outcome(wire.id_of("first"), "again"))
    await wire.say(outcome(wire.id_of("first"), "late"), outcome(0, "none"), outcome(wire.id_of("second"), "second"))
    assert await values([first, second]) == [value("first"), value("second")]
    assert not wire.serving.done()


async def test_every_item_has_a_number_of_its_own(system: System) -> None:
    wires = [await system.connect() for _ in range(2)]
    for _ in range(5):
        await system.ask("same", "same")
        for wire in wires:
            await wire.say()
    numbers = [item.context.item_id for wire in wires for message in wire.messages for item in message.items]
    assert len(numbers) == 10
    assert len(set(numbers)) == 10


async def test_an_item_whose_caller_left_before_it_was_sent_never_is(system: System) -> None:
    wire = await system.connect()
    await system.ask("first")
    left, *_ = await system.ask("left", "stays")
    left.cancel()
    await wire.say()
    assert wire.names == [["first"], ["stays"]]
    assert [message.abandoned for message in wire.messages] == [[], []]


async def test_an_item_whose_caller_left_after_it_was_sent_is_told_as_abandoned_at_once(system: System) -> None:
    wire = await system.connect()
    (left,) = await system.ask("left")
    await wire.say()
    left.cancel()
    await settled()
    assert wire.messages[1] == Message([], [wire.id_of("left")])


async def test_an_item_abandoned_while_its_message_is_unanswered_is_told_with_the_next(system: System) -> None:
    wire = await system.connect()
    (left,) = await system.ask("left")
    await system.ask("next")
    left.cancel()
    await wire.say()
    assert (wire.messages[1].names, wire.messages[1].abandoned) == (["next"], [wire.id_of("left")])


async def test_abandoned_items_are_told_once_and_leave_their_neighbours_alone(system: System) -> None:
    wire = await system.connect()
    await system.ask("first")
    left, stays = await system.ask("left", "stays")
    await wire.say()
    left.cancel()
    await wire.say()
    # The endpoint had the outcome on its way already.
    await wire.answer("left", "stays")
    assert await stays == value("stays")
    await system.ask("later")
    assert [message.abandoned for message in wire.messages] == [[], [], [wire.id_of("left")], []]


async def test_a_message_that_only_abandons_is_not_waited_for(system: System) -> None:
    wire = await system.connect()
    (left,) = await system.ask("left")
    await wire.say()
    left.cancel()
    await settled()
    await system.ask("next")
    assert wire.names == [["left"], [], ["next"]]


async def test_whoever_has_the_outcome_abandons_nothing(system: System) -> None:
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
    system: System, clock: _Clock, remaining_ns: int, waits_s: float, expected_ns: int
) -> None:
    wire = await system.connect()
    await system.ask("first")
    await system.ask("a", remaining_ns=remaining_ns)
    clock.now_s += waits_s
    await wire.say()
    assert wire.messages[1].items[0].context.remaining_ns == expected_ns


async def test_an_item_sent_again_carries_what_is_left_by_then(system: System, clock: _Clock) -> None:
    first = await system.connect()
    await system.ask("a", remaining_ns=3_000_000_000)
    second = await system.connect()
    clock.now_s += 1
    await first.die()
    assert second.messages[0].items[0].context.remaining_ns == 2_000_000_000
