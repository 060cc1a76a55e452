"""The lifecycle of a process, for any protocol.

Take addresses (stages listen, too, and refuse calls as "starting") → load → listen → SERVING → SIGTERM → NOT_SERVING →
notify the parts of the process → refuse new calls, finish those in flight within the grace period → unload.
"""

import asyncio
import ctypes
import gc
import os
import resource
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

from neuronpipe.core.background import run_beside
from neuronpipe.core.logs import log, log_fault, log_warning
from neuronpipe.core.metrics import Meters
from neuronpipe.platform.process.door import Door, Handler
from neuronpipe.platform.process.health import HealthBoard
from neuronpipe.platform.process.in_flight import InFlight
from neuronpipe.platform.process.settings import ProcessSettings

# The time limit for unloading models after all calls have ended. A device that hangs must not keep the process alive.
_UNLOAD_LIMIT_S = 10.0
# The longest grace period after a part of the service has crashed. It is long enough to answer all calls with an error.
_CRASH_GRACE_S = 2.0
# While new calls come, callers that have connected since are asked to leave, too. A balancer takes some of them to
# another server each time.
_ASK_AGAIN_S = 1.0
# The longest time in which callers learn that they are to leave: round trips of networks are shorter.
_HAND_OVER_LIMIT_S = 1.0
# The longest time in which new calls still get the answer that the process stops, before connections are closed.
_LATE_CALLS_LIMIT_S = 1.0


class Life:
    """A process that serves. Its parts use this object."""

    def __init__(
        self, name: str, settings: ProcessSettings, doors: Sequence[Door], meters: Meters | None = None
    ) -> None:
        self.health = HealthBoard(service for door in doors for service in door.services)
        self.is_open = False
        self._doors = doors
        self.in_flight = InFlight(
            name,
            settings.max_message_bytes,
            settings.max_receiving_bytes,
            max_receive_s=settings.max_receive_s,
            meters=meters,
        )
        self._told: list[Callable[[], Awaitable[None]]] = []

    def on_draining(self, tell: Callable[[], Awaitable[None]]) -> None:
        """Runs `tell`, and waits for it, after NOT_SERVING is reported and before new calls are refused."""
        self._told.append(tell)

    async def listen(self) -> None:
        """Takes the addresses of all doors. Raises SetupError."""
        for door in self._doors:
            await door.listen(self.health, self.in_flight)

    def open(self, handlers: Mapping[str, Handler]) -> None:
        """Answers calls from now on. Raises SetupError, see Door."""
        # What is there lives as long as the process, or its models. To look at all of it takes 40 ms, in which calls
        # wait, and many calls at once make Python look.
        gc.collect()
        gc.freeze()
        self.is_open = True
        for door in self._doors:
            door.open(handlers)
        self.health.open()
        log("ready")

    async def drain(self, grace_s: float, *, answers_late_calls: bool = True) -> None:
        """Asks callers to leave, and answers them until no new call has come for a moment, or half of the time is over.
        Then it refuses new calls, after half of the time also those whose messages have not come, and waits for the
        calls in flight and for their responses to be sent.

        After `grace_s` it ends the rest.
        """
        deadline_s = time.monotonic() + grace_s
        log("draining", calls=self.in_flight.count, grace_s=grace_s)
        self.health.drain()
        if self._told:
            results = await asyncio.gather(
                *(asyncio.wait_for(tell(), grace_s) for tell in self._told), return_exceptions=True
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


# Opens the handlers of a process, by their paths, and closes them.
Assemble: TypeAlias = Callable[[Life], AbstractAsyncContextManager[Mapping[str, Handler]]]


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

    Raises SetupError for an address that cannot be used, and whatever `assemble` raises. `meters`: of what callers do
    beyond limits. `idle_exit_s`: seconds without a call after which it ends as by SIGTERM; 0: never.
    """
    loop, serving, stop = asyncio.get_running_loop(), asyncio.current_task(), asyncio.Event()
    life = Life(name, settings, doors, meters)
    make_room_for(len(doors) * settings.max_connections)

    def on_signal() -> None:
        if serving and not (life.is_open or stop.is_set()):  # loading can take minutes
            serving.cancel()
        stop.set()

    async def stop_when_unused() -> None:
        await life.in_flight.wait_until_unused(idle_exit_s)
        log("not used any more", idle_exit_s=idle_exit_s)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    give_up = None
    try:
        try:
            await life.listen()
            async with assemble(life) as handlers:
                life.open(handlers)
                try:
                    async with run_beside(*([stop_when_unused()] if idle_exit_s else [])):
                        await stop.wait()
                    await life.drain(settings.grace_s)
                except asyncio.CancelledError:
                    # A part has crashed. Its calls may take long to end, too long to wait for them.
                    await life.drain(min(settings.grace_s, _CRASH_GRACE_S), answers_late_calls=False)
                    raise
                finally:
                    give_up = loop.call_later(_UNLOAD_LIMIT_S, _end_process)
        finally:
            await life.stop()
            if give_up:
                give_up.cancel()
    except asyncio.CancelledError:  # also where a start fails as it is ended
        if life.is_open or not stop.is_set() or not serving:
            raise
        serving.uncancel()
    log("stopped")


def _end_process() -> None:
    log_warning("a batch did not end; the process ends without it", limit_s=_UNLOAD_LIMIT_S)
    os._exit(1)


# linux/prctl.h
_PR_SET_PDEATHSIG = 1


def end_with(parent_pid: int, number: int) -> None:
    """Has the kernel send a signal to this process when its parent dies, however that happens."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number):
        raise OSError(ctypes.get_errno(), "prctl")
    if os.getppid() != parent_pid:
        sys.exit(1)


# For everything else: bundles, libraries, pipes, connections to other services.
_OTHER_FILES = 512


def make_room_for(connections: int) -> None:
    """Raises the process's own limit as far as it may; logs a warning where that is not enough."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if allowed > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log_warning("max_connections is more than the limit for open files allows", open_files=allowed, needed=wanted)
