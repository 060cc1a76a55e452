"""Work that nobody waits for any more is never computed, however many processes lie between the caller and the device.

The device takes one and a half seconds a batch. While the first request is on it, others wait; those that are given up
must be missing from the batch that runs next, whose size the response tells.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from demo.processes import ServiceProcess, four_processes
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import DeadlineExceeded
from tests.integration.requests import classify
from tests.integration.systems import DEVICE_TIME_S, make_slow

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]


@pytest_asyncio.fixture(scope="module", params=["one process", "four processes"])
async def client(
    request: pytest.FixtureRequest, fake_repository: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[AsyncClient]:
    slow_repository = make_slow(fake_repository, tmp_path_factory.mktemp("slow"))
    with contextlib.ExitStack() as stack:
        if request.param == "one process":
            gateway = stack.enter_context(
                ServiceProcess("all", "--repository", str(slow_repository))
            ).wait_until_ready()
        else:
            gateway = stack.enter_context(four_processes(slow_repository))["gateway"]
        async with AsyncClient(gateway.target, retries=False) as client:
            yield client


async def occupy_the_device(client: AsyncClient) -> "asyncio.Task[object]":
    """Sends a request and gives it time to reach the device: a hundred round trips through the same gateway."""
    task: asyncio.Task[object] = asyncio.create_task(client.infer(classify("first")))
    for _ in range(100):
        await client.list_models()
    return task


async def test_cancelled_request_is_not_computed(client: AsyncClient) -> None:
    first = await occupy_the_device(client)
    abandoned = [asyncio.create_task(client.infer(classify("abandoned"))) for _ in range(5)]
    waiting = [asyncio.create_task(client.infer(classify("waiting"))) for _ in range(2)]
    for _ in range(20):
        await client.list_models()

    for task in abandoned:
        task.cancel()

    responses = await asyncio.gather(*waiting)
    await first
    assert [response.usage.batch_size for response in responses] == [2, 2]


async def test_request_past_its_deadline_is_not_computed(client: AsyncClient) -> None:
    sent_s = time.monotonic()
    first = await occupy_the_device(client)
    hurried = [asyncio.create_task(client.infer(classify("hurried"), timeout_s=0.2)) for _ in range(5)]
    waiting = [asyncio.create_task(client.infer(classify("waiting"))) for _ in range(2)]
    for _ in range(20):
        await client.list_models()
    queued_s = time.monotonic()

    outcomes = await asyncio.gather(*hurried, return_exceptions=True)
    responses = await asyncio.gather(*waiting)

    await first
    assert [type(outcome) for outcome in outcomes] == [DeadlineExceeded] * 5
    assert [response.usage.batch_size for response in responses] == [2, 2]
    # The second batch waited for the first, and said so: what was left of 1.5 s once it was in the queue.
    left_s = sent_s + DEVICE_TIME_S - queued_s
    assert all(response.timings.predict_queue_ns > left_s * 1e9 for response in responses)
