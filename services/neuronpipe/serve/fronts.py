"""Front processes: gateway, tokenizer and postprocessor, several times, before the one executor of this process.

They are started, opened together, started again where they die, and drained, as one service. Each is
`python -m neuronpipe.cli.front` (serve/front.py); its standard input is a socket to this process.
"""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from tempfile import TemporaryDirectory
from typing import Any

from neuronpipe.bundles.live import running_live_models
from neuronpipe.bundles.sources import live_repository
from neuronpipe.core.background import run_beside
from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.metrics import Telemetry
from neuronpipe.gateway.access import Access
from neuronpipe.platform.process.door import Handler
from neuronpipe.platform.process.life import Life, serve
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.items import EXECUTE, stage_method
from neuronpipe.rpc.trace_service import trace_handlers, trace_rpcs
from neuronpipe.serve.metric_sums import FrontMetrics
from neuronpipe.serve.settings import AllSettings
from neuronpipe.stages.neuron_executor.stage import NeuronExecutorStage, running_executor
from neuronpipe.stages.settings import EngineSettings

# The exit code of a process whose settings or bundles are wrong (cli/__init__.py).
_SETUP_ERROR = 2
# A message with the metrics of many models.
_MAX_LINE_BYTES = 64 << 20
# Between a front process's end and its successor's start: doubled each time, unless it has lived for a while.
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0
_STEADY_S = 10.0
# How long front processes get to end once their requests have.
_END_LIMIT_S = 2.0


class Fronts:
    """The front processes of a service, as the process that starts them sees them."""

    def __init__(self, count: int, settings: Mapping[str, Any], ports: "Sequence[SharedPort]") -> None:
        """`settings`: each one's, as JSON can hold them. `ports`: those that they listen on."""
        self.metrics = FrontMetrics()
        self._settings = json.dumps(settings).encode() + b"\n"
        self._ports = ports
        self._fronts = [_Front(number) for number in range(1, count + 1)]
        self._ending = asyncio.Event()
        self._may_open = asyncio.Event()
        self._opened = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs them beside the block, and ends them with it. Raises SetupError where one cannot start by its settings,
        and RuntimeError where it ends otherwise before all are open.
        """
        async with run_beside(*(self._keep(front) for front in self._fronts)):
            try:
                yield
            finally:
                await self.drain()
                with suppress(TimeoutError):
                    async with asyncio.timeout(_END_LIMIT_S):
                        for front in self._fronts:
                            await front.ended.wait()

    async def open(self) -> None:
        """Has all of them take connections once all have loaded, and returns when they do. Raises SetupError where
        another service listens on a port.
        """
        for front in self._fronts:
            await front.loaded.wait()
        for port in self._ports:
            port.check_unused()
        self._may_open.set()
        for front in self._fronts:
            await front.opened.wait()
        self._opened.set()

    async def drain(self) -> None:
        """Tells them to answer what they have, and to end. Their streams to the executor end then, for which
        platform/process/life.py waits.
        """
        self._ending.set()
        for front in self._fronts:
            front.terminate()

    async def _keep(self, front: "_Front") -> None:
        """Starts a front process again whenever it ends."""
        pause_s = _FIRST_PAUSE_S
        try:
            while not self._ending.is_set():
                began_s = time.monotonic()
                code = await front.live(self._settings, self._may_open, self._ending, self.metrics)
                self.metrics.end(front.number)
                if self._ending.is_set():
                    break
                if not self._opened.is_set():
                    problem = f"front process {front.number} ended with {code} before it could serve"
                    raise SetupError(problem) if code == _SETUP_ERROR else RuntimeError(problem)
                has_lived = time.monotonic() - began_s > _STEADY_S
                pause_s = _FIRST_PAUSE_S if has_lived else min(2 * pause_s, _LAST_PAUSE_S)
                event = "a front process ended; another takes its place"
                log_warning(event, front=front.number, code=code, in_s=pause_s)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._ending.wait()
        finally:
            front.ended.set()


class _Front:
    """One of them, whichever process it is at the time."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.loaded, self.opened, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None

    def terminate(self) -> None:
        """Has its process drain."""
        if self._process and self._process.returncode is None:
            self._process.terminate()

    async def live(self, settings: bytes, may_open: asyncio.Event, ending: asyncio.Event, metrics: FrontMetrics) -> int:
        """One process from its start to its end. Returns its exit code."""
        ours, theirs = socket.socketpair()
        with theirs:
            # A session of its own: Ctrl-C is for this process, which then drains the others.
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "neuronpipe.cli.front", str(self.number), str(os.getpid())),
                stdin=theirs.fileno(),
                start_new_session=True,
            )
        process = self._process
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_MAX_LINE_BYTES)
        try:
            if ending.is_set():
                process.terminate()
            writer.write(settings)
            with suppress(ConnectionError):
                async for line in reader:
                    message = json.loads(line)
                    if message == "loaded":
                        self.loaded.set()
                        await may_open.wait()
                        writer.write(b"open\n")
                    elif message == "opened":
                        self.opened.set()
                        log("a front process is open", front=self.number, pid=process.pid)
                    else:
                        metrics.update(self.number, message)
            return await process.wait()
        finally:
            writer.close()
            if process.returncode is None:
                process.kill()
                await process.wait()


class SharedPort:
    """A port for processes that all listen with SO_REUSEPORT: the kernel gives each new connection to one of them.

    `address`: HOST:PORT, with the number of a free port where 0 was asked for; "" for none. `option` has set it.
    """

    def __init__(self, option: str, address: str, sockets: list[socket.socket]) -> None:
        self.address = address
        self._option = option
        self._sockets = sockets

    def check_unused(self) -> None:
        """Raises SetupError where a process listens on it, which SO_REUSEPORT alone would allow."""
        for held in self._sockets:
            _bind(self._option, self.address, held.family, held.getsockname(), is_shared=False).close()


@contextmanager
def shared_port(option: str, listen: str) -> Iterator[SharedPort]:
    """Keeps a port from others for the block: bound, but without taking connections. Raises SetupError."""
    if not listen:
        yield SharedPort(option, "", [])
        return
    host, _, text = listen.rpartition(":")
    port = int(text)
    try:
        found: list[Any] = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SetupError(f"{option}: cannot listen on {listen}: {error.strerror}") from error
    with ExitStack() as stack:
        sockets = []
        for family, _, _, _, where in found:
            _bind(option, listen, family, (where[0], port, *where[2:]), is_shared=False).close()
            held = stack.enter_context(_bind(option, listen, family, (where[0], port, *where[2:]), is_shared=True))
            port = held.getsockname()[1]
            sockets.append(held)
        yield SharedPort(option, f"{host}:{port}", sockets)


def _bind(option: str, listen: str, family: int, where: Any, *, is_shared: bool) -> socket.socket:
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        # To bind beside closed connections and sockets that do not listen; with the second also beside those that do.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(where)
    except OSError as error:
        bound.close()
        raise SetupError(f"{option}: cannot listen on {listen}: {error.strerror}") from error
    return bound


async def run_fronted(settings: AllSettings, telemetry: Telemetry, access: Access) -> None:
    """Serves until SIGTERM, or until the executor cannot go on. `access`: here of the metrics alone; each front process
    has its own. Raises SetupError.
    """

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[Mapping[str, Handler]]:
        repository = live_repository(settings, with_artifacts=True)
        with (
            shared_port("--listen", settings.listen) as port,
            shared_port("--http-listen", settings.http_listen) as http_port,
            TemporaryDirectory(prefix="neuronpipe-") as folder,
        ):
            executor = f"unix:{folder}/executor.sock"
            given = _front_settings(settings, port.address, http_port.address, executor)
            fronts = Fronts(settings.front_processes, given, [port, http_port])
            telemetry.meters.add_others = fronts.metrics.add_to
            life.on_draining(fronts.drain)
            async with (
                access.kept_up_to_date(shares_budgets=False),
                running_executor([], settings, telemetry, repository.bundles()) as stage,
                running_live_models(repository, [stage.models], telemetry.meters),
                _executor_door(stage, settings, telemetry, executor, life),
                fronts.running(),
            ):
                await fronts.open()
                log("listening", address=port.address)
                if http_port.address:
                    log("listening for HTTP", address=http_port.address)
                yield {}

    await serve(settings.service, settings, [], assemble, telemetry.meters)


def _front_settings(settings: AllSettings, listen: str, http_listen: str, executor_target: str) -> dict[str, Any]:
    """What a front process gets: all settings but the executor's and those of the service as a whole."""
    of_executor = {name: field.default for name, field in EngineSettings.model_fields.items()}
    of_service = {"front_processes": 0, "metrics_listen": ""}
    addresses = {"listen": listen, "http_listen": http_listen, "executor_target": executor_target}
    return settings.model_dump(mode="json") | of_executor | of_service | addresses


@asynccontextmanager
async def _executor_door(
    stage: NeuronExecutorStage, settings: AllSettings, telemetry: Telemetry, listen: str, life: Life
) -> AsyncIterator[None]:
    """Takes the items of front processes."""
    private = settings.model_copy(update={"listen": listen, "max_connection_age_s": 0.0, "max_stream_idle_s": 0.0})
    door = GrpcDoor(private, [EXECUTE, *trace_rpcs(telemetry.traces)], event="listening for front processes")
    method = stage_method(
        EXECUTE, stage.execute, telemetry, models=stage.models, max_message_bytes=settings.max_message_bytes
    )
    try:
        await door.listen(life.health, life.in_flight)
        door.open({EXECUTE.path: method} | trace_handlers(telemetry.traces))
        yield
    finally:
        await door.stop(0)
