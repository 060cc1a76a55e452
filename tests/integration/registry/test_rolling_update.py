"""Gateways that are replaced while their callers have the addresses of all of them."""

import asyncio
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from demo.processes import ServiceProcess, four_processes
from tests.callers.metrics import metric
from tests.e2e.load import load
from tests.integration.processes.test_lifecycle import OPTIONS
from tests.suite.waiting import until

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_REQUESTS = "neuronpipe_request_duration_seconds_count"


def _replace(gateway: ServiceProcess, start: tuple[str, ...]) -> ServiceProcess:
    """Ends a gateway as Kubernetes does, and returns its successor at the same address once that gets requests."""
    gateway.signal(signal.SIGTERM)
    assert gateway.wait() == 0
    successor = ServiceProcess("gateway", *start, "--listen", gateway.target, "--metrics-listen", "127.0.0.1:0")
    until(lambda: metric(successor, _REQUESTS) > 0)
    return successor


async def test_nobody_notices_a_rolling_update_of_the_gateways(fake_repository: Path) -> None:
    with four_processes(fake_repository) as processes, ExitStack() as stack:
        targets = (word for service, option in OPTIONS.items() for word in (option, processes[service].target))
        start = ("--repository", str(fake_repository), *targets)
        second = stack.enter_context(ServiceProcess("gateway", *start)).wait_until_ready()
        gateways = [processes["gateway"], second]
        async with load(f"ipv4:{gateways[0].target},{second.target}") as going:
            for gateway in gateways:
                stack.enter_context(await asyncio.to_thread(_replace, gateway, start))
    assert (going.wrong, going.failures) == ([], [])
