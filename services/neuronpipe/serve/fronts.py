"""Front processes: gateway, tokenizer and postprocessor, several times, before the one executor of this process.

This process starts them, opens them together, replaces those that die, and drains them as one service. Each is
`python -m neuronpipe.cli.front` (serve/front.py), whose standard input is a socket to this process.
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
from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.settings import values_of
from neuronpipe.gateway.access import Access
from neuronpipe.platform.process.background import run_apart, run_beside, wait_for_event
from neuronpipe.platform.process.life import Life, OpenDoors, serve
from neuronpipe.platform.process.listener import bind_port, telling_bind_problems
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.items import EXECUTE, StageMethod
from neuronpipe.rpc.trace_service import trace_handlers, trace_services
from neuronpipe.serve.metric_sums import FrontMetrics
from neuronpipe.serve.settings import AllSettings
from neuronpipe.stages.neuron_executor.stage import NeuronExecutorStage, running_executor
from neuronpipe.stages.settings import EngineSettings

# The exit code of a process whose settings or bundles are wrong (cli/__init__.py).
_SETUP_ERROR = 2
# Limit of a message, which may contain the metrics of many models.
_MAX_LINE_BYTES = 64 << 20
# The pause between a front process's end and its successor's start, doubled each time unless the process was steady.
_FIRST_PAUSE_S = 0.1
_LAST_PAUSE_S = 5.0
_STEADY_S = 10.0
# The time that front processes get to end after their requests.
_END_LIMIT_S = 2.0


class Fronts:
    """The front processes of a service, in the process that starts them."""

    def __init__(self, count: int, settings: Mapping[str, Any], ports: "Sequence[SharedPort]") -> None:
        """`settings`: the settings of each front process, as JSON can hold them. `ports`: the ports that they share."""
        self.metrics = FrontMetrics()
        self._settings = json.dumps(settings).encode() + b"\n"
        self._ports = ports
        self._fronts = [_Front(number) for number in range(1, count + 1)]
        self._ending = asyncio.Event()
        self._may_open = asyncio.Event()
        self._opened = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs the front processes beside the block, and ends them with it.

        Raises SetupError if a process cannot start with its settings, and RuntimeError if it ends for another reason
        before all are open.
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
        """Lets all front processes take connections once all have loaded, and returns when all do.

        Raises SetupError if another service listens on a port.
        """
        for front in self._fronts:
            await front.loaded.wait()
        for port in self._ports:
            port.check_unused()
        self._may_open.set()
        for front in self._fronts:
            await front.opened.wait()
        self._opened.set()

    def report(self, is_well: bool) -> None:
        """Tells all front processes whether the executor's process is well. Their health shows it."""
        for front in self._fronts:
            front.report(is_well)

    async def drain(self) -> None:
        """Tells all front processes to answer their requests, and to end.

        The streams to the executor then end, for which platform/process/life.py waits.
        """
        self._ending.set()
        for front in self._fronts:
            front.terminate()

    async def _keep(self, front: "_Front") -> None:
        """Starts a front process again at each end."""
        pause_s = _FIRST_PAUSE_S
        try:
            while not self._ending.is_set():
                began_s = time.monotonic()
                try:
                    code: int | str = await front.live(self._settings, self._may_open, self._ending, self.metrics)
                except OSError as error:  # no memory, process or file is free, but the other front processes serve
                    if not self._opened.is_set():
                        raise
                    code = str(error.strerror)
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
                await wait_for_event(self._ending, pause_s)
        finally:
            front.ended.set()


class _Front:
    """A front process and its successors, under one number."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.loaded, self.opened, self.ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._process: asyncio.subprocess.Process | None = None
        # The connection to the running process.
        self._writer: asyncio.StreamWriter | None = None
        self._is_well = True

    def terminate(self) -> None:
        if self._process and self._process.returncode is None:
            self._process.terminate()

    def report(self, is_well: bool) -> None:
        self._is_well = is_well
        if self._writer:
            self._writer.write(json.dumps(is_well).encode() + b"\n")

    async def live(self, settings: bytes, may_open: asyncio.Event, ending: asyncio.Event, metrics: FrontMetrics) -> int:
        """Runs a process from its start to its end. Returns its exit code."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_unix_connection(sock=ours, limit=_MAX_LINE_BYTES)
        try:
            with theirs:
                # A session of its own, so that Ctrl-C reaches only this process, which then drains the others.
                process = self._process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-m", "neuronpipe.cli.front", str(self.number), str(os.getpid())),
                    stdin=theirs.fileno(),
                    start_new_session=True,
                )
            if ending.is_set():
                process.terminate()
            writer.write(settings)
            with suppress(ConnectionError):
                async for line in reader:
                    if not line.endswith(b"\n"):  # the process was killed while it wrote
                        break
                    message = json.loads(line)
                    if message == "loaded":
                        self.loaded.set()
                        await may_open.wait()
                        writer.write(b"open\n")
                    elif message == "opened":
                        self.opened.set()
                        self._writer = writer
                        self.report(self._is_well)
                        log("a front process is open", front=self.number, pid=process.pid)
                    else:
                        metrics.update(self.number, message)
            return await process.wait()
        finally:
            self._writer = None
            writer.close()
            if self._process and self._process.returncode is None:
                self._process.kill()
                await self._process.wait()


class SharedPort:
    """A port on which several processes listen with SO_REUSEPORT. The kernel distributes new connections among them.

    `address`: HOST:PORT, with the chosen number for port 0; "" for no port. `option`: the option that set the address.
    """

    def __init__(self, option: str, address: str) -> None:
        self.address = address
        self._option = option

    def check_unused(self) -> None:
        """Raises SetupError if another process listens on the port, which SO_REUSEPORT alone would allow."""
        if self.address:
            with telling_bind_problems(self._option, self.address):
                for bound in bind_port(self.address, shares_port=False):
                    bound.close()


@contextmanager
def shared_port(option: str, listen: str) -> Iterator[SharedPort]:
    """Reserves a port for the block: bound, but without taking connections. Raises SetupError."""
    with ExitStack() as stack:
        port = SharedPort(option, listen)
        if listen:
            with telling_bind_problems(option, listen):
                sockets = [stack.enter_context(bound) for bound in bind_port(listen, shares_port=True)]
            port.address = f"{listen.rpartition(':')[0]}:{sockets[0].getsockname()[1]}"
            port.check_unused()
        yield port


async def run_fronted(settings: AllSettings, telemetry: Telemetry, access: Access) -> None:
    """Serves until SIGTERM, or until the executor cannot continue. Raises SetupError.

    `access`: only for the metrics here; each front process has its own.
    """

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[OpenDoors]:
        repository = await run_apart(live_repository, settings.models, with_artifacts=True)
        bundles = await run_apart(repository.bundles)
        with (
            shared_port("--listen", settings.process.listen) as port,
            shared_port("--http-listen", settings.gateway.http.http_listen) as http_port,
            TemporaryDirectory(prefix="neuronpipe-") as folder,
        ):
            executor = f"unix:{folder}/executor.sock"
            front = front_settings(settings, port.address, http_port.address, executor)
            fronts = Fronts(settings.front_processes, front, [port, http_port])
            telemetry.meters.include(fronts.metrics.add_to)
            life.on_draining(fronts.drain)
            async with (
                access.kept_up_to_date(shares_budgets=False),
                running_executor([], settings.executor, telemetry, bundles, fronts.report) as stage,
                running_live_models(repository, [stage.models], telemetry.meters),
                _executor_door(stage, settings.process, telemetry, executor, life),
                fronts.running(),
            ):
                await fronts.open()
                log("listening", address=port.address)
                if http_port.address:
                    log("listening for HTTP", address=http_port.address)
                yield lambda: None  # the front processes have the doors

    await serve(settings.service, settings.process, [], assemble, telemetry.meters)


def front_settings(settings: AllSettings, listen: str, http_listen: str, executor_target: str) -> dict[str, Any]:
    """Returns the settings of a front process: all except the settings of the executor and the service."""
    executor_defaults = values_of(EngineSettings())
    service_defaults = {"front_processes": 0, "metrics_listen": ""}
    addresses = {"listen": listen, "http_listen": http_listen, "executor_target": executor_target}
    return values_of(settings) | executor_defaults | service_defaults | addresses


@asynccontextmanager
async def _executor_door(
    stage: NeuronExecutorStage, settings: ProcessSettings, telemetry: Telemetry, listen: str, life: Life
) -> AsyncIterator[None]:
    private = settings.model_copy(update={"listen": listen, "max_connection_age_s": 0.0})
    services = [EXECUTE.service, *trace_services(telemetry.traces)]
    door = GrpcDoor(private, services, event="listening for front processes")
    limit_bytes = settings.max_message_bytes
    method = StageMethod(EXECUTE, stage.execute, telemetry, models=stage.models, max_message_bytes=limit_bytes)
    try:
        await door.listen(life.health, life.in_flight)
        door.open([(EXECUTE, method), *trace_handlers(telemetry.traces)])
        yield
    finally:
        await door.stop(0)
