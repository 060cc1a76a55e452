"""gateway/held_items.py: items whose model no endpoint has wait for one, within limits."""

import asyncio
import itertools

import pytest

from neuronpipe.core.callers import Caller
from neuronpipe.core.deadlines import HeldTime
from neuronpipe.core.errors import Overloaded, Unavailable
from neuronpipe.core.items import ModelKey
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Events, Metrics
from neuronpipe.core.tracing import Span, SpanContext, enter_span
from neuronpipe.gateway.coalescing import Coalescer
from neuronpipe.gateway.held_items import HeldItems
from tests.suite.waiting import settled
from tests.unit.gateway.coalescer import MODEL, UNREACHABLE, System, item, value, values

_OTHER = ModelKey("other", 1)


@pytest.fixture
def held_items() -> HeldItems:
    return HeldItems(2, 100)


@pytest.fixture
async def held(system: System, held_items: HeldItems) -> System:
    """The system, which holds two items of a hundred bytes together."""
    system.coalescer = Coalescer("tokenizer", system._report, held_items=held_items)
    return system


async def test_an_endpoint_that_drains_while_it_is_told_what_is_needed_gets_nothing_that_is_held(held: System) -> None:
    draining = await held.connect(MODEL)
    draining.takes_needed.clear()
    held.coalescer.set_needed(frozenset({MODEL}))
    await settled()
    await draining.drain()
    (task,) = await held.ask("a")
    draining.takes_needed.set()
    await settled()
    wire = await held.connect(MODEL)
    await wire.answer("a")
    assert await values([task]) == [value("a")]
    assert draining.names == []
    await draining.die()


async def test_an_item_is_held_until_an_endpoint_comes_that_has_its_model(held: System) -> None:
    (task,) = await held.ask("a")
    other_wire = await held.connect(_OTHER)
    assert (other_wire.names, task.done()) == ([], False)
    wire = await held.connect(MODEL)
    await wire.answer("a")
    assert await values([task]) == [value("a")]


async def test_an_item_is_held_again_when_its_endpoint_stops_before_it_has_read_it(held: System) -> None:
    first = await held.connect()
    (task,) = await held.ask("a")
    await first.drain()
    assert not task.done()
    second = await held.connect()
    await second.answer("a")
    assert await values([task]) == [value("a")]


@pytest.mark.parametrize("ending", ["dies", "drains", "is retired", "has its model no more"])
async def test_items_that_are_held_again_count_for_their_own_tenants_and_requests(system: System, ending: str) -> None:
    held_items = HeldItems(18, 1 << 20)
    system.coalescer = Coalescer("tokenizer", system._report, held_items=held_items)
    records: dict[str, HeldTime | None] = {}

    async def ask(tenant: str, name: str) -> object:
        records[name] = held_items.new_time()
        return await system.coalescer.send(item(name, caller=Caller(tenant, tenant), held=records[name]))

    wire = await system.connect(MODEL)
    await system.ask("occupies it")
    greedy = {f"greedy {number}": asyncio.create_task(ask("greedy", f"greedy {number}")) for number in range(18)}
    await settled()
    if ending == "dies":
        await wire.die()
    elif ending == "drains":
        await wire.drain("occupies it")
    elif ending == "is retired":
        await wire.retire()
    else:
        await wire.announce()
    # As if the process had never been there: of 18 places, eight times what is left over.
    await settled()
    refused = {name for name, task in greedy.items() if task.done()}
    assert {type(greedy[name].exception()) for name in refused} == {Overloaded}
    assert len(refused) in (2, 3)  # three where what had occupied the process is held as well, for no tenant
    held = {name: record.service for name, record in records.items() if record}
    assert held == {name: "" if name in refused else "tokenizer" for name in greedy}
    other_task = asyncio.create_task(ask("other", "other"))
    await settled()
    assert not other_task.done()
    for task in (*greedy.values(), other_task):
        task.cancel()
    await asyncio.gather(*greedy.values(), other_task, return_exceptions=True)


async def test_a_request_is_held_until_none_of_its_items_is(held: System, held_items: HeldItems) -> None:
    record = held_items.new_time()
    assert record
    first, second = [*await held.ask("a", held=record), *await held.ask_for(_OTHER, "b", held=record)]
    wire = await held.connect(MODEL)
    assert (wire.names, record.service) == ([["a"]], "tokenizer")
    other_wire = await held.connect(_OTHER)
    assert (other_wire.names, record.service) == ([["b"]], "")
    await wire.answer("a")
    await other_wire.answer("b")
    assert await values([first, second]) == [value("a"), value("b")]


async def test_the_item_that_is_one_too_many_is_refused_and_a_place_is_free_when_a_caller_leaves(held: System) -> None:
    first, _ = await held.ask("a", "b")
    problem = r"^2 requests are held .* the limit is 2 \(the gateway's max_held_requests\)$"
    with pytest.raises(Overloaded, match=problem) as refused:
        await held.coalescer.send(item("c"))
    assert refused.value.retry_after_s > 0
    first.cancel()
    await settled()
    (third,) = await held.ask("c")
    wire = await held.connect()
    assert wire.names == [["b", "c"]]
    await wire.answer("c")
    assert await values([third]) == [value("c")]


async def test_items_are_held_up_to_a_number_of_bytes_and_a_single_one_of_any_size(held: System) -> None:
    large = asyncio.create_task(held.coalescer.send(item("large", b"x" * 150)))
    await settled()
    with pytest.raises(Overloaded, match=r"^150 bytes are held .* the limit is 100$"):
        await held.coalescer.send(item("small", b"x"))
    large.cancel()


async def test_an_item_for_a_model_that_every_endpoint_failed_to_load_fails_at_once(held: System) -> None:
    (task,) = await held.ask("a")
    first, second = await held.connect(_OTHER), await held.connect(_OTHER)
    await first.fail_to_load(MODEL, "no room", _OTHER)
    assert not task.done()  # the second may still load it
    await second.fail_to_load(MODEL, "no room", _OTHER)
    with pytest.raises(Unavailable, match="no process of the tokenizer service has model 'm' version 1"):
        await task


async def test_draining_ends_what_is_held_and_holds_no_more(held: System, held_items: HeldItems) -> None:
    (task,) = await held.ask("a")
    await held_items.stop()
    with pytest.raises(Unavailable, match="the gateway is stopping"):
        await task
    with pytest.raises(Unavailable, match="the gateway is stopping"):
        await held.coalescer.send(item("b"))


async def test_nothing_is_held_without_a_limit(system: System) -> None:
    with pytest.raises(Unavailable, match=UNREACHABLE):
        await system.coalescer.send(item("a"))


async def test_metrics_and_the_span_tell_how_long_an_item_was_held_and_how_that_ended(system: System) -> None:
    meters = Meters()
    system.coalescer = Coalescer("tokenizer", system._report, held_items=HeldItems(2, 100, meters))
    span = Span("predict", SpanContext.new(is_sampled=True), None, 0)
    enter_span(span)
    sent, left = await system.ask("a", "b")
    enter_span(None)
    held = next(family for family in meters.families() if family.instrument is Metrics.HELD)
    assert [held.number(series) for series in held.series.values()] == [2]
    left.cancel()
    await settled()
    wire = await system.connect()
    await wire.answer("a")
    await values([sent])
    assert [held.number(series) for series in held.series.values()] == [0]
    assert meters.counter(Metrics.HELD_ENDED, "tokenizer", "sent").value == 1
    assert meters.counter(Metrics.HELD_ENDED, "tokenizer", "ended").value == 1
    assert sum(meters.histogram(Metrics.HELD_DURATION, "tokenizer").counts) == 2
    assert [event.name for event in span.events] == [Events.HELD, Events.RELEASED] * 2


def test_times_in_which_several_items_of_a_request_are_held_count_once() -> None:
    held = HeldTime()
    for began_ns, ended_ns in (10, 30), (20, 40), (25, 35), (50, 60):
        held.add(began_ns, ended_ns)
    assert held.total_ns == (40 - 10) + (60 - 50)


async def test_an_endpoint_that_has_a_model_in_memory_gets_its_items_alone(system: System) -> None:
    first, second = await system.connect(MODEL, _OTHER), await system.connect(MODEL, _OTHER)
    await first.has_in_memory(MODEL, unloaded={_OTHER: False})
    await second.has_in_memory(unloaded={MODEL: False, _OTHER: False})
    await system.ask("a", "b")
    await first.say()
    assert (sorted(itertools.chain(*first.names)), second.names) == (["a", "b"], [])


async def test_a_model_that_no_endpoint_has_in_memory_is_loaded_by_one_with_few_models(system: System) -> None:
    full, empty = await system.connect(MODEL, _OTHER), await system.connect(MODEL, _OTHER)
    await full.has_in_memory(MODEL, unloaded={_OTHER: False})
    await empty.has_in_memory(unloaded={MODEL: False, _OTHER: False})
    await system.ask_for(_OTHER, "a")
    await system.ask_for(_OTHER, "b")
    await empty.say()
    assert (full.names, empty.names) == ([], [["a"], ["b"]])
    assert system.coalescer.is_loading(_OTHER) is False
    await empty.has_in_memory(unloaded={MODEL: False, _OTHER: True})
    assert system.coalescer.is_loading(_OTHER) is True
    assert system.coalescer.is_loading(MODEL) is None


def test_one_tenant_leaves_places_and_bytes_to_others() -> None:
    held_items = HeldItems(90, 9000)
    for _ in range(80):
        held_items.hold("tokenizer", 10, "mallory")
    with pytest.raises(Overloaded):
        held_items.hold("tokenizer", 10, "mallory")
    held_items.hold("tokenizer", 1000, "victim")
    held_items.hold("tokenizer", 10, "victim")
    with pytest.raises(Overloaded):
        held_items.hold("tokenizer", 8000, "victim")


def test_a_tenant_alone_with_one_place_has_it() -> None:
    held_items = HeldItems(1, 10)
    held_items.hold("tokenizer", 1000, "mallory")
