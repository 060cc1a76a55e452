"""The metrics, on the port of the requests."""

import asyncio
from collections.abc import Callable

from neuronpipe.doors.http.exchange import HttpHandler, HttpRequest, HttpResponse, Route

METRICS = Route("GET", "/metrics", "the metrics, for Prometheus", is_counted=False, service="metrics")
ROUTES = (METRICS,)


def metrics_handlers(write: Callable[[str], tuple[bytes, str]]) -> dict[str, HttpHandler]:
    """The handler, by route. `write`: see Telemetry."""

    async def metrics(request: HttpRequest) -> HttpResponse:
        accept = request.headers.get(b"accept", b"").decode("latin-1")
        page, media_type = await asyncio.to_thread(write, accept)
        return HttpResponse(page, media_type)

    return {METRICS.key: metrics}
