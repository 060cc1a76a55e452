"""A stage as a process of its own."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TypeAlias

from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.streams import AnnouncedModels
from neuronpipe.platform.process.door import Handler
from neuronpipe.platform.process.life import Life, serve
from neuronpipe.platform.process.settings import StageSettings
from neuronpipe.platform.tls import ServerTls
from neuronpipe.rpc.door import GrpcDoor
from neuronpipe.rpc.items import StageFunction, StageRpc, stage_method
from neuronpipe.rpc.trace_service import trace_handlers, trace_rpcs

# A stage's function, and its models.
OpenedStage: TypeAlias = tuple[StageFunction, AnnouncedModels]
# Opens a stage, and closes it.
OpenStage: TypeAlias = Callable[[], AbstractAsyncContextManager[OpenedStage]]


async def serve_stage(
    rpc: StageRpc,
    settings: StageSettings,
    telemetry: Telemetry,
    open_stage: OpenStage,
    tls: ServerTls | None = None,
    *,
    leaves_unavailable: bool = False,
) -> None:
    """Serves a stage until SIGTERM. `leaves_unavailable`: see stage_method.

    Raises SetupError, and what `open_stage` raises.
    """

    @asynccontextmanager
    async def assemble(life: Life) -> AsyncIterator[Mapping[str, Handler]]:
        async with open_stage() as (function, models):
            method = stage_method(
                rpc,
                function,
                telemetry,
                models=models,
                max_message_bytes=settings.max_message_bytes,
                leaves_unavailable=leaves_unavailable,
            )
            yield {rpc.path: method} | trace_handlers(telemetry.traces)

    door = GrpcDoor(settings, [rpc, *trace_rpcs(telemetry.traces)], tls, allowed_peers=settings.allowed_names)
    await serve(rpc.service_name, settings, [door], assemble, telemetry.meters)
