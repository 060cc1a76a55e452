"""Twice as much load as can be borne: what is let in stays quick, the rest is refused, nothing piles up, and it is over when it is over.

`make soak` makes the few seconds ten minutes; NEURONPIPE_SOAK_S is how long to load.
"""

import asyncio
import json
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from demo.processes import ServiceProcess
from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Overloaded
from tests.integration.requests import classify

pytestmark = [pytest.mark.local_only, pytest.mark.alone]

_LOAD_S = float(os.environ.get("NEURONPIPE_SOAK_S") or 4)
_BATCH_S, _BATCH_SIZE = 0.02, 2
_RATE = 2 * _BATCH_SIZE / _BATCH_S  # requests a second
_TIMEOUT_S = 0.5
# In ten minutes, in which 120,000 requests come, a leak of a kilobyte each would be 120 MB; what allocators keep is less than this.
_MAX_GROWTH_BYTES = 32 << 20


@pytest.fixture
def busy_process(fake_repository: Path, tmp_path: Path) -> Iterator[ServiceProcess]:
    """A model that does a hundred sequences a second, behind short queues."""
    shutil.copytree(fake_repository / "classifier", tmp_path / "classifier")
    manifest = tmp_path / "classifier" / "1" / MANIFEST_FILE
    content = json.loads(manifest.read_text())
    content["artifacts"][0]["properties"] = {"device_time_s": str(_BATCH_S)}
    manifest.write_text(json.dumps(content))
    options = {"repository": tmp_path, "max-batch-size": _BATCH_SIZE, "max-queue-sequences": 16, "max-requests-in-flight": 24}
    with ServiceProcess("all", *(word for name, value in options.items() for word in (f"--{name}", str(value)))) as process:
        yield process.wait_until_ready()


async def _load(client: AsyncClient, load_s: float) -> list[float | NeuronpipeError]:
    """Sends requests at their times whatever becomes of them; what each took, in seconds, or failed with."""

    async def one() -> float | NeuronpipeError:
        began_s = time.monotonic()
        try:
            await client.infer(classify("overload"), timeout_s=_TIMEOUT_S)
        except NeuronpipeError as error:
            return error
        return time.monotonic() - began_s

    began_s = time.monotonic()
    callers = []
    for number in range(int(load_s * _RATE)):
        await asyncio.sleep(max(0, began_s + number / _RATE - time.monotonic()))
        callers.append(asyncio.create_task(one()))
    return await asyncio.gather(*callers)


async def test_twice_the_load_that_can_be_borne_is_refused_by_half_and_leaves_no_trace(busy_process: ServiceProcess) -> None:
    memory = psutil.Process(busy_process.pid).memory_info
    async with AsyncClient(busy_process.target, retries=False) as client:
        await _load(client, 1)  # fills what is filled once
        before_bytes = memory().rss

        outcomes = await _load(client, _LOAD_S)

        # The last ones have just been answered or refused: a single request finds the system idle.
        await client.infer(classify("afterwards"), timeout_s=1)
        assert memory().rss <= before_bytes + _MAX_GROWTH_BYTES

    assert {type(outcome) for outcome in outcomes if isinstance(outcome, NeuronpipeError)} <= {Overloaded, DeadlineExceeded}
    assert any(isinstance(outcome, Overloaded) for outcome in outcomes)

    latencies_s = [outcome for outcome in outcomes if isinstance(outcome, float)]
    # Half can be answered. A machine that is busy itself may do less; a system that collapses does next to nothing.
    assert len(latencies_s) >= len(outcomes) / 8
    half = len(latencies_s) // 2
    first_s, second_s = statistics.median(latencies_s[:half]), statistics.median(latencies_s[half:])
    # Were the queues without limit, the second half would wait for as long as the load lasts.
    assert second_s <= 2 * first_s + 0.1
