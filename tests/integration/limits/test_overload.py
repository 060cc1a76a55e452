"""Two and eight times the load that can be borne: what is let in stays quick, the rest is refused, nothing piles up,
and a second after the load ends, the process is idle.

`make soak` makes the few seconds ten minutes; NEURONPIPE_SOAK_S is how long to load.
"""

import asyncio
import json
import os
import shutil
import statistics
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from demo.processes import ServiceProcess
from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Overloaded
from tests.callers.requests import classify
from tests.suite.constants import constants

pytestmark = [pytest.mark.local_only, pytest.mark.alone]

_LOAD_S = float(os.environ.get("NEURONPIPE_SOAK_S") or 4)
_BATCH_S, _BATCH_SIZE = 0.02, 2
_CAPACITY = _BATCH_SIZE / _BATCH_S  # requests a second
_TIMEOUT_S = 0.5
# In ten minutes, in which 120,000 or 480,000 requests come, a leak of a kilobyte each would be 120 MB; what allocators
# keep is less than this.
_MAX_GROWTH_BYTES = 32 << 20
_WORK = {"neuronpipe_request_in_flight", "neuronpipe_request_tokens_in_flight", "neuronpipe_queue_sequences"}


@pytest.fixture
def busy_process(fake_repository: Path, tmp_path: Path) -> Iterator[ServiceProcess]:
    """A model that does a hundred sequences a second, behind short queues."""
    shutil.copytree(fake_repository / "classifier", tmp_path / "classifier")
    manifest = tmp_path / "classifier" / "1" / MANIFEST_FILE
    content = json.loads(manifest.read_text())
    content["artifacts"][0]["properties"] = {"device_time_s": str(_BATCH_S)}
    manifest.write_text(json.dumps(content))
    options = {
        "repository": tmp_path,
        "max-batch-size": _BATCH_SIZE,
        "max-requests-in-flight": 24,
        "metrics-listen": "127.0.0.1:0",
    }
    words = (word for name, value in options.items() for word in (f"--{name}", str(value)))
    with ServiceProcess("all", *words, environment=constants(max_queue_sequences=16)) as process:
        yield process.wait_until_ready()


async def _load(client: AsyncClient, rate: float, load_s: float) -> list[float | NeuronpipeError]:
    """Sends requests at their times whatever becomes of them; what each took, in seconds, or failed with."""

    async def call() -> float | NeuronpipeError:
        began_s = time.monotonic()
        try:
            await client.infer(classify("overload"), timeout_s=_TIMEOUT_S)
        except NeuronpipeError as error:
            return error
        return time.monotonic() - began_s

    began_s = time.monotonic()
    callers = []
    for number in range(int(load_s * rate)):
        await asyncio.sleep(max(0, began_s + number / rate - time.monotonic()))
        callers.append(asyncio.create_task(call()))
    return await asyncio.gather(*callers)


def _work_left(process: ServiceProcess) -> dict[str, float]:
    """The gauges of work that are not zero."""
    url = f"http://{process.wait_for('metrics')['address']}/metrics"
    with urllib.request.urlopen(url) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    gauges = [sample for family in families for sample in family.samples if sample.name in _WORK]
    assert {sample.name for sample in gauges} == _WORK
    return {sample.name: sample.value for sample in gauges if sample.value}


@pytest.mark.parametrize("factor", [2, 8])
async def test_load_beyond_capacity_is_refused_and_leaves_nothing_behind(
    busy_process: ServiceProcess, factor: int
) -> None:
    memory, rate = psutil.Process(busy_process.pid).memory_info, factor * _CAPACITY
    async with AsyncClient(busy_process.target, retries=False) as client:
        await _load(client, rate, 1)  # fills what is filled once
        before_bytes = memory().rss

        outcomes = await _load(client, rate, _LOAD_S)

        # The last ones have just been answered or refused: a single request finds the system idle.
        await client.infer(classify("afterwards"), timeout_s=60)
        assert memory().rss <= before_bytes + _MAX_GROWTH_BYTES
    assert await asyncio.to_thread(_work_left, busy_process) == {}

    failures = [outcome for outcome in outcomes if isinstance(outcome, NeuronpipeError)]
    assert [failure for failure in failures if not isinstance(failure, Overloaded | DeadlineExceeded)] == []
    assert any(isinstance(outcome, Overloaded) for outcome in outcomes)

    latencies_s = [outcome for outcome in outcomes if isinstance(outcome, float)]
    # A share of 1 / factor can be answered. A machine that is busy itself may do less; a system that collapses does
    # next to nothing.
    assert len(latencies_s) >= len(outcomes) / factor / 4
    half = len(latencies_s) // 2
    first_s, second_s = statistics.median(latencies_s[:half]), statistics.median(latencies_s[half:])
    # Were the queues without limit, the second half would wait for as long as the load lasts.
    assert second_s <= 2 * first_s + 0.1
