"""Jobs as a part of a gateway: what its doors take, and what answers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.doors.assembly import Addition
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.jobs.grpc_door import job_rpc_handlers, job_rpcs
from neuronpipe.jobs.http import ROUTES, job_http_handlers
from neuronpipe.jobs.service import Jobs
from neuronpipe.jobs.settings import JobSettings
from neuronpipe.process.door import Handler

# What the doors take, whether jobs are set up or not.
JOBS = Addition(rpcs=tuple(job_rpcs()), routes=ROUTES)


@asynccontextmanager
async def running_jobs(
    settings: JobSettings, pipeline: PipelineSettings, gateway: Gateway, tenants: Tenants | None
) -> AsyncIterator[dict[str, Handler]]:
    """The handlers of jobs. Raises SetupError."""
    store = None
    if settings.jobs_redis_url:
        from neuronpipe.jobs.store import JobStore  # redis-py takes 0.1 s to import

        store = JobStore(settings)
    jobs = Jobs(store, settings, pipeline, gateway.catalog, tenants.max_jobs if tenants else lambda tenant: 0)
    async with jobs.running():
        yield {**job_rpc_handlers(jobs), **job_http_handlers(jobs)}
