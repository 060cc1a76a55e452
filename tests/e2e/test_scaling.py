"""More containers of a service, while a load runs: all of them get work, and nobody notices that one of them goes."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.e2e.load import Load, load
from tests.e2e.stack import Stack, wait_until

_SCALED = ("tokenizer", "postprocessor")


@pytest_asyncio.fixture(scope="module")
async def doubled(stack: Stack) -> AsyncIterator[Load]:
    """Two containers of each scaled service, under a load that began when there was one;
    afterwards there is one again."""
    async with load(stack.target) as going:
        await asyncio.to_thread(stack.up, "--no-deps", *(f"--scale={service}=2" for service in _SCALED))
        yield going
        await asyncio.to_thread(stack.up, "--no-deps")
        await going.answers(100)
    assert (going.wrong, going.failures) == ([], [])
    assert [len(stack.containers(service)) for service in _SCALED] == [1, 1]


@pytest.mark.parametrize("service", _SCALED)
async def test_work_reaches_every_container_of_a_service(stack: Stack, doubled: Load, service: str) -> None:
    containers = stack.containers(service)
    assert len({container.address for container in containers}) == 2

    def items() -> list[float]:
        return [stack.metric(container, "neuronpipe_item_duration_seconds_count") for container in containers]

    before = await asyncio.to_thread(items)
    await asyncio.to_thread(
        wait_until, "both get work", lambda: all(now > then for now, then in zip(items(), before, strict=True))
    )
    assert doubled.failures == []


@pytest.mark.parametrize("service", _SCALED)
async def test_nobody_notices_that_one_of_two_containers_is_stopped(stack: Stack, doubled: Load, service: str) -> None:
    first, _ = stack.containers(service)
    await asyncio.to_thread(stack.docker, "stop", "--time", "60", first.id)
    await doubled.answers(100)
    assert stack.inspect(first.id).state["ExitCode"] == 0
    await asyncio.to_thread(stack.docker, "start", first.id)
    await asyncio.to_thread(stack.wait_until_healthy)
    await doubled.answers(100)
    assert (doubled.wrong, doubled.failures) == ([], [])


@pytest.mark.parametrize("service", _SCALED)
async def test_nobody_notices_that_one_of_two_containers_is_killed(stack: Stack, doubled: Load, service: str) -> None:
    first, _ = stack.containers(service)
    await asyncio.to_thread(stack.kill, first)
    await asyncio.to_thread(wait_until, "it is back", lambda: stack.inspect(first.id).restarts == first.restarts + 1)
    await asyncio.to_thread(stack.wait_until_healthy)
    await doubled.answers(100)
    assert (doubled.wrong, doubled.failures) == ([], [])
