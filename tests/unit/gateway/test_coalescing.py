"""gateway/coalescing.py: who travels with whom, and what becomes of an item."""

import asyncio

import pytest

from neuronpipe.api.v1.inference_pb2 import Priority
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from neuronpipe.core.items import ModelKey, TokenizeItem
from neuronpipe.core.packed import Packed
from tests.suite.waiting import settled
from tests.unit.every_error import EVERY_ERROR
from tests.unit.gateway.coalescer import BULK, MODEL, Message, System, Wire, item, value, values


async def test_an_item_is_sent_at_once_and_alone_when_nothing_is_unanswered(system: System, wire: Wire) -> None:
    await system.ask("a")
    assert wire.names == [["a"]]


async def test_items_that_come_while_a_message_is_unanswered_travel_together_in_the_order_in_which_they_came(
    system: System, wire: Wire
) -> None:
    await system.ask("first")
    await system.ask("a")
    await system.ask("b", "c")
    assert wire.names == [["first"]]
    await wire.say()
    assert wire.names == [["first"], ["a", "b", "c"]]


async def test_an_endpoint_that_has_answered_gets_the_next_item_though_it_works_on_others(
    system: System, wire: Wire
) -> None:
    await system.ask("a")
    await wire.say()
    await system.ask("b")
    assert wire.names == [["a"], ["b"]]


async def test_interactive_items_go_before_bulk_items(system: System, wire: Wire) -> None:
    await system.ask("first")
    await system.ask("bulk 1", "bulk 2", priority=BULK)
    await system.ask("interactive", priority=Priority.PRIORITY_INTERACTIVE)
    await system.ask("unspecified")
    await wire.say()
    assert wire.names[1] == ["interactive", "unspecified", "bulk 1", "bulk 2"]


async def test_a_message_holds_no_more_items_than_the_limit_and_bulk_items_wait(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.gateway.stage_queue._MAX_ITEMS", 3)
    wire = await system.connect()
    await system.ask("first")
    await system.ask("bulk 1", "bulk 2", priority=BULK)
    await system.ask("a", "b")
    await wire.say()
    await wire.say()
    assert wire.names[1:] == [["a", "b", "bulk 1"], ["bulk 2"]]


async def test_a_message_ends_with_the_item_beyond_the_limit(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.gateway.stage_queue._MAX_BYTES", 1000)
    wire = await system.connect()
    await system.ask("first")
    # 600 bytes each: the second passes the limit. The last but one is larger than the limit by itself.
    for name, size_bytes in {"a": 600, "b": 600, "c": 600, "d": 5000, "e": 0}.items():
        system.tasks.append(asyncio.create_task(system.coalescer.send(item(name, b"x" * size_bytes))))
    await settled()
    for _ in range(3):
        await wire.say()
    assert wire.names[1:] == [["a", "b"], ["c", "d"], ["e"]]


async def test_the_value_of_an_outcome_is_the_items(system: System, wire: Wire) -> None:
    asked = await system.ask("a", "b", "c")
    await wire.answer("a")
    await wire.answer("c", "b")
    assert await values(asked) == [value("a"), value("b"), value("c")]


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
async def test_an_outcomes_error_is_raised_as_its_class_and_leaves_the_neighbours_alone(
    system: System, wire: Wire, error: NeuronpipeError
) -> None:
    await system.ask("first")
    failing, good = await system.ask("failing", "good")
    await wire.say()
    await wire.say((wire.id_of("failing"), error), (wire.id_of("good"), value("good")))
    with pytest.raises(type(error)) as caught:
        await failing
    assert vars(caught.value) == vars(error)
    assert await good == value("good")


async def test_outcomes_that_nobody_asked_for_change_nothing(system: System, wire: Wire) -> None:
    first, second = await system.ask("first", "second")
    await wire.say(
        (999, value("unknown")), (wire.id_of("first"), value("first")), (wire.id_of("first"), value("again"))
    )
    await wire.say((wire.id_of("first"), value("late")), (0, value("none")), (wire.id_of("second"), value("second")))
    assert await values([first, second]) == [value("first"), value("second")]
    assert not wire.serving.done()


async def test_every_item_has_a_number_of_its_own(system: System) -> None:
    wires = [await system.connect() for _ in range(2)]
    for _ in range(5):
        await system.ask("same", "same")
        for wire in wires:
            await wire.say()
    numbers = [item_id for wire in wires for message in wire.messages for item_id, _ in message.items]
    assert len(numbers) == 10
    assert len(set(numbers)) == 10


async def test_an_item_whose_caller_left_before_it_was_sent_never_is(system: System, wire: Wire) -> None:
    await system.ask("first")
    left, *_ = await system.ask("left", "stays")
    left.cancel()
    await wire.say()
    assert wire.names == [["first"], ["stays"]]
    assert [message.abandoned for message in wire.messages] == [[], []]


async def test_an_item_whose_caller_left_after_it_was_sent_is_abandoned_at_once(system: System, wire: Wire) -> None:
    (left,) = await system.ask("left")
    await wire.say()
    left.cancel()
    await settled()
    assert wire.messages[1] == Message([], [wire.id_of("left")])


async def test_an_item_abandoned_while_its_message_is_unanswered_goes_with_the_next(system: System, wire: Wire) -> None:
    (left,) = await system.ask("left")
    await system.ask("next")
    left.cancel()
    await wire.say()
    assert (wire.messages[1].names, wire.messages[1].abandoned) == (["next"], [wire.id_of("left")])


async def test_abandoned_items_are_told_once_and_leave_their_neighbours_alone(system: System, wire: Wire) -> None:
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


async def test_a_message_that_only_abandons_is_not_waited_for(system: System, wire: Wire) -> None:
    (left,) = await system.ask("left")
    await wire.say()
    left.cancel()
    await settled()
    await system.ask("next")
    assert wire.names == [["left"], [], ["next"]]


async def test_whoever_has_the_outcome_abandons_nothing(system: System, wire: Wire) -> None:
    (asked,) = await system.ask("a")
    await wire.answer("a")
    await asked
    await system.ask("b")
    assert wire.messages[1].abandoned == []


async def test_an_item_that_cannot_be_sent_fails_alone(system: System, wire: Wire) -> None:
    await system.ask("first")
    wire.refuses["too large"] = InvalidInput("input", "5 bytes")
    refused, good = await system.ask("too large", "good")
    await wire.say()
    assert wire.names == [["first"], ["good"]]
    with pytest.raises(InvalidInput, match=r"^input: 5 bytes$"):
        await refused
    await wire.answer("good")
    assert await good == value("good")


async def test_a_message_of_which_nothing_could_be_sent_is_not_waited_for(system: System, wire: Wire) -> None:
    wire.refuses["too large"] = InvalidInput("input", "5 bytes")
    await system.ask("too large")
    await system.ask("next")
    assert wire.names == [["next"]]


async def test_an_item_whose_caller_left_leaves_the_queue_at_once_with_its_input(system: System) -> None:
    freed: list[str] = []

    class Input(Packed[TaskInput]):
        def __del__(self) -> None:
            freed.append(self.data.decode())

    wire = await system.connect()
    await system.ask("occupies the endpoint")
    tasks = [
        asyncio.create_task(
            system.coalescer.send(
                TokenizeItem(Call(name, priority=priority), MODEL, Input(TaskInput, data=name.encode()))
            )
        )
        for name, priority in {"interactive": Priority.PRIORITY_INTERACTIVE, "bulk": BULK}.items()
    ]
    await settled()
    assert freed == []
    while tasks:
        tasks[-1].cancel()
        await asyncio.wait([tasks.pop()])
    assert sorted(freed) == ["bulk", "interactive"]
    assert wire.names == [["occupies the endpoint"]]


async def test_an_endpoints_share_of_the_queue_is_a_share_of_its_cost(system: System) -> None:
    first, second = await system.connect(), await system.connect()
    await system.ask("a", "b")
    await system.ask("dear", cost_tokens=30)
    await system.ask("c", "d", "e", cost_tokens=10)
    # Half of the 60 tokens, which are one item for the first that is ready, three for the other.
    await first.say()
    assert first.names[1:] == [["dear"]]
    await second.say()
    assert second.names[1:] == [["c", "d"]]  # by now half of 30


async def test_items_of_unknown_cost_count_as_one_token_each(system: System) -> None:
    first, _ = await system.connect(), await system.connect()
    await system.ask("a", "b")
    await system.ask("c", "d", "e", "f", cost_tokens=0)
    await first.say()
    assert first.names[1:] == [["c", "d"]]


async def test_the_oldest_items_of_all_models_travel_first(system: System, wire: Wire) -> None:
    one, two, newer = ModelKey("one", 1), ModelKey("two", 1), ModelKey("one", 2)
    await wire.announce(MODEL, one, two, newer)
    await system.ask("occupies the endpoint")
    await system.ask_for(one, "a")
    await system.ask_for(two, "b")
    await system.ask_for(newer, "bulk", priority=BULK)
    await system.ask_for(one, "c")
    await wire.say()
    assert wire.names[1:] == [["a", "b", "c", "bulk"]]
