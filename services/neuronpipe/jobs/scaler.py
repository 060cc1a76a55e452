"""KEDA's external scaler: how many workers are needed, also where there are none.

KEDA's own scaler for Redis Streams counts what groups lag behind, and does not wake up for one message (keda #6478).
"""

import asyncio
from collections.abc import AsyncIterator

from neuronpipe.core.errors import InvalidInput, NeuronpipeError
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.jobs.store import JobStore
from neuronpipe.keda.v1 import external_scaler_pb2 as keda
from neuronpipe.process.door import Handler
from neuronpipe.rpc.rpcs import Context, Rpc, by_path, rpcs_of

SCALER = keda.DESCRIPTOR.services_by_name["ExternalScaler"]
_METRIC = "neuronpipe-jobs"
# Of a trigger: jobs for one worker.
_TARGET = "jobsPerWorker"
_DEFAULT_TARGET = 8.0
_LOOK_EVERY_S = 1.0
_SHOW_EVERY_S = 2.0


def scaler_rpcs() -> list[Rpc]:
    """The rpcs of the scaler."""
    return rpcs_of(SCALER)


def scaler_handlers(store: JobStore) -> dict[str, Handler]:
    """The handlers, by path."""

    async def jobs() -> int:
        counts, _, _ = await store.count()
        return sum(one.waiting + one.running for one in counts.values())

    async def is_active(message: keda.ScaledObjectRef, context: Context) -> keda.IsActiveResponse:
        return keda.IsActiveResponse(result=bool(await jobs()))

    async def stream(message: keda.ScaledObjectRef, context: Context) -> AsyncIterator[keda.IsActiveResponse]:
        last: bool | None = None
        while True:
            now = bool(await jobs())
            if now != last:
                yield keda.IsActiveResponse(result=now)
            last = now
            await asyncio.sleep(_LOOK_EVERY_S)

    async def spec(message: keda.ScaledObjectRef, context: Context) -> keda.GetMetricSpecResponse:
        given = message.scalerMetadata.get(_TARGET, "")
        try:
            target = float(given) if given else _DEFAULT_TARGET
        except ValueError:
            target = 0.0
        if not 0 < target < float("inf"):
            raise InvalidInput(_TARGET, "must be a number above 0")
        one = keda.MetricSpec(metricName=_METRIC, targetSize=max(1, round(target)), targetSizeFloat=target)
        return keda.GetMetricSpecResponse(metricSpecs=[one])

    async def metrics(message: keda.GetMetricsRequest, context: Context) -> keda.GetMetricsResponse:
        count = await jobs()
        value = keda.MetricValue(metricName=_METRIC, metricValue=count, metricValueFloat=count)
        return keda.GetMetricsResponse(metricValues=[value])

    return by_path(SCALER, IsActive=is_active, StreamIsActive=stream, GetMetricSpec=spec, GetMetrics=metrics)


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
