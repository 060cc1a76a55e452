"""One front process: all services except the executor, on a port that front processes share (serve/fronts.py)."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from neuronpipe.core.metrics import Telemetry
from neuronpipe.doors.assembly import GatewayDoors
from neuronpipe.doors.native import INFERENCE_SERVICE
from neuronpipe.gateway.access import access_by
from neuronpipe.platform.process.background import run_beside
from neuronpipe.platform.process.life import Life, OpenDoors, serve
from neuronpipe.platform.tls import ServerTls
from neuronpipe.serve.metric_sums import write_families
from neuronpipe.serve.server import running_gateway, services_of
from neuronpipe.serve.settings import AllSettings

# The pause between two reports of metrics to the parent process.
_REPORT_EVERY_S = 1.0


async def run_front(settings: AllSettings, telemetry: Telemetry, tls: ServerTls | None, parent: socket.socket) -> None:
    """Serves until SIGTERM.

    The process listens once it has loaded, reaches the executor, and its parent allows it. So no connection gets a
    process that cannot serve while another process can.
    """
    reader, writer = await asyncio.open_unix_connection(sock=parent)
    access = access_by(settings.gateway, settings.process, settings.tls, settings.redis, telemetry)
    gateway, services = settings.gateway, services_of(settings)
    doors = GatewayDoors(
        settings.process, gateway, telemetry, tls, access.guard, further_services=services, shares_port=True
    )

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

    async def follow(life: Life) -> None:
        """Follows the health of the executor's process, which is a part of the service."""
        async for line in reader:
            life.health.set("", json.loads(line))

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[OpenDoors]:
        async with running_gateway(settings, telemetry, access, doors, life) as open_doors, run_beside(report(life)):
            await life.health.wait_until_reported(INFERENCE_SERVICE.full_name)
            await tell("loaded")
            await reader.readline()
            async with run_beside(follow(life)):
                yield open_doors

    await serve(settings.service, settings.process, doors.all, assemble, telemetry.meters)
    await tell(write_families(telemetry.meters.families()))
    writer.close()
    await writer.wait_closed()
