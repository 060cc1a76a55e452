"""What happens to the system in a day, in an order of its own for each seed."""

import asyncio
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator

from tests.day.callers import Callers
from tests.day.models import share_with_canary
from tests.day.system import GATEWAYS, LEASE_S, MEMBERS, WORKERS, System
from tests.day.watch import Watch
from tests.servers.tls_files import STAGES

_PAUSE_S = 4.0
# Longer than a connection may be idle, and than it may be old.
QUIET_S = 12.0
_REST_S = 1.0
_KINDS = (STAGES, GATEWAYS, WORKERS)

Happening = tuple[str, Callable[[], Awaitable[None]]]


class Events:
    """Everything that may happen: to each process, to Redis, to the registry, to certificates, and to the load."""

    def __init__(self, system: System, callers: Callers, watch: Watch, seed: int) -> None:
        self._system = system
        self._watch = watch
        self._callers = callers
        self._chance = random.Random(seed)

    async def run(self, ends_s: float) -> None:
        """One event after the other until then, by time.monotonic(): first one of each kind, then all, again and
        again.
        """
        happenings = self._order()
        while time.monotonic() < ends_s:
            text, happen = next(happenings)
            async with self._system.timeline.event(text):
                await happen()
            # As a rolling update does: the next one begins once all is well.
            await self._watch.all_is_reached()
            await asyncio.sleep(_REST_S)

    def _order(self) -> Iterator[Happening]:
        members = [self._chance.choice(kind) for kind in _KINDS]
        while True:
            happenings = [*self._of_members(members), *self._of_all()]
            self._chance.shuffle(happenings)
            yield from happenings
            members = list(MEMBERS)

    def _of_members(self, names: list[str]) -> Iterator[Happening]:
        for name in names:
            member = self._system.members[name]
            pause_s = _PAUSE_S if name not in WORKERS else LEASE_S + 2
            yield f"{name} stops for {pause_s:g} s", lambda member=member, pause_s=pause_s: member.pause(pause_s)  # type: ignore[misc]
            yield f"{name} is killed", member.kill
            yield f"{name} is replaced", member.replace

    def _of_all(self) -> Iterator[Happening]:
        yield f"the Redis of jobs stops for {LEASE_S + 2:g} s", self._pause_redis
        yield "the Redis of jobs is killed", self._kill_redis
        yield "the Redis of jobs fails over", self._system.fail_over
        yield "a canary gets shares, becomes stable and is rolled back", self._canary
        yield "all certificates are renewed", self._renew
        yield f"nobody calls for {QUIET_S:g} s", self._quiet

    async def _pause_redis(self) -> None:
        master = self._system.master()
        master.send(signal.SIGSTOP)
        await asyncio.sleep(LEASE_S + 2)
        master.send(signal.SIGCONT)
        await asyncio.sleep(_REST_S)

    async def _kill_redis(self) -> None:
        master = self._system.master()
        await asyncio.to_thread(master.stop)
        await asyncio.sleep(_REST_S)
        await asyncio.to_thread(master.start)

    async def _canary(self) -> None:
        for percent in (10, 50, 100, 0):
            await asyncio.to_thread(share_with_canary, self._system.repository, percent)
            await asyncio.sleep(3)

    async def _renew(self) -> None:
        for name in (*STAGES, "gateway"):
            self._system.tls.renew(name)
        await asyncio.sleep(2)

    async def _quiet(self) -> None:
        with self._callers.quiet():
            await asyncio.sleep(QUIET_S)
