"""KEDA's external scaler for any quantity: it tells KEDA when pods are needed, and for how much work."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from neuronpipe.api.keda.v1 import external_scaler_pb2 as keda
from neuronpipe.core.errors import InvalidInput, Overloaded
from neuronpipe.rpc.rpcs import Context, RpcHandlers, handlers_of

# KEDA keeps one stream open for each scaled object.
_MAX_STREAMS = 64
SCALER = keda.DESCRIPTOR.services_by_name["ExternalScaler"]


@dataclass(frozen=True, slots=True)
class ScaledLoad:
    """The quantity by which KEDA scales pods.

    - `metric`: its name.
    - `target`: the field of a trigger that sets how much of the quantity one pod gets.
    - `count`: the quantity now.
    - `is_active`: whether any pod is needed now.
    - `look_every_s`: pause between two calls of `is_active` for a stream.
    """

    metric: str
    target: str
    default_target: float
    count: Callable[[], Awaitable[int]]
    is_active: Callable[[], Awaitable[bool]]
    look_every_s: float


def scaler_handlers(load: ScaledLoad) -> RpcHandlers:
    streams: set[object] = set()

    async def is_active(message: keda.ScaledObjectRef, context: Context) -> keda.IsActiveResponse:
        return keda.IsActiveResponse(result=await load.is_active())

    async def stream(message: keda.ScaledObjectRef, context: Context) -> AsyncIterator[keda.IsActiveResponse]:
        if len(streams) >= _MAX_STREAMS:
            raise Overloaded(f"{len(streams)} streams for KEDA, the limit", retry_after_s=1)
        streams.add(stream := object())
        try:
            last: bool | None = None
            while True:
                now = await load.is_active()
                if now != last:
                    yield keda.IsActiveResponse(result=now)
                last = now
                await asyncio.sleep(load.look_every_s)
        finally:
            streams.remove(stream)

    async def spec(message: keda.ScaledObjectRef, context: Context) -> keda.GetMetricSpecResponse:
        target_text = message.scalerMetadata.get(load.target, "")
        try:
            target = float(target_text) if target_text else load.default_target
        except ValueError:
            target = 0.0
        if not 0 < target < float("inf"):
            raise InvalidInput(load.target, "must be a number above 0")
        metric = keda.MetricSpec(metricName=load.metric, targetSize=max(1, round(target)), targetSizeFloat=target)
        return keda.GetMetricSpecResponse(metricSpecs=[metric])

    async def metrics(message: keda.GetMetricsRequest, context: Context) -> keda.GetMetricsResponse:
        count = await load.count()
        value = keda.MetricValue(metricName=load.metric, metricValue=count, metricValueFloat=count)
        return keda.GetMetricsResponse(metricValues=[value])

    return handlers_of(
        SCALER, {"IsActive": is_active, "StreamIsActive": stream, "GetMetricSpec": spec, "GetMetrics": metrics}
    )
