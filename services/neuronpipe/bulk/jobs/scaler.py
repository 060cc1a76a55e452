"""KEDA's external scaler: how many workers are needed, also where there are none.

KEDA's own scaler for Redis Streams counts what groups lag behind, and does not wake up for one message (keda #6478).
"""

import asyncio

from neuronpipe.bulk.jobs.store import JobStore
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.rpc.scaler import Load

_METRIC = "neuronpipe-jobs"
# Of a trigger: jobs for one worker.
_TARGET = "jobsPerWorker"
_DEFAULT_TARGET = 8.0
_LOOK_EVERY_S = 1.0
_SHOW_EVERY_S = 2.0


def job_load(store: JobStore) -> Load:
    """The jobs that wait or run."""

    async def count() -> int:
        counts, _, _ = await store.count()
        return sum(one.waiting + one.running for one in counts.values())

    async def is_active() -> bool:
        return bool(await count())

    return Load(_METRIC, _TARGET, _DEFAULT_TARGET, count, is_active, _LOOK_EVERY_S)


async def show_counts(store: JobStore, meters: Meters) -> None:
    """Keeps the gauges of jobs up to date until it is cancelled."""
    while True:
        try:
            counts, dead, notifications = await store.count()
            meters.show(Metrics.JOBS_WAITING, {(word,): one.waiting for word, one in counts.items()})
            meters.show(Metrics.JOBS_RUNNING, {(word,): one.running for word, one in counts.items()})
            meters.show(Metrics.JOBS_OLDEST, {(word,): one.oldest_s * 1e9 for word, one in counts.items()})
            meters.show(Metrics.JOBS_DEAD, {(): dead})
            meters.show(Metrics.NOTIFICATIONS_WAITING, {(): notifications})
        except NeuronpipeError:
            for gauge in (Metrics.JOBS_WAITING, Metrics.JOBS_RUNNING, Metrics.JOBS_OLDEST, Metrics.JOBS_DEAD):
                meters.show(gauge, {})
        await asyncio.sleep(_SHOW_EVERY_S)
