"""Two and eight times the load that can be borne: what is let in stays quick, the rest is refused, nothing piles up,
and a second after the load ends, the process is idle.

`make soak` makes the few seconds ten minutes; NEURONPIPE_SOAK_S is how long to load.
"""

import asyncio
import itertools
import os
import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from demo.processes import ServiceProcess
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import DeadlineExceeded, Overloaded
from neuronpipe.measure.load.generator import OK, OUTCOMES
from tests.bench.load import KeptAnswers, send_all
from tests.callers.metrics import series_of
from tests.callers.requests import classify
from tests.models.versions import copy_bundle
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
    options = {
        "repository": copy_bundle(fake_repository, "classifier", tmp_path, {"device_time_s": str(_BATCH_S)}),
        "max-batch-size": _BATCH_SIZE,
        "max-requests-in-flight": 24,
        "metrics-listen": "127.0.0.1:0",
    }
    words = (word for name, value in options.items() for word in (f"--{name}", str(value)))
    with ServiceProcess("all", *words, environment=constants(max_queue_sequences=16)) as process:
        yield process.wait_until_ready()


async def _load(client: AsyncClient, rate_per_s: float, seconds: float) -> KeptAnswers:
    """What became of requests that were sent at their times."""
    call, requests = partial(client.infer, timeout_s=_TIMEOUT_S), itertools.repeat(classify("overload"))
    return await send_all(call, requests, rate_per_s=rate_per_s, seconds=seconds)


def _work_left(process: ServiceProcess) -> dict[str, float]:
    """The gauges of work that are not zero."""
    gauges = {name: value for name, value in series_of(process).items() if name.partition("{")[0] in _WORK}
    assert {name.partition("{")[0] for name in gauges} == _WORK
    return {name: value for name, value in gauges.items() if value}


@pytest.mark.parametrize("factor", [2, 8])
async def test_load_beyond_capacity_is_refused_and_leaves_nothing_behind(
    busy_process: ServiceProcess, factor: int
) -> None:
    memory, rate = psutil.Process(busy_process.pid).memory_info, factor * _CAPACITY
    async with AsyncClient(busy_process.target, retries=False) as client:
        await _load(client, rate, 1)  # fills what is filled once
        before_bytes = memory().rss

        found = await _load(client, rate, _LOAD_S)

        # The last ones have just been answered or refused: a single request finds the system idle.
        await client.infer(classify("afterwards"), timeout_s=60)
        assert memory().rss <= before_bytes + _MAX_GROWTH_BYTES
    assert await asyncio.to_thread(_work_left, busy_process) == {}

    outcomes = {OUTCOMES[outcome] for outcome in found.rows()["outcome"]}
    assert {OK, Overloaded.reason} <= outcomes <= {OK, Overloaded.reason, DeadlineExceeded.reason}

    latencies_s = [answer.latency_s for answer in sorted(found.answers, key=lambda answer: answer.due_s)]
    # A share of 1 / factor can be answered. A machine that is busy itself may do less; a system that collapses does
    # next to nothing.
    assert len(latencies_s) >= (len(latencies_s) + found.errors) / factor / 4
    half = len(latencies_s) // 2
    first_s, second_s = statistics.median(latencies_s[:half]), statistics.median(latencies_s[half:])
    # Were the queues without limit, the second half would wait for as long as the load lasts.
    assert second_s <= 2 * first_s + 0.1
