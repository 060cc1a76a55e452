"""One front process: everything but the executor, behind a port that it shares with the others (serve/fronts.py)."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from neuronpipe.core.background import run_beside
from neuronpipe.core.metrics import Telemetry
from neuronpipe.doors.assembly import gateway_doors
from neuronpipe.doors.native import INFERENCE_SERVICE
from neuronpipe.gateway.access import access_by
from neuronpipe.platform.process.door import Handler
from neuronpipe.platform.process.life import Life, serve
from neuronpipe.platform.tls import ServerTls
from neuronpipe.serve.metric_sums import write_families
from neuronpipe.serve.server import additions_of, running_pipeline
from neuronpipe.serve.settings import AllSettings

# How often the others' process learns of the metrics.
_REPORT_EVERY_S = 1.0


async def run_front(settings: AllSettings, telemetry: Telemetry, tls: ServerTls | None, parent: socket.socket) -> None:
    """Serves until SIGTERM. Listens when it has loaded, reaches the executor and is told to by its parent: a connection
    never gets a process that cannot serve while another can.
    """
    reader, writer = await asyncio.open_unix_connection(sock=parent)
    access = access_by(settings, telemetry)
    addition = additions_of(settings)
    doors = gateway_doors(settings, telemetry, tls, access.guard, addition=addition, shares_port=True)

    async def tell(message: object) -> None:
        writer.write(json.dumps(message).encode() + b"\n")
        await writer.drain()

    async def report(life: Life) -> None:
        async for is_open in life.health.watch(""):
            if is_open:
                break
        await tell("opened")
        while True:
            await asyncio.sleep(_REPORT_EVERY_S)
            await tell(write_families(telemetry.meters.families()))

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[Mapping[str, Handler]]:
        async with running_pipeline(settings, telemetry, access, doors, life) as handlers, run_beside(report(life)):
            await life.health.wait_until_reported(INFERENCE_SERVICE.full_name)
            await tell("loaded")
            await reader.readline()
            yield handlers

    await serve(settings.service, settings, doors, assemble, telemetry.meters)
    await tell(write_families(telemetry.meters.families()))
    writer.close()
    await writer.wait_closed()
