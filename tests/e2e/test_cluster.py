"""What a cluster does to containers while a load runs: rolling updates, scaling, drains, slow starts, a lost node."""

import asyncio
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from neuronpipe.core.errors import DeadlineExceeded, Overloaded, Unavailable
from tests.e2e.load import Load, load
from tests.e2e.stack import Container, Stack, wait_until
from tests.servers.ports import free_port

_STAGES = ("tokenizer", "neuron-executor", "postprocessor")
# Between two looks at names, as gateways take them (rpc/endpoints.py).
_RESOLVE_EVERY_S = 5.0
# A connection whose other side is silent ends after this long: rpc/client.py pings after 20 s and waits for 5.
_SILENCE_S = 25.0
# What Compose lets a container have for its end (stop_grace_period in docker/compose.yaml).
_STOP_GRACE_S = 25.0


@pytest.fixture(autouse=True)
def _one_of_each(stack: Stack) -> Iterator[None]:
    """Afterwards there is one container of each service again."""
    yield
    stack.up("--no-deps")
    assert {len(stack.containers(service)) for service in _STAGES} == {1}


def _scale(stack: Stack, **counts: int) -> None:
    scales = [f"--scale={name.replace('_', '-')}={count}" for name, count in counts.items()]
    stack.up("--no-deps", *scales)


def _stop(stack: Stack, container: Container) -> None:
    """As Kubernetes ends a pod: SIGTERM, and time for what is in flight."""
    began_s = time.monotonic()
    stack.docker("stop", "--time", "60", container.id)
    assert stack.inspect(container.id).state["ExitCode"] == 0
    assert time.monotonic() - began_s < _STOP_GRACE_S


def _end(stack: Stack, container: Container) -> None:
    _stop(stack, container)
    stack.docker("rm", container.id)


def _replace_all(stack: Stack) -> None:
    """A rolling update of each stage with maxSurge 1 and maxUnavailable 0: a new container is healthy before an old one
    ends.
    """
    before = {service: stack.containers(service) for service in _STAGES}
    for old in zip(*before.values(), strict=True):
        _scale(stack, **{service: len(containers) + 1 for service, containers in before.items()})
        for container in old:
            _end(stack, container)
    for service, containers in before.items():
        assert not {container.id for container in containers} & {
            container.id for container in stack.containers(service)
        }


def _nothing_lost(going: Load) -> None:
    assert (going.wrong, going.failures) == ([], [])


async def test_nobody_notices_a_rolling_update_of_all_stages(stack: Stack) -> None:
    await asyncio.to_thread(_scale, stack, **dict.fromkeys(_STAGES, 2))
    async with load(stack.target) as going:
        await asyncio.to_thread(_replace_all, stack)
        await going.answers(100)
    _nothing_lost(going)


@contextmanager
def _another_gateway(stack: Stack, address: str) -> Iterator[Container]:
    """A second gateway, at an address of the host, for the time of a block."""
    second = stack.inspect(stack.compose("run", "-d", "--no-deps", "-p", f"{address}:50050", "gateway").split()[-1])
    try:
        yield second
    finally:
        stack.docker("rm", "--force", second.id)


# Callers of gateways neither repeat a call nor watch health: what HTTP/2 says has to be enough.


async def test_nobody_notices_a_rolling_update_of_two_gateways_whose_addresses_stay(stack: Stack) -> None:
    [first] = stack.containers("gateway")
    address = f"127.0.0.1:{free_port()}"
    with _another_gateway(stack, address) as second:
        await asyncio.to_thread(stack.wait_until_healthy)
        async with load(f"ipv4:{stack.target},{address}") as going:
            for gateway in (first, second, first):
                await asyncio.to_thread(_restart, stack, gateway)
        _nothing_lost(going)


async def test_nobody_notices_that_a_gateway_is_scaled_to_two_and_back(stack: Stack) -> None:
    address = f"127.0.0.1:{free_port()}"
    async with load(f"ipv4:{stack.target},{address}") as going:
        with _another_gateway(stack, address) as second:
            await asyncio.to_thread(_wait_for_requests, stack, second)
            await going.answers(100)
            await asyncio.to_thread(_stop, stack, second)
        await going.answers(100)
    _nothing_lost(going)


def _restart(stack: Stack, gateway: Container) -> None:
    """Returns when the gateway gets requests again."""
    _stop(stack, gateway)
    stack.docker("start", gateway.id)
    _wait_for_requests(stack, gateway)


def _wait_for_requests(stack: Stack, gateway: Container) -> None:
    stack.wait_until_healthy()
    name = "neuronpipe_request_duration_seconds_count"
    wait_until("it gets requests", lambda: stack.metric(gateway, name) > 0)


@pytest.mark.parametrize("service", _STAGES)
async def test_nobody_notices_that_a_stage_is_scaled_to_four_and_back(stack: Stack, service: str) -> None:
    async with load(stack.target) as going:
        await asyncio.to_thread(_scale, stack, **{service: 4})
        containers = stack.containers(service)
        before = [await asyncio.to_thread(_items, stack, container) for container in containers]
        await asyncio.to_thread(
            wait_until,
            "all get work",
            lambda: all(_items(stack, container) > then for container, then in zip(containers, before, strict=True)),
        )
        await asyncio.to_thread(_scale, stack, **{service: 1})
        assert len(stack.containers(service)) == 1
        await going.answers(100)
    assert len(containers) == 4
    _nothing_lost(going)


def _items(stack: Stack, container: Container) -> float:
    return stack.metric(container, "neuronpipe_item_duration_seconds_count")


@contextmanager
def _names(stack: Stack) -> Iterator["_Hosts"]:
    """The gateway finds the stages by its file of hosts for the time of a block: a test decides who is in it."""
    [gateway] = stack.containers("gateway")
    hosts = _Hosts(stack, gateway)
    try:
        yield hosts
    finally:
        hosts.name({})


class _Hosts:
    """The gateway's file of hosts. The engine mounts it from the host, and the container cannot write it."""

    def __init__(self, stack: Stack, gateway: Container) -> None:
        self._file = Path(stack.docker("inspect", "--format", "{{.HostsPath}}", gateway.id).strip())
        self._own = self._file.read_text()

    def name(self, containers: Mapping[str, Sequence[Container]]) -> None:
        """These services have these containers, and no others; without any, the file is as it was."""
        lines = [f"{container.address}\t{service}\n" for service, found in containers.items() for container in found]
        # In place: what is mounted is this file, not its name.
        self._file.write_text(self._own + "".join(lines))


async def test_nobody_notices_addresses_that_leave_dns_before_they_drain(stack: Stack) -> None:
    await asyncio.to_thread(_scale, stack, **dict.fromkeys(_STAGES, 2))
    with _names(stack) as names:
        found = {service: stack.containers(service) for service in _STAGES}
        names.name(found)
        async with load(stack.target) as going:
            await asyncio.sleep(2 * _RESOLVE_EVERY_S)
            names.name({service: containers[1:] for service, containers in found.items()})
            # The preStop sleep of Kubernetes: out of DNS, and still served.
            await asyncio.sleep(2 * _RESOLVE_EVERY_S)
            for leaving, _ in found.values():
                await asyncio.to_thread(_end, stack, leaving)
            await going.answers(100)
        _nothing_lost(going)


@pytest.mark.parametrize("service", ["tokenizer", "postprocessor"])
async def test_nobody_notices_that_one_of_two_containers_is_killed(stack: Stack, service: str) -> None:
    async with load(stack.target) as going:
        await asyncio.to_thread(_scale, stack, **{service: 2})
        first, _ = stack.containers(service)
        await asyncio.to_thread(stack.kill, first)
        await asyncio.to_thread(
            wait_until, "it is back", lambda: stack.inspect(first.id).restarts == first.restarts + 1
        )
        await asyncio.to_thread(stack.wait_until_healthy)
        await going.answers(100)
    _nothing_lost(going)


async def test_a_container_that_starts_slowly_gets_no_request_before_it_is_ready(stack: Stack) -> None:
    async with load(stack.target) as going:
        [first] = stack.containers("neuron-executor")
        await asyncio.to_thread(
            stack.compose, "up", "-d", "--no-deps", "--scale", "neuron-executor=2", "neuron-executor"
        )
        [slow] = [container for container in stack.containers("neuron-executor") if container.id != first.id]
        await asyncio.to_thread(stack.signal, signal.SIGSTOP, slow)
        await asyncio.sleep(2 * _RESOLVE_EVERY_S)
        await going.answers(100)
        await asyncio.to_thread(stack.signal, signal.SIGCONT, slow)
        await asyncio.to_thread(stack.wait_until_healthy)
        await asyncio.to_thread(wait_until, "it gets work", lambda: _items(stack, slow) > 0)
    _nothing_lost(going)


async def test_a_node_that_is_lost_costs_what_was_in_flight_there_at_most(stack: Stack) -> None:
    """All containers of one of two hosts freeze: they answer nothing, and no connection ends. What they had is computed
    elsewhere once their silence is noticed; from then on nobody notices anything.
    """
    await asyncio.to_thread(_scale, stack, **dict.fromkeys(_STAGES, 2))
    lost = [stack.containers(service)[0] for service in _STAGES]
    async with load(stack.target) as going:
        lost_s = time.monotonic()
        await asyncio.to_thread(stack.signal, signal.SIGSTOP, *lost)
        await asyncio.sleep(_SILENCE_S + 10)
        noticed_s = time.monotonic()
        await going.answers(200)
        await asyncio.to_thread(stack.signal, signal.SIGCONT, *lost)
        await asyncio.to_thread(stack.wait_until_healthy)
        await going.answers(200)
    assert going.wrong == []
    assert {type(failure.error) for failure in going.failures} <= {Unavailable, Overloaded, DeadlineExceeded}
    assert [failure for failure in going.failures if failure.ended_s < lost_s or failure.began_s > noticed_s] == []
