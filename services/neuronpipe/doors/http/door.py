"""The door of HTTP/1.1, which a process opens, and the health that the door shows."""

from collections.abc import Collection

from neuronpipe.core.addresses import is_loopback
from neuronpipe.core.logs import log
from neuronpipe.core.names import Metrics
from neuronpipe.core.units import words_of
from neuronpipe.doors.http.app import App
from neuronpipe.doors.http.connection import HttpServer
from neuronpipe.doors.http.exchange import HEALTH_ROUTES, LIVE, READY, HttpHandlers, HttpRequest, HttpResponse
from neuronpipe.gateway.settings import HttpSettings
from neuronpipe.platform.process.door import Guard
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.tls import ServerTls

# A decompressed body in JSON, JSON Lines or CSV may be as large as this number of the largest inputs. JSON writes a
# character of two bytes in six bytes.
_MAX_BODY_INPUTS = 8


class HttpDoor:
    """Takes HTTP/1.1 at an address; a Door (platform/process/door.py).

    - `service`: the service whose health it shows.
    - `port`: the port, once the door listens.
    - `tls`: for HTTPS.
    - `shares_port`: whether other processes also listen on the port.
    """

    port: int

    def __init__(
        self,
        process: ProcessSettings,
        settings: HttpSettings,
        service: str,
        tls: ServerTls | None = None,
        guard: Guard | None = None,
        *,
        max_input_bytes: int,
        shares_port: bool = False,
    ) -> None:
        self._process, self._settings, self._service = process, settings, service
        self._tls, self._guard, self._shares_port = tls, guard, shares_port
        self._max_input_bytes = max_input_bytes
        self._server: HttpServer | None = None

    @property
    def services(self) -> Collection[str]:
        """The service whose health the door shows."""
        return (self._service,)

    async def listen(self, health: HealthBoard, in_flight: InFlight) -> None:
        """Takes the address. Connections are refused until the door is open. Raises SetupError."""
        self._health = health
        process, settings = self._process, self._settings
        hosts = _words(settings.http_hosts) or frozenset(["localhost"] if is_loopback(settings.http_listen) else [])
        self._app = App(
            in_flight,
            process.max_message_bytes,
            self._guard,
            max_body_bytes=_MAX_BODY_INPUTS * self._max_input_bytes,
            max_input_bytes=self._max_input_bytes,
            has_metrics_port=bool(process.metrics_listen),
            hosts=hosts,
            cors_origins=_words(settings.http_cors_origins),
            path_prefix=settings.http_path_prefix,
        )
        self._app.open(self._health_handlers())
        address, shares_port = settings.http_listen, self._shares_port
        self._server = HttpServer(self._app, address, process, in_flight, self._tls, shares_port=shares_port)
        self.port = self._server.listener.bind("--http-listen")
        connections = self._server.connections
        in_flight.meters.gauge(Metrics.CONNECTIONS, lambda: len(connections), "http")

    def open(self, handlers: HttpHandlers) -> None:
        """Answers requests from now on. Raises SetupError where the door cannot listen any more."""
        self._app.open([*handlers, *self._health_handlers()])
        if self._server:
            self._server.listener.listen()
        log("listening for HTTP", address=f"{self._settings.http_listen.rpartition(':')[0]}:{self.port}")

    def ask_to_leave(self) -> None:
        """Ends connections with their answers."""
        self._app.is_draining = True

    async def stop_listening(self, limit_s: float) -> None:
        """Does nothing: each answer ends its connection already, also on a new connection."""

    def drain(self) -> None:
        """Ends streams, and asks callers to connect elsewhere."""
        self._app.drain()

    async def stop(self, grace_s: float) -> None:
        """Closes idle connections, waits for answers to leave, and then cancels the rest."""
        if self._server:
            await self._server.stop(grace_s)

    def _health_handlers(self) -> HttpHandlers:
        def is_serving() -> bool:
            return all(self._health.is_serving(service) for service in ("", self._service))

        async def health(request: HttpRequest) -> HttpResponse:
            return HttpResponse(b"", "text/plain", status=200 if is_serving() else 503)

        async def ready(request: HttpRequest) -> HttpResponse:
            return HttpResponse(b'{"ready":true}') if is_serving() else HttpResponse(b'{"ready":false}', status=503)

        async def live(request: HttpRequest) -> HttpResponse:
            is_well = self._health.is_well
            return HttpResponse(b'{"live":true}') if is_well else HttpResponse(b'{"live":false}', status=503)

        return [*((route, health) for route in HEALTH_ROUTES), (LIVE, live), (READY, ready)]


def _words(names: str) -> frozenset[str]:
    """Returns the names between commas, in lower case."""
    return frozenset(words_of(names.lower()))
