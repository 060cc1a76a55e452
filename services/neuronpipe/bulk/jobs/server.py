"""A worker as a process of its own, with the gauges of jobs.

A worker also reports the needed number of workers to KEDA. KEDA's own scaler for Redis counts one list, without the
running jobs.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from neuronpipe.bulk.jobs.gateway import BulkGateway
from neuronpipe.bulk.jobs.invocation import Invoker
from neuronpipe.bulk.jobs.notifications import Notifier
from neuronpipe.bulk.jobs.objects import JobObjects
from neuronpipe.bulk.jobs.runner import Runner
from neuronpipe.bulk.jobs.settings import WorkerSettings, read_secret
from neuronpipe.bulk.jobs.store import JobStore
from neuronpipe.bulk.jobs.worker import JobWorker
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.metrics import Labels, Meters, Telemetry, all_may_read
from neuronpipe.core.names import Metrics
from neuronpipe.platform.process.background import run_beside
from neuronpipe.platform.process.life import Life, OpenDoors, serve
from neuronpipe.platform.storage import Storage
from neuronpipe.platform.tls import ServerTls
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.scaler import SCALER, ScaledLoad, scaler_handlers
from neuronpipe.rpc.trace_service import trace_handlers, trace_services

_METRIC = "neuronpipe-jobs"
# The key of a trigger's metadata: jobs for one worker.
_TARGET = "jobsPerWorker"
_DEFAULT_TARGET = 8.0
_COUNT_EVERY_S = 1.0
_SHOW_EVERY_S = 2.0
_GAUGES = (
    Metrics.JOBS_WAITING,
    Metrics.JOBS_RUNNING,
    Metrics.JOBS_OLDEST,
    Metrics.JOBS_DEAD,
    Metrics.NOTIFICATIONS_WAITING,
)


def job_load(store: JobStore) -> ScaledLoad:
    """Makes the load by which KEDA scales workers: the jobs that wait or run."""

    async def count() -> int:
        counts, _, _ = await store.count()
        return sum(priority_counts.waiting + priority_counts.running for priority_counts in counts.values())

    async def is_active() -> bool:
        return bool(await count())

    return ScaledLoad(_METRIC, _TARGET, _DEFAULT_TARGET, count=count, is_active=is_active, look_every_s=_COUNT_EVERY_S)


async def show_counts(store: JobStore, meters: Meters) -> None:
    """Keeps the gauges of jobs up to date until it is cancelled. While Redis does not answer, there are no gauges."""
    while True:
        series: Sequence[Mapping[Labels, float]] = [{}] * len(_GAUGES)
        with suppress(NeuronpipeError):
            counts, dead, notifications = await store.count()
            series = [
                {(word,): count.waiting for word, count in counts.items()},
                {(word,): count.running for word, count in counts.items()},
                {(word,): count.oldest_s * 1e9 for word, count in counts.items()},
                {(): dead},
                {(): notifications},
            ]
        for gauge, values in zip(_GAUGES, series, strict=True):
            meters.show(gauge, values)
        await asyncio.sleep(_SHOW_EVERY_S)


async def run(settings: WorkerSettings, telemetry: Telemetry, tls: ServerTls | None = None) -> None:
    """Runs jobs until SIGTERM. Raises SetupError."""
    if not settings.jobs.jobs_redis_url:
        raise SetupError("--jobs-redis-url: is missing; it names the Redis of jobs (see docs/jobs.md)")
    door = GrpcDoor(settings.process, [SCALER.full_name, *trace_services(telemetry.traces)], tls)

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[OpenDoors]:
        secret = read_secret("--jobs-secret", file) if (file := settings.jobs.jobs_secret) else b""
        store = JobStore(settings.jobs)
        gateway = BulkGateway(settings.target, settings.gateway_tls_files, settings.max_requests_in_flight)
        try:
            tells = settings.notification_secret
            notifier = Notifier.of(settings, store, telemetry.meters, secret) if tells else None
            objects = JobObjects(Storage(), settings.max_input_bytes)
            runner = Runner(gateway, Invoker(gateway, objects, settings), objects, settings)
            worker = JobWorker(store, gateway, runner, settings, telemetry, secret)
            life.on_draining(worker.drain)
            await store.wait_until_usable()
            parts = [show_counts(store, telemetry.meters), *([worker.run()] if settings.max_jobs else [])]
            async with run_beside(*parts, *([notifier.run()] if notifier else [])):
                yield partial(door.open, [*scaler_handlers(job_load(store)), *trace_handlers(telemetry.traces)])
        finally:
            await gateway.close()
            await store.close()

    with telemetry.metrics_port(all_may_read):
        await serve("worker", settings.process, [door], assemble, telemetry.meters)
