"""A worker as a process of its own."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.bulk.jobs.gateway import Gateway
from neuronpipe.bulk.jobs.invocations import Invoker
from neuronpipe.bulk.jobs.notifications import Notifier
from neuronpipe.bulk.jobs.runner import Runner
from neuronpipe.bulk.jobs.scaler import job_load, show_counts
from neuronpipe.bulk.jobs.settings import WorkerSettings
from neuronpipe.bulk.jobs.store import JobStore
from neuronpipe.bulk.jobs.worker import Worker
from neuronpipe.core.background import run_beside
from neuronpipe.core.errors import SetupError
from neuronpipe.core.metrics import Telemetry
from neuronpipe.platform.process.door import Handler
from neuronpipe.platform.process.life import Life, serve
from neuronpipe.platform.storage.objects import Storage
from neuronpipe.platform.tls.server import ServerTls
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.scaler import scaler_handlers, scaler_rpcs
from neuronpipe.rpc.trace_service import trace_handlers, trace_rpcs


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
