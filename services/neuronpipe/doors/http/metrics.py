"""The metrics, on the port of the requests."""

import asyncio
import time
from collections.abc import Callable

from neuronpipe.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse, Route

METRICS = Route("GET", "/metrics", "the metrics, for Prometheus", is_counted=False, service="metrics")
ROUTES = (METRICS,)
_PAUSES = 4


def metrics_handlers(write: Callable[[str], tuple[bytes, str]]) -> dict[str, HttpHandler]:
    """The handler, by route. `write`: see Telemetry.

    Pages are written one after the other, with pauses of so many times the time that one takes, as the thread that
    writes holds up the event loop. Those who wait for the same page share it.
    """
    turn, may_begin_s = asyncio.Lock(), 0.0
    next_pages: dict[str, asyncio.Task[tuple[bytes, str]]] = {}

    async def write_next(accept: str) -> tuple[bytes, str]:
        nonlocal may_begin_s
        async with turn:
            await asyncio.sleep(max(0.0, may_begin_s - time.monotonic()))
            del next_pages[accept]  # who comes from now on wants a newer one
            began_s = time.monotonic()
            page = await asyncio.to_thread(write, accept)
            ended_s = time.monotonic()
            may_begin_s = ended_s + _PAUSES * (ended_s - began_s)
        return page

    async def metrics(request: HttpRequest) -> HttpResponse:
        accept = request.headers.get(b"accept", b"").decode("latin-1")
        if accept not in next_pages:
            next_pages[accept] = asyncio.create_task(write_next(accept))
        page, media_type = await asyncio.shield(next_pages[accept])
        return HttpResponse(page, media_type)

    return {METRICS.key: metrics}
