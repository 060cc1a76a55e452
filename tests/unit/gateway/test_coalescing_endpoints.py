"""gateway/coalescing.py: which endpoint gets an item, and what becomes of the items of one that is lost."""

import asyncio
import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest

from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import InvalidInput, Unavailable
from neuronpipe.core.generated import NewTokens
from neuronpipe.core.items import ExecuteItem, ModelKey
from neuronpipe.core.metrics import Counter
from neuronpipe.core.names import Events
from neuronpipe.core.packed import NO_TENSORS
from neuronpipe.core.tracing import Span, SpanContext, enter_span
from neuronpipe.gateway.coalescing import Coalescer
from tests.suite.loop_clock import LoopClock
from tests.suite.waiting import cancelled, settled
from tests.unit.gateway.coalescer import BULK, LIMIT_S, MODEL, UNREACHABLE, System, Wire, item, value, values


async def test_several_endpoints_share_the_work(system: System) -> None:
    first, second = await system.connect(), await system.connect()
    await system.ask("a", "b")
    assert sorted(first.names + second.names) == [["a"], ["b"]]
    await system.ask("c", "d", "e", "f")
    # Half for each, though the first could take all: the second is ready as well within a millisecond.
    await first.say()
    assert first.names[1:] == [["c", "d"]]


async def test_a_busy_endpoint_holds_up_nothing_while_another_is_free(system: System) -> None:
    busy, free = await system.connect(), await system.connect()
    await system.ask("a", "b")
    for name in "cdef":
        await free.say()
        await system.ask(name)
    assert len(busy.messages) == 1
    assert free.names[1:] == [["c"], ["d"], ["e"], ["f"]]


async def test_of_the_endpoints_that_are_free_the_one_with_the_least_in_flight_goes_first(system: System) -> None:
    loaded = await system.connect()
    await system.ask("a", "b", "c")
    await loaded.say()
    await loaded.say()
    idle = await system.connect()
    for name in "de":
        await system.ask(name)
        await idle.say()
    assert idle.names == [["d"], ["e"]]


async def test_an_endpoint_that_comes_takes_what_waits_for_a_busy_one(system: System) -> None:
    busy = await system.connect()
    await system.ask("first")
    await system.ask("a")
    fresh = await system.connect()
    assert (busy.names, fresh.names) == ([["first"]], [["a"]])


async def test_an_endpoint_that_dies_loses_only_its_own_items_and_these_are_answered_by_another(system: System) -> None:
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
    assert await values([a, b, c]) == [value("a"), value("b"), value("c")]


async def test_an_item_that_is_sent_again_is_counted_and_shown_in_its_requests_span(system: System) -> None:
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
    await values(tasks)
    expected = {"a": [], "b": [Events.RETRIED]}
    assert {name: [event.name for event in span.events] for name, span in spans.items()} == expected
    assert retried.value == 1


async def test_items_of_an_endpoint_that_dies_are_shared_by_all_that_are_left(system: System) -> None:
    dying = await system.connect()
    await system.ask("a")
    await system.ask("b", "c", "d")
    await dying.say()
    others = [await system.connect() for _ in range(2)]
    await dying.die()
    # Half of the four for whoever comes first, half of the two that are left for the other; the last is for who answers
    # first.
    assert sorted(wire.names for wire in others) == [[["a", "b"]], [["c"]]]


async def test_items_sent_again_go_in_their_order_and_before_those_that_came_later(system: System) -> None:
    first = await system.connect()
    await system.ask("a", "b")
    await system.ask("c", priority=BULK)
    await first.say()
    second = await system.connect()
    await system.ask("occupies the second")
    await first.say()
    await system.ask("fills the first")
    await system.ask("d")
    await system.ask("e", priority=BULK)
    await first.die()
    await second.say()
    assert second.names == [["occupies the second"], ["a", "b", "fills the first", "d", "c", "e"]]


async def test_an_item_that_waited_only_for_its_grammar_is_answered_by_another(system: System) -> None:
    first, told = await system.connect(), list[NewTokens]()
    sink: Any = SimpleNamespace(put=told.append)
    text = ExecuteItem(Call("a"), MODEL, NO_TENSORS, GenerationOptions())
    task = asyncio.create_task(system.coalescer.send(text, sink))
    system.tasks.append(task)
    await settled()
    await first.say((first.id_of("a"), NewTokens((), GenerationFigures(), is_waiting=True)))
    second = await system.connect()
    await first.die()
    assert [tokens.is_waiting for tokens in told] == [True, False]
    await second.answer("a")
    assert await values([task]) == [value("a")]


async def test_a_text_comes_token_by_token_and_a_caller_who_leaves_abandons_it(system: System, wire: Wire) -> None:
    text, told = ExecuteItem(Call("a"), MODEL, NO_TENSORS, GenerationOptions()), list[NewTokens]()
    sink: Any = SimpleNamespace(put=told.append)
    sending = asyncio.create_task(system.coalescer.send(text, sink))
    await settled()
    await wire.say((wire.id_of("a"), NewTokens([7], GenerationFigures())))
    assert [tokens.token_ids for tokens in told] == [[7]]
    await cancelled(sending)
    await settled()
    assert wire.messages[-1].abandoned == [wire.id_of("a")]


async def test_an_endpoint_that_drains_gets_no_more_and_answers_what_it_has(system: System) -> None:
    draining = await system.connect()
    (a,) = await system.ask("a")
    second = await system.connect()
    await system.ask("occupies the other")
    await draining.say()
    await draining.drain("a")
    (b,) = await system.ask("b")
    await second.say()
    assert (draining.names, second.names) == ([["a"]], [["occupies the other"], ["b"]])
    await draining.answer("a")
    await second.answer("b")
    assert await values([a, b]) == [value("a"), value("b")]
    await draining.die()
    assert system.reports == [True]


async def test_what_a_draining_endpoint_has_not_read_is_sent_to_another_and_counts_as_no_loss(system: System) -> None:
    draining = await system.connect()
    (asked,) = await system.ask("a")
    for _ in range(4):  # one more than the endpoints that may die with an item
        second = await system.connect()
        await draining.drain()
        assert second.names == [["a"]]
        draining = second
    await draining.answer("a")
    assert await values([asked]) == [value("a")]


@pytest.mark.parametrize("ending", ["drains", "drains before it has answered", "is retired", "is retired and drains"])
async def test_an_endpoint_that_ends_is_told_of_items_that_nobody_waits_for_and_of_none_twice(
    system: System, wire: Wire, ending: str
) -> None:
    asked = await system.ask("a", "b", "c", "d")
    await system.connect()
    if ending != "drains before it has answered":
        await wire.say()
    if "retired" in ending:
        await wire.retire()
    if "drains" in ending:
        await wire.drain("a", "b", "c", "d")
    for name, task in zip("ab", asked, strict=False):
        task.cancel()
        await settled()
        assert wire.messages[-1].abandoned == [wire.id_of(name)]
    await wire.answer("c")
    assert await values(asked[2:3]) == [value("c")]
    assert [message.names for message in wire.messages] == [["a", "b", "c", "d"], [], []]


async def test_the_last_item_of_an_endpoint_that_drains_is_told_when_nobody_waits_for_it(system: System) -> None:
    draining = await system.connect()
    (last,) = await system.ask("a")
    await draining.drain("a")
    last.cancel()
    await settled()
    assert draining.messages[-1].abandoned == [draining.id_of("a")]
    await draining.die()


async def test_an_endpoint_that_drains_and_reads_no_more_still_answers(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.gateway.stage_endpoint._STUCK_AFTER_S", 0.01)
    old = await system.connect()
    left, asked = await system.ask("a", "b")
    await old.say()
    await old.drain("a", "b")
    old.is_jammed = True
    left.cancel()
    await asyncio.sleep(0.1)  # to prove that nothing happens
    await old.answer("b")
    assert await values([asked]) == [value("b")]


async def test_when_the_last_endpoint_drains_that_is_reported_once_and_whoever_waits_fails(system: System) -> None:
    draining = await system.connect()
    (a,) = await system.ask("a")
    (unread,) = await system.ask("unread")
    await draining.drain("a")
    assert system.reports == [True, False]
    with pytest.raises(Unavailable, match=UNREACHABLE):
        await unread
    with pytest.raises(Unavailable, match=UNREACHABLE):
        await (await system.ask("b"))[0]
    await draining.answer("a")
    assert await values([a]) == [value("a")]
    await draining.die()
    assert system.reports == [True, False]


@pytest.mark.parametrize("dies", [False, True], ids=["takes no message", "dies as it is woken"])
async def test_an_endpoint_that_cannot_take_an_item_leaves_it_to_another(system: System, dies: bool) -> None:
    for wire in [await system.connect() for _ in range(2)]:
        if dies:
            asyncio.get_running_loop().call_soon(wire.serving.cancel)
        else:
            wire.send_fault = Unavailable("the stream has ended")
    third = await system.connect()
    (asked,) = await system.ask("a")
    await third.answer("a")
    assert await values([asked]) == [value("a")]


async def test_items_of_an_endpoint_that_is_dropped_go_to_another(system: System) -> None:
    first = await system.connect()
    (asked,) = await system.ask("a")
    second = await system.connect()
    first.serving.cancel()
    await settled()
    await second.answer("a")
    assert await values([asked]) == [value("a")]


async def test_an_item_whose_caller_left_is_not_sent_again(system: System) -> None:
    first = await system.connect()
    left, _ = (await system.ask("left"))[0], await system.ask("stays")
    await first.say()
    second = await system.connect()
    left.cancel()
    await first.die()
    assert second.names == [["stays"]]


async def test_without_an_endpoint_an_item_fails_at_once_by_the_services_name(system: System) -> None:
    with pytest.raises(Unavailable, match=UNREACHABLE):
        await asyncio.wait_for(system.coalescer.send(item("a")), LIMIT_S)


async def test_when_the_last_endpoint_goes_whoever_waits_fails_at_once(system: System, wire: Wire) -> None:
    asked = await system.ask("sent")
    asked += await system.ask("interactive")
    asked += await system.ask("bulk", priority=BULK)
    await wire.die()
    for task in asked:
        with pytest.raises(Unavailable, match=UNREACHABLE):
            await asyncio.wait_for(task, LIMIT_S)
    with pytest.raises(Unavailable, match=UNREACHABLE):
        await asyncio.wait_for(system.coalescer.send(item("later")), LIMIT_S)


async def test_a_caller_who_left_does_not_keep_the_others_from_failing_with_the_last_endpoint(
    system: System, wire: Wire
) -> None:
    await system.ask("sent")
    left, stays = await system.ask("left", "stays")
    left.cancel()
    await settled()
    await wire.die()
    with pytest.raises(Unavailable, match=UNREACHABLE):
        await asyncio.wait_for(stays, LIMIT_S)


async def test_items_that_failed_with_the_last_endpoint_are_not_sent_to_the_next(system: System, wire: Wire) -> None:
    asked = await system.ask("sent") + await system.ask("waiting")
    await wire.die()
    await asyncio.wait(asked)
    fresh = await system.connect()
    await system.ask("new")
    assert fresh.names == [["new"]]
    assert [type(task.exception()) for task in asked] == [Unavailable, Unavailable]


async def test_an_item_that_three_endpoints_died_with_fails_before_the_fourth(system: System, wire: Wire) -> None:
    (asked,) = await system.ask("deadly")
    for _ in range(3):
        following = await system.connect()
        assert not asked.done()
        await wire.die()
        wire = following
    with pytest.raises(Unavailable, match=UNREACHABLE):
        await asyncio.wait_for(asked, LIMIT_S)
    assert wire.names == []
    assert not wire.serving.done()


async def test_what_two_endpoints_died_with_is_sent_one_by_one_so_that_the_guilty_item_takes_no_other_along(
    system: System,
) -> None:
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
    with pytest.raises(Unavailable, match=UNREACHABLE):
        await others[0]
    await fourth.answer("innocent too")
    assert await values([innocent, new, others[1]]) == [value("innocent"), value("new"), value("innocent too")]


@pytest.mark.parametrize("is_jammed", [False, True], ids=["does not answer", "takes nothing in"])
async def test_an_endpoint_that_is_stuck_is_dropped_and_its_items_go_to_another(
    system: System, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_jammed: bool
) -> None:
    monkeypatch.setattr("neuronpipe.gateway.stage_endpoint._STUCK_AFTER_S", 0.1)
    stuck = await system.connect()
    stuck.is_jammed = is_jammed
    (asked,) = await system.ask("a")
    second = await system.connect()
    await asyncio.wait_for(stuck.serving, LIMIT_S)
    monkeypatch.undo()
    await settled()
    await second.answer("a")
    assert await values([asked]) == [value("a")]
    (record,) = caplog.records
    assert record.message == "a stage's process is stuck"
    assert record.__dict__["fields"] == {"stage": "tokenizer", "limit_s": 0.1, "items": 1}


async def test_no_endpoint_is_stuck_because_the_gateway_stood_still(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.gateway.stage_endpoint._STUCK_AFTER_S", 0.2)
    wire = await system.connect()
    (asked,) = await system.ask("a")
    time.sleep(0.5)  # as if the process were stopped: timers are due before the answer is read
    await asyncio.sleep(0.05)
    assert not wire.serving.done()
    await wire.answer("a")
    assert await values([asked]) == [value("a")]


async def test_a_standstill_of_the_gateway_late_in_the_wait_for_an_answer_is_no_time_of_the_endpoint(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.gateway.stage_endpoint._STUCK_AFTER_S", 100)
    clock = LoopClock(monkeypatch)
    wire = await system.connect()
    (asked,) = await system.ask("a")
    await clock.run(105)  # the first look comes within 10 s
    await clock.jump(1000)
    assert not wire.serving.done()
    await wire.answer("a")
    assert await values([asked]) == [value("a")]


async def test_an_endpoint_that_has_answered_may_take_its_time_over_the_items(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.gateway.stage_endpoint._STUCK_AFTER_S", 0.01)
    wire = await system.connect()
    (asked,) = await system.ask("a")
    await wire.say()
    await asyncio.sleep(0.05)  # nothing happens
    assert not wire.serving.done()
    await wire.answer("a")
    assert await values([asked]) == [value("a")]


async def test_an_endpoint_with_another_bundle_of_a_version_gets_no_items_for_it(
    system: System, caplog: pytest.LogCaptureFixture
) -> None:
    other = ModelKey("other", 1)
    first, second = await system.connect(), await system.connect()
    system.coalescer.set_digests({MODEL: "a" * 64, other: "c" * 64})
    for _ in range(2):
        await first.announce_bundles({MODEL: "a" * 64})
        await second.announce_bundles({MODEL: "b" * 64, other: "c" * 64})
    await system.ask("a", "b")
    await system.ask_for(other, "c")
    assert (first.names, second.names) == ([["a", "b"]], [["c"]])
    problem = (
        "ipv4:10.0.0.7:50051 has another bundle of this version: its digest is bbbbbbbbbbbbbbbb, the gateway has "
        "aaaaaaaaaaaaaaaa"
    )
    assert system.coalescer.problem_of(MODEL) == f"tokenizer: {problem}"
    (record,) = caplog.records
    assert record.message == "a stage has another bundle of a version"
    fields = {"stage": "tokenizer", "model": "m", "version": 1, "problem": problem}
    assert record.__dict__["fields"] == fields


async def test_an_endpoint_gets_items_again_when_the_gateway_has_its_bundle(system: System) -> None:
    system.coalescer.set_digests({MODEL: "a"})
    wire = await system.connect()
    await wire.announce_bundles({MODEL: "b"})
    with pytest.raises(Unavailable, match="no process of the tokenizer service has model 'm' version 1"):
        await system.coalescer.send(item("a"))
    system.coalescer.set_digests({MODEL: "b"})
    await system.ask("b")
    assert wire.names == [["b"]]
    assert system.coalescer.problem_of(MODEL) == ""


async def test_the_first_endpoint_and_the_end_of_the_last_are_reported(system: System) -> None:
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


async def test_the_end_of_the_last_endpoint_is_reported_when_it_is_dropped(system: System, wire: Wire) -> None:
    await cancelled(wire.serving)
    assert system.reports == [True, False]


@pytest.mark.parametrize(
    "fault", [RuntimeError("a bug"), InvalidInput("text", "a bug")], ids=["an exception", "another error of ours"]
)
async def test_a_bug_in_a_streams_receiving_comes_out(wire: Wire, fault: Exception) -> None:
    await wire.fail(fault)
    with pytest.raises(type(fault), match="a bug"):
        await asyncio.wait_for(wire.serving, LIMIT_S)


async def test_a_bug_in_a_streams_sending_comes_out_and_leaves_the_item_to_another(system: System, wire: Wire) -> None:
    wire.send_fault = RuntimeError("a bug")
    (asked,) = await system.ask("a")
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(wire.serving, LIMIT_S)
    with pytest.raises(Unavailable, match=UNREACHABLE):
        await asked


async def test_an_endpoint_is_as_busy_as_what_it_works_on_costs(system: System) -> None:
    dear = await system.connect()
    await system.ask("dear", cost_tokens=100)
    await dear.say()
    many = await system.connect()
    for name in "abc":
        await system.ask(name, cost_tokens=10)
        await many.say()
    assert many.names == [["a"], ["b"], ["c"]]
    await dear.answer("dear")
    await system.ask("d", cost_tokens=10)
    assert dear.names == [["dear"], ["d"]]


_ONE, _TWO = ModelKey("one", 1), ModelKey("two", 7)
_NO_TWO = r"^no process of the tokenizer service has model 'two' version 7$"


async def test_an_item_goes_only_to_endpoints_that_have_its_model(system: System) -> None:
    of_one, both, of_two = await system.connect(_ONE), await system.connect(_ONE, _TWO), await system.connect(_TWO)
    for name, model in {"a": _ONE, "b": _TWO, "c": _ONE, "d": _TWO}.items():
        await system.ask_for(model, name)
    assert {name for names in of_one.names for name in names} <= {"a", "c"}
    assert {name for names in of_two.names for name in names} <= {"b", "d"}
    for _ in range(2):
        for wire in (of_one, both, of_two):
            await wire.say()
    assert sorted(itertools.chain(*of_one.names, *both.names, *of_two.names)) == ["a", "b", "c", "d"]


async def test_an_item_whose_model_is_busy_does_not_hold_up_those_of_other_models(system: System) -> None:
    of_one, of_two = await system.connect(_ONE), await system.connect(_TWO)
    await system.ask_for(_ONE, "occupies it")
    await system.ask_for(_ONE, "waits")
    await system.ask_for(_TWO, "passes")
    assert (of_one.names, of_two.names) == ([["occupies it"]], [["passes"]])


async def test_an_endpoint_takes_its_share_only_of_models_that_it_has(system: System) -> None:
    _, both = await system.connect(_ONE), await system.connect(_ONE, _TWO)
    await system.ask_for(_ONE, "a", "b")
    await system.ask_for(_ONE, "c", "d")
    await system.ask_for(_TWO, "e", "f")
    await both.say()
    # Half of the two that the other can take, and all that it alone can.
    assert both.names[1:] == [["c", "d", "e"]]


async def test_a_model_that_no_endpoint_has_fails_at_once_by_its_name_and_version(system: System) -> None:
    await system.connect(_ONE)
    with pytest.raises(Unavailable, match=_NO_TWO):
        await asyncio.wait_for(system.coalescer.send(item("a", model=_TWO)), LIMIT_S)


@pytest.mark.parametrize("ending", ["goes", "drops the model", "drains", "is retired"])
async def test_when_the_last_endpoint_with_a_model_ends_whoever_waits_for_it_fails_and_the_others_do_not(
    system: System, ending: str
) -> None:
    of_one, both = await system.connect(_ONE), await system.connect(_ONE, _TWO)
    (first,) = await system.ask_for(_TWO, "occupies it")
    (waiting,) = await system.ask_for(_TWO, "waits")
    (answered,) = await system.ask_for(_ONE, "of the other model")
    if ending == "goes":
        await both.die()
    elif ending == "drops the model":
        await both.announce(_ONE)
    elif ending == "drains":
        await both.drain("occupies it")
    else:
        await both.retire()
    with pytest.raises(Unavailable, match=_NO_TWO):
        await asyncio.wait_for(waiting, LIMIT_S)
    with pytest.raises(Unavailable, match=_NO_TWO):
        await asyncio.wait_for(system.coalescer.send(item("later", model=_TWO)), LIMIT_S)
    if ending != "goes":
        await both.answer("occupies it")
        assert await first == value("occupies it")
    await of_one.answer("of the other model")
    assert await answered == value("of the other model")


async def test_a_model_that_an_endpoint_gets_is_asked_for_there(system: System) -> None:
    wire = await system.connect(_ONE)
    await wire.announce(_ONE, _TWO)
    await system.ask_for(_TWO, "a")
    assert wire.names == [["a"]]


async def test_a_retired_endpoint_gets_nothing_new_answers_what_it_has_and_is_then_let_go(system: System) -> None:
    retried = Counter()
    system.coalescer = Coalescer("tokenizer", system._report, retried)
    retired = await system.connect()
    a, b = await system.ask("a", "b")
    await retired.say()
    second = await system.connect()
    await retired.retire()
    (c,) = await system.ask("c")
    assert (retired.names, second.names) == ([["a", "b"]], [["c"]])
    await retired.answer("a")
    await settled()
    assert not retired.serving.done()
    await retired.answer("b")
    await asyncio.wait_for(retired.serving, LIMIT_S)
    await second.answer("c")
    assert await values([a, b, c]) == [value("a"), value("b"), value("c")]
    assert (retried.value, system.reports) == (0, [True])


async def test_a_retired_endpoint_that_has_nothing_to_do_is_let_go_at_once(system: System) -> None:
    await system.connect()
    idle = await system.connect()
    await idle.retire()
    await asyncio.wait_for(idle.serving, LIMIT_S)


async def test_a_retired_endpoint_is_let_go_when_the_last_caller_leaves(system: System) -> None:
    retired = await system.connect()
    (left,) = await system.ask("a")
    await system.connect()
    await retired.retire()
    left.cancel()
    await asyncio.wait_for(retired.serving, LIMIT_S)


async def test_what_a_retired_endpoint_does_not_answer_in_time_goes_to_another(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neuronpipe.gateway.stage_endpoint._RETIRED_LIMIT_S", 0.01)
    retired = await system.connect()
    (asked,) = await system.ask("a")
    second = await system.connect()
    await retired.retire()
    await asyncio.wait_for(retired.serving, LIMIT_S)
    await settled()
    await second.answer("a")
    assert await asked == value("a")


async def test_a_retired_endpoint_that_answers_may_take_longer(system: System, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.gateway.stage_endpoint._RETIRED_LIMIT_S", 2.0)
    retired = await system.connect()
    asked = await system.ask(*"abcde")
    await system.connect()
    await retired.retire()
    for name in "abcde":
        await asyncio.sleep(0.6)
        await retired.answer(name)
    assert await values(asked) == [value(name) for name in "abcde"]
    await asyncio.wait_for(retired.serving, LIMIT_S)


async def test_retired_endpoints_that_end_with_an_item_do_not_count_as_its_losses(system: System, wire: Wire) -> None:
    (asked,) = await system.ask("a")
    for _ in range(4):  # one more than the endpoints that may die with an item
        following = await system.connect()
        await wire.retire()
        await wire.die()
        wire = following
    await wire.answer("a")
    assert await asked == value("a")
