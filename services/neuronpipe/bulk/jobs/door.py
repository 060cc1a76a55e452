"""Jobs as a part of a gateway: what its doors take, and what answers."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from neuronpipe.bulk.jobs.grpc_door import job_rpc_handlers, job_rpcs
from neuronpipe.bulk.jobs.service import Jobs
from neuronpipe.bulk.jobs.settings import JobSettings
from neuronpipe.doors.assembly import Addition
from neuronpipe.doors.http.exchange import Route
from neuronpipe.gateway.assembly import Gateway
from neuronpipe.gateway.settings import HttpSettings, PipelineSettings
from neuronpipe.gateway.tenants.tenants import Tenants
from neuronpipe.platform.process.door import Handler


def _routes() -> Sequence[Route]:
    from neuronpipe.bulk.jobs.http import ROUTES  # what HTTP needs is imported for an HTTP door only

    return ROUTES


# What the doors take, whether jobs are set up or not.
JOBS = Addition(rpcs=tuple(job_rpcs()), routes=_routes)


@asynccontextmanager
async def running_jobs(
    settings: JobSettings, pipeline: PipelineSettings, http: HttpSettings, gateway: Gateway, tenants: Tenants | None
) -> AsyncIterator[dict[str, Handler]]:
    """The handlers of jobs. Raises SetupError."""
    store = None
    if settings.jobs_redis_url:
        from neuronpipe.bulk.jobs.store import JobStore  # redis-py takes 0.1 s to import

        store = JobStore(settings)
    jobs = Jobs(store, settings, pipeline, gateway.catalog, tenants.max_jobs if tenants else lambda tenant: 0)
    async with jobs.running():
        handlers: dict[str, Handler] = dict(job_rpc_handlers(jobs))
        if http.http_listen:
            from neuronpipe.bulk.jobs.http import job_http_handlers
            from neuronpipe.doors.http.handlers import DESCRIBED
            from neuronpipe.doors.http.openapi import openapi_handlers

            handlers |= job_http_handlers(jobs) | openapi_handlers((*DESCRIBED, *_routes()))
        yield handlers
