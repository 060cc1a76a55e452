"""What breaks while a load runs: every service crashes and comes back, Redis goes away, containers are stopped and
replaced.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

import pytest

from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError, Overloaded, Unavailable
from tests.callers.requests import answer, embed
from tests.e2e.load import Load, load
from tests.e2e.stack import SERVICES, Container, Stack, wait_until

# Twenty windows each, which keep the executor busy for a second or two, far less than the grace.
_CONTEXT = "the cat sat on the mat and looked at the dog " * 500
_QUESTIONS = 16


async def _until(stack: Stack, is_serving: bool) -> float:
    """When the gateway says that it reaches all stages, or that it does not."""
    async with asyncio.timeout(120):
        while await asyncio.to_thread(stack.is_serving) is not is_serving:
            await asyncio.sleep(0.01)
    return time.monotonic()


async def _under_load(stack: Stack, service: str, disturb: Callable[[], Awaitable[None]]) -> Load:
    """Does something that takes a service away for a while, and checks all answers and when there were none."""
    async with load(stack.target) as going:
        watching = asyncio.create_task(_until(stack, False))
        await asyncio.sleep(0)
        began_s = time.monotonic()
        await disturb()
        lost_s = await watching
        await _until(stack, True)
        await going.answers(100)
        await asyncio.to_thread(stack.wait_until_healthy)
        await going.answers(100)
    assert going.wrong == []
    assert {type(failure.error) for failure in going.failures} <= {Unavailable, Overloaded}
    # Every request needs every service: it is back for its callers with the first answer to one that began without it.
    back_s = min(answered_s for asked_s, answered_s in going.answered if asked_s > lost_s)
    outside = [failure for failure in going.failures if failure.ended_s < began_s or failure.began_s > back_s]
    assert outside == [], f"{service} was away from {began_s} to {back_s}"
    return going


@pytest.mark.parametrize("service", SERVICES)
async def test_a_service_that_is_killed_comes_back_and_no_answer_is_wrong(stack: Stack, service: str) -> None:
    [before] = stack.containers(service)
    await _under_load(stack, service, lambda: asyncio.to_thread(stack.kill, before))
    assert stack.inspect(before.id).restarts == before.restarts + 1


async def test_a_redis_that_is_killed_comes_back_and_nobody_notices(stack: Stack) -> None:
    [before] = stack.containers("redis")
    async with load(stack.target) as going:
        await asyncio.to_thread(stack.kill, before)
        await asyncio.to_thread(
            wait_until, "Redis is back", lambda: stack.inspect(before.id).restarts == before.restarts + 1
        )
        await asyncio.to_thread(stack.wait_until_healthy)
        await going.answers(100)
    assert (going.wrong, going.failures) == ([], [])


async def test_nobody_notices_that_redis_is_stopped_and_it_is_used_again_once_it_runs(stack: Stack) -> None:
    async with load(stack.target) as going:
        await asyncio.to_thread(stack.compose, "stop", "redis")
        await going.answers(200)
        await asyncio.to_thread(stack.compose, "start", "redis")
        await asyncio.to_thread(stack.wait_until_healthy)
        [redis] = stack.containers("redis")

        async with AsyncClient(stack.target) as client:
            number = 0
            while int(await asyncio.to_thread(stack.docker, "exec", redis.id, "redis-cli", "dbsize")) == 0:
                number += 1
                await client.infer(embed(f"a text that was never asked before, number {number}"))
    assert (going.wrong, going.failures) == ([], [])


async def test_redeploying_a_service_is_an_outage_of_that_service_only(stack: Stack) -> None:
    [before] = stack.containers("postprocessor")

    # The same sources make the same image, whose container would stay.
    stack.environment["POSTPROCESSOR_CPUS"] = "0.9"

    async def redeploy() -> None:
        await asyncio.to_thread(stack.make, "redeploy", "service=postprocessor")

    await _under_load(stack, "postprocessor", redeploy)
    [after] = stack.containers("postprocessor")
    assert after.id != before.id


async def test_a_gateway_that_is_stopped_answers_what_it_has_begun(stack: Stack) -> None:
    [gateway] = stack.containers("gateway")
    async with AsyncClient(stack.target, retries=False, timeout_s=120) as client:
        asked = [
            asyncio.create_task(client.infer(answer("who sat?", f"{number} {_CONTEXT}")))
            for number in range(_QUESTIONS)
        ]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(stack.docker, "stop", "--time", "60", gateway.id)
        results = await asyncio.gather(*asked, return_exceptions=True)
    stopped = stack.inspect(gateway.id)
    stack.up()
    errors = [result for result in results if isinstance(result, BaseException)]
    # It has all of them by the time of the first answer, or else refuses them in its own words; a lost connection has
    # others.
    assert {error.message if isinstance(error, NeuronpipeError) else error for error in errors} <= {
        "the gateway service is stopping"
    }
    assert len(errors) < _QUESTIONS / 2
    assert stopped.state["ExitCode"] == 0


@pytest.mark.parametrize("service", ["tokenizer", "neuron-executor", "postprocessor"])
async def test_a_stage_that_is_stopped_ends_well(stack: Stack, service: str) -> None:
    [before] = stack.containers(service)

    async def stop_and_start() -> None:
        stopped = await asyncio.to_thread(_stop, stack, before)
        assert stopped.state["ExitCode"] == 0
        await asyncio.to_thread(stack.docker, "start", before.id)

    await _under_load(stack, service, stop_and_start)


def _stop(stack: Stack, container: Container) -> Container:
    stack.docker("stop", "--time", "60", container.id)
    return stack.inspect(container.id)
