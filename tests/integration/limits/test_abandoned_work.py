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
from neuronpipe.api.v1.inference_pb2 import InferResponse
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import DeadlineExceeded
from tests.callers.requests import classify
from tests.systems.pipelines import DEVICE_TIME_S, make_slow

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_TRIES = 10


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


Tasks = list["asyncio.Task[InferResponse]"]


async def _behind_the_device(client: AsyncClient, timeout_s: float | None = None) -> tuple[Tasks, Tasks, float]:
    """Five requests that are given up, by a deadline or by their caller, and two others, while the device has one; and
    how many seconds it had it at least once all were there.

    As a clock there are round trips through the same gateway: a hundred until a request has reached the device.
    """
    for _ in range(_TRIES):
        sent_s = time.monotonic()
        first = asyncio.create_task(client.infer(classify("first")))
        await _pass_time(client, 100)
        given_up = [asyncio.create_task(client.infer(classify("given up"), timeout_s=timeout_s)) for _ in range(5)]
        waiting = [asyncio.create_task(client.infer(classify("waiting"))) for _ in range(2)]
        await _pass_time(client, 20)
        queued_s = time.monotonic()
        if timeout_s:
            await asyncio.wait(given_up)
        else:
            for task in given_up:
                task.cancel()
            await _pass_time(client, 20)
        if not first.done():
            return given_up, waiting, sent_s + DEVICE_TIME_S - queued_s
        # A busy machine took longer for all of this than the device for a batch.
        await asyncio.gather(*given_up, *waiting, return_exceptions=True)
    raise AssertionError("the device was never busy for long enough")


async def _pass_time(client: AsyncClient, round_trips: int) -> None:
    for _ in range(round_trips):
        await client.list_models()


async def test_cancelled_request_is_not_computed(client: AsyncClient) -> None:
    _, waiting, _ = await _behind_the_device(client)
    responses = await asyncio.gather(*waiting)
    assert [response.usage.batch_size for response in responses] == [2, 2]


async def test_request_past_its_deadline_is_not_computed(client: AsyncClient) -> None:
    hurried, waiting, left_s = await _behind_the_device(client, timeout_s=0.2)
    outcomes = await asyncio.gather(*hurried, return_exceptions=True)
    responses = await asyncio.gather(*waiting)
    assert [type(outcome) for outcome in outcomes] == [DeadlineExceeded] * 5
    assert [response.usage.batch_size for response in responses] == [2, 2]
    # The second batch waited for the first, and said so.
    assert all(response.timings.predict_queue_ns > left_s * 1e9 for response in responses)
