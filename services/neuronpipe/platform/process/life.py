"""The lifecycle of a process, for any protocol.

Start: take addresses (stages also listen, and refuse calls as "starting") → load → listen → SERVING. End: SIGTERM →
NOT_SERVING → notify the parts of the process → refuse new calls, finish calls in flight within the grace period →
unload.
"""

import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

from neuronpipe.core.logs import log, log_fault, log_warning
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.platform.process.background import run_beside
from neuronpipe.platform.process.door import Door
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.settings import ProcessSettings

# Time limit for unloading models after all calls, and for ending a start. A hung device must not keep the process.
_UNLOAD_LIMIT_S = 10.0
# The longest grace period after a part of the service has crashed: enough to answer all calls with an error.
_CRASH_GRACE_S = 2.0
# The interval at which a draining process asks all callers to leave, while new calls come. Callers may have connected
# since, and a balancer sends some of them to another server each time.
_ASK_AGAIN_S = 1.0
# The longest time in which callers learn that they are to leave: round trips of networks are shorter.
_HAND_OVER_LIMIT_S = 1.0
# The longest time in which the process still refuses new calls as "stopping". Then it closes the connections.
_LATE_CALLS_LIMIT_S = 1.0

# Opens each door of a process with its handlers. Raises SetupError.
OpenDoors: TypeAlias = Callable[[], None]


class Life:
    """A process that serves. Its parts use this object."""

    def __init__(
        self, name: str, settings: ProcessSettings, doors: Sequence[Door], meters: Meters | None = None
    ) -> None:
        self.health = HealthBoard(service for door in doors for service in door.services)
        if meters:
            meters.gauge(Metrics.PROCESS_WELL, lambda: self.health.is_well)
        self.is_open = False
        self._doors = doors
        self.in_flight = InFlight(
            name,
            settings.max_message_bytes,
            settings.max_receiving_bytes,
            max_receive_s=settings.max_receive_s,
            meters=meters,
        )
        self._on_draining: list[Callable[[], Awaitable[None]]] = []

    def on_draining(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Runs `tell`, and waits for it, after NOT_SERVING is reported and before new calls are refused."""
        self._on_draining.append(tell)

    async def listen(self) -> None:
        """Takes the addresses of all doors. Raises SetupError."""
        for door in self._doors:
            await door.listen(self.health, self.in_flight)

    def open(self, open_doors: OpenDoors) -> None:
        """Answers calls from now on. Raises SetupError if another process has begun to listen at an address."""
        # The existing objects live as long as the process, or its models. A collection that visits them all takes 40
        # ms, in which calls wait, and many calls at once make Python collect.
        gc.collect()
        gc.freeze()
        self.is_open = True
        open_doors()
        self.health.open()
        log("ready")

    async def drain(self, grace_s: float, *, answers_late_calls: bool = True) -> None:
        """Asks callers to leave, refuses new calls, and waits for the calls in flight and their responses.

        New calls are answered until none has come for a moment, or half of the time is over. After half of the time,
        calls whose messages have not arrived are also refused. After `grace_s` the remaining calls are ended.
        """
        deadline_s = time.monotonic() + grace_s
        log("draining", calls=self.in_flight.count, grace_s=grace_s)
        self.health.drain()
        if self._on_draining:
            results = await asyncio.gather(
                *(asyncio.wait_for(tell(), grace_s) for tell in self._on_draining), return_exceptions=True
            )
            for result in results:
                if isinstance(result, TimeoutError):
                    log_warning("a part of the service did not drain in time", grace_s=grace_s)
                elif isinstance(result, Exception):
                    log_fault("a part of the service cannot drain", result)
        if answers_late_calls:
            for door in self._doors:
                door.ask_to_leave()
            left_s = grace_s / 2
            while left_s > 0 and not await self.in_flight.wait_until_quiet(min(_ASK_AGAIN_S, left_s)):
                left_s -= _ASK_AGAIN_S
                for door in self._doors:
                    door.ask_to_leave()
            limit_s = min(_HAND_OVER_LIMIT_S, max(0.0, deadline_s - time.monotonic()))
            await asyncio.gather(*(door.stop_listening(limit_s) for door in self._doors))
        self.in_flight.drain()
        for door in self._doors:
            door.drain()
        await self.in_flight.wait_until_idle(max(0.0, deadline_s - grace_s / 2 - time.monotonic()))
        self.in_flight.refuse_arriving()
        await self.in_flight.wait_until_idle(max(0.0, deadline_s - time.monotonic()))
        self.health.end_watches()
        await self.in_flight.wait_until_quiet(min(_LATE_CALLS_LIMIT_S, max(0.0, deadline_s - time.monotonic())))
        await self.stop(max(0.0, deadline_s - time.monotonic()))

    async def stop(self, grace_s: float = 0.0) -> None:
        """Ends every call and connection, after `grace_s` at most."""
        await asyncio.gather(*(door.stop(grace_s) for door in self._doors))


# Starts the objects behind the doors of a process, yields the function that opens the doors, and closes the objects.
Assemble: TypeAlias = Callable[[Life], AbstractAsyncContextManager[OpenDoors]]


async def serve(
    name: str,
    settings: ProcessSettings,
    doors: Sequence[Door],
    assemble: Assemble,
    meters: Meters | None = None,
    *,
    idle_exit_s: float = 0.0,
) -> None:
    """Serves until SIGTERM or SIGINT.

    Raises SetupError for an address that cannot be used, and any error of `assemble`. `meters`: record what callers do
    beyond limits. `idle_exit_s`: seconds without a call after which the process ends as by SIGTERM; 0: never.
    """
    loop, serving, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    life = Life(name, settings, doors, meters)
    make_room_for(len(doors) * settings.max_connections)

    give_up: asyncio.TimerHandle | None = None

    def on_signal() -> None:
        nonlocal give_up
        if serving and not (life.is_open or stop.is_set()):  # loading can take minutes
            serving.cancel()
            give_up = loop.call_later(_UNLOAD_LIMIT_S, _end_process)
        stop.set()

    async def stop_when_unused() -> None:
        await life.in_flight.wait_until_unused(idle_exit_s)
        log("not used any more", idle_exit_s=idle_exit_s)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    try:
        try:
            await life.listen()
            async with assemble(life) as open_doors:
                life.open(open_doors)
                try:
                    async with run_beside(*([stop_when_unused()] if idle_exit_s else [])):
                        await stop.wait()
                    await life.drain(settings.grace_s)
                except asyncio.CancelledError:
                    # A part has crashed. Its calls may take too long to wait for them.
                    await life.drain(min(settings.grace_s, _CRASH_GRACE_S), answers_late_calls=False)
                    raise
                finally:
                    give_up = give_up or loop.call_later(_UNLOAD_LIMIT_S, _end_process)
        finally:
            try:
                await life.stop()
            finally:
                if give_up:
                    give_up.cancel()
    except asyncio.CancelledError:  # also if a start fails while it is being ended
        if life.is_open or not stop.is_set() or not serving:
            raise
        serving.uncancel()
    log("stopped")


def _end_process() -> None:
    log_warning("a thread did not end; the process ends without it", limit_s=_UNLOAD_LIMIT_S)
    os._exit(1)


# linux/prctl.h
_PR_SET_PDEATHSIG = 1


def end_with(parent_pid: int, number: int) -> None:
    """Makes the kernel send a signal to this process when its parent dies, for any reason."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent_pid:
        sys.exit(1)


# Open files for everything but callers: bundles, libraries, pipes, connections to other services.
_OTHER_FILES = 512


def make_room_for(connections: int) -> None:
    """Raises the process's limit of open files as far as allowed; logs a warning if that is not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted_files = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted_files:
        return
    allowed = wanted_files if hard == resource.RLIM_INFINITY else min(wanted_files, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted_files:
        log_warning(
            "max_connections is more than the limit for open files allows", open_files=allowed, needed=wanted_files
        )
