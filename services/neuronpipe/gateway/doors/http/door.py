"""The server behind the HTTP door. The one file that knows uvicorn, which parses HTTP with httptools."""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Collection, Generator, Mapping, Sequence

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log
from neuronpipe.gateway.doors.http.app import App
from neuronpipe.gateway.doors.http.exchange import HEALTH_ROUTES, LIVE, HttpRequest, HttpResponse, Route
from neuronpipe.process.door import Guard, Handler
from neuronpipe.process.health import HealthBoard
from neuronpipe.process.in_flight import InFlight
from neuronpipe.tls.server import ServerTls

_KEEP_ALIVE_S = 75
# Of a request's line and headers.
_HEAD_LIMIT_S = 30.0
_MAX_HEAD_BYTES = 64 << 10
_BACKLOG = 2048


class HttpDoor:
    """Takes HTTP/1.1 at an address; a Door (process/door.py).

    `service`: whose health it shows. `port`: known once it listens. `max_connection_age_s`: after which callers are
    asked to connect again; 0: never. `tls`: for HTTPS.
    """

    port: int

    def __init__(
        self,
        listen: str,
        routes: Sequence[Route],
        service: str,
        max_body_bytes: int,
        max_connection_age_s: float = 0,
        tls: ServerTls | None = None,
        guard: Guard | None = None,
        *,
        shares_port: bool = False,
    ) -> None:
        self._listen = listen
        self._tls = tls
        self._guard = guard
        self._shares_port = shares_port
        self._routes = routes
        self._service = service
        self._max_body_bytes = max_body_bytes
        self._max_connection_age_s = max_connection_age_s
        self._serving: asyncio.Task[None] | None = None

    @property
    def services(self) -> Collection[str]:
        """The service whose health it shows."""
        return (self._service,)

    async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
        """Takes connections, and refuses requests until it is open. Raises SetupError."""
        self._health = health
        self._app = App(self._routes, in_flight, self._max_body_bytes, self._guard)
        self._app.handlers = self._health_handlers()
        listener = _bind(self._listen, self._shares_port)
        self.port = listener.getsockname()[1]
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # what callers do wrong is told them
        config = uvicorn.Config(
            self._app,
            http=type("_AgingConnection", (_Connection,), {"max_age_s": self._max_connection_age_s}),
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            backlog=_BACKLOG,
        )
        config.load()
        config.ssl = self._tls.context if self._tls else None
        self._server = _Server(config)
        self._serving = asyncio.create_task(self._server.serve([listener]))
        log("listening for HTTP", address=f"{self._listen.rpartition(':')[0]}:{self.port}")

    def open(self, handlers: Mapping[str, Handler]) -> None:
        """Answers requests from now on."""
        self._app.handlers = {**handlers, **self._health_handlers()}

    def drain(self) -> None:
        """Ends streams, and asks callers to connect elsewhere."""
        self._app.drain()

    async def stop(self, grace_s: float) -> None:
        """uvicorn's own: closes idle connections, waits for answers to leave, and then cancels what is left."""
        if self._serving:
            self._server.config.timeout_graceful_shutdown = grace_s  # type: ignore[assignment]
            self._server.should_exit = True
            await self._serving

    def _health_handlers(self) -> dict[str, Handler]:
        async def tell(request: HttpRequest) -> HttpResponse:
            is_serving = all(self._health.is_serving(service) for service in ("", self._service))
            return HttpResponse(b"", "text/plain", status=200 if is_serving else 503)

        async def live(request: HttpRequest) -> HttpResponse:
            return HttpResponse(b"", "text/plain")

        return {route.key: live if route is LIVE else tell for route in HEALTH_ROUTES}


class _Connection(HttpToolsProtocol):
    """Ends a connection whose next head does not arrive within its limits, of which uvicorn has none, and an old one.

    `max_age_s`: 0 for none.
    """

    max_age_s = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._is_in_head = True
        self._head_bytes = 0
        self._made_s = self.loop.time()
        self._timer: asyncio.TimerHandle | None = self.loop.call_later(_HEAD_LIMIT_S, self._end)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timer()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_timer()
        super().on_headers_complete()
        if self.max_age_s and self.loop.time() - self._made_s >= self.max_age_s:
            self.cycle.keep_alive = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_in_head:  # more of it is to come
            self._head_bytes += len(data)
            if self._head_bytes > _MAX_HEAD_BYTES:
                self._end()
            elif self._timer is None:
                self._timer = self.loop.call_later(_HEAD_LIMIT_S, self._end)

    def _stop_timer(self) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        if self.cycle and not self.cycle.response_complete:  # what would be sent now would be taken for its answer
            self.transport.close()
        elif not self.transport.is_closing():
            self.send_400_response("The request's head is too large, or did not arrive in time.")


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Leaves them to process/life.py."""
        yield


def _bind(listen: str, shares_port: bool) -> socket.socket:
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, int(port)), family=family, backlog=_BACKLOG, reuse_port=shares_port)
    except OSError as error:
        raise SetupError(f"cannot listen on {listen} for HTTP: {os.strerror(error.errno or 0)}") from error
    listener.setblocking(False)
    return listener
