"""The stages of a gateway in other processes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.gateway.coalescing import Coalescer
from neuronpipe.gateway.held_items import HeldItems
from neuronpipe.platform.process.background import run_beside
from neuronpipe.platform.tls import WatchedTls
from neuronpipe.rpc.endpoints import follow_endpoints
from neuronpipe.rpc.items import EXECUTE, POSTPROCESS, TOKENIZE

# The time for which the first requests wait for the gateway's connections; a stage that is there takes milliseconds.
_CONNECT_LIMIT_S = 1.0
_RPCS = {rpc.service_name: rpc for rpc in (TOKENIZE, EXECUTE, POSTPROCESS)}


@asynccontextmanager
async def running_far_stages(
    targets: Mapping[str, str],
    meters: Meters,
    report: Callable[[str, bool], None],
    tls: WatchedTls | None = None,
    held_items: HeldItems | None = None,
) -> AsyncIterator[Mapping[str, Coalescer]]:
    """Runs the stages behind targets. Yields them by the names of their services.

    `report` is called with each stage and whether it can be reached, at first and when that changes. `tls`: TLS of the
    connections to hosts; Unix sockets have none. `held_items`: see Coalescer.
    """
    reached: set[str] = set()
    complete, ending = asyncio.Event(), asyncio.Event()

    async def note(service: str, is_reached: bool) -> None:
        (reached.add if is_reached else reached.discard)(service)
        report(service, is_reached)
        if reached == coalescers.keys():
            complete.set()
            log("all stages reached")
        elif not is_reached and not ending.is_set():
            log_warning("stage lost", stage=service)

    coalescers = {
        service: Coalescer(service, partial(note, service), meters.counter(Metrics.RETRIED, service), held_items)
        for service in targets
    }
    for service in coalescers:
        report(service, False)
    async with run_beside(
        *(
            follow_endpoints(_RPCS[service], target, coalescers[service].serve, tls)
            for service, target in targets.items()
        )
    ):
        try:
            async with asyncio.timeout(_CONNECT_LIMIT_S):
                await complete.wait()
        except TimeoutError:  # a stage that is down must not keep the others' models from being listed
            log_warning("stages not reached yet", stages=sorted(coalescers.keys() - reached))
        yield coalescers
        ending.set()
