"""bulk/jobs/runner.py: how a worker calls its gateway for several tenants."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from neuronpipe.bulk.jobs.runner import Gateway
from neuronpipe.core.background import Places
from neuronpipe.core.errors import NeuronpipeError, Overloaded, Unavailable


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    gateway = Gateway("127.0.0.1:1", None, max_in_flight=2)
    yield gateway
    await gateway.close()


def _nothing() -> None:
    pass


@pytest.mark.parametrize(
    "error", [Overloaded("tenant 'small': the limit is 1000 tokens a minute", 120), Unavailable("no process has it")]
)
async def test_a_tenant_that_is_refused_stops_no_other(gateway: Gateway, error: NeuronpipeError) -> None:
    async def refuse() -> str:
        raise error

    async def answer() -> str:
        return "answer"

    flood = [asyncio.create_task(gateway.admitted(refuse, "small", _nothing)) for _ in range(60)]
    await asyncio.sleep(0.01)
    began_s = time.monotonic()
    for _ in range(20):
        assert await gateway.admitted(answer, "victim", _nothing) == "answer"
    assert time.monotonic() - began_s < 1
    assert set(gateway.closed_s()) == {"small"}
    for task in flood:
        task.cancel()
    await asyncio.gather(*flood, return_exceptions=True)


async def test_a_refused_call_is_sent_again_when_the_gateway_says(gateway: Gateway) -> None:
    outcomes: list[Overloaded | None] = [Overloaded("full", 0.3), None]
    sent: list[float] = []

    async def call() -> str:
        if error := outcomes.pop(0):
            raise error
        return "answer"

    assert await gateway.admitted(call, "a", lambda: sent.append(time.monotonic())) == "answer"
    assert 0.3 <= sent[1] - sent[0] < 1


async def test_tenants_get_places_in_turns() -> None:
    places = Places(1)
    order: list[str] = []

    async def use(tenant: str) -> None:
        async with places.taken(tenant):
            order.append(tenant)
            await asyncio.sleep(0)

    await asyncio.gather(*(use(tenant) for tenant in "mmmmmvv"))
    assert "".join(order) == "mmvmvmm"


async def test_one_who_leaves_as_a_place_comes_passes_it_on() -> None:
    places = Places(1)
    ends, has_place = asyncio.Event(), asyncio.Event()

    async def use(wait: Callable[[], Awaitable[object]]) -> None:
        async with places.taken("a"):
            has_place.set()
            await wait()

    first = asyncio.create_task(use(ends.wait))
    await has_place.wait()
    second, third = (asyncio.create_task(use(lambda: asyncio.sleep(0))) for _ in range(2))
    await asyncio.sleep(0)
    ends.set()
    await first
    second.cancel()
    await asyncio.gather(second, return_exceptions=True)
    await asyncio.wait_for(third, 1)
