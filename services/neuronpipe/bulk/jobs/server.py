"""A worker as a process of its own, and how many workers KEDA shall start, also where there are none.

KEDA's own scaler for Redis Streams counts what groups lag behind, and does not wake up for one message (keda #6478).
"""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.bulk.jobs.notifications import Notifier
from neuronpipe.bulk.jobs.runner import Gateway, Invoker, Runner
from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.bulk.jobs.store import JobStore
from neuronpipe.bulk.jobs.worker import Worker
from neuronpipe.core.background import run_beside
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.core.metrics import Meters, Telemetry
from neuronpipe.core.names import Metrics
from neuronpipe.platform.process.door import Handler
from neuronpipe.platform.process.life import Life, serve
from neuronpipe.platform.storage.objects import Storage
from neuronpipe.platform.tls import ServerTls
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.scaler import Load, scaler_handlers, scaler_rpcs
from neuronpipe.rpc.trace_service import trace_handlers, trace_rpcs

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


async def run(settings: WorkerSettings, telemetry: Telemetry, tls: ServerTls | None = None) -> None:
    """Runs jobs until SIGTERM. Raises SetupError."""
    if not settings.jobs_redis_url:
        raise SetupError("--jobs-redis-url: is missing; it names the Redis of jobs (see docs/jobs.md)")

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[Mapping[str, Handler]]:
        store = JobStore(settings)
        gateway = Gateway(settings.target, settings.gateway_tls_files, settings.max_requests_in_flight)
        try:
            notifier = Notifier.of(settings, store, telemetry.meters) if settings.notification_secret else None
            invoker = Invoker(settings.http_target, gateway, storage := Storage(), settings.max_input_bytes)
            runner = Runner(gateway, invoker, storage, settings.max_input_bytes, settings.max_result_bytes)
            limits = (settings.max_jobs, settings.lease_s, settings.max_attempts)
            worker = Worker(store, gateway, runner, limits, telemetry)
            life.on_draining(worker.drain)
            await store.wait_until_usable()
            parts = [show_counts(store, telemetry.meters), *([worker.run()] if settings.max_jobs else [])]
            async with run_beside(*parts, *([notifier.run()] if notifier else [])):
                yield scaler_handlers(job_load(store)) | trace_handlers(telemetry.traces)
        finally:
            await gateway.close()
            await store.close()

    door = GrpcDoor(settings, [*scaler_rpcs(), *trace_rpcs(telemetry.traces)], tls)
    await serve("worker", settings, [door], assemble, telemetry.meters)
