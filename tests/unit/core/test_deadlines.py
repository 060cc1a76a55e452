"""core/deadlines.py: one timer ends every entry whose deadline has passed, and no other."""

import asyncio
import socket
import time
from collections.abc import Callable
from functools import partial

import uvloop

from neuronpipe.core.deadlines import LAST_LOOK_S, Deadlines


class _Ended:
    """The names of the entries that have ended. `last`: set when the entry with this name ends."""

    def __init__(self, last: str) -> None:
        self.names: list[str] = []
        self.last = asyncio.Event()
        self._last_name = last

    def note(self, name: str) -> Callable[[], None]:
        return partial(self._note, name)

    def _note(self, name: str) -> None:
        self.names.append(name)
        if name == self._last_name:
            self.last.set()


async def test_entries_end_in_time_whatever_their_order_and_removed_entries_do_not() -> None:
    deadlines, ended, now_s = Deadlines(), _Ended("late"), time.monotonic()
    for name, after_s in {"late": 0.06, "removed": 0.02, "early": 0.01, "far": 60.0}.items():
        deadlines.add(name, now_s + after_s, ended.note(name))
    deadlines.remove("removed")
    await asyncio.wait_for(ended.last.wait(), 10)
    assert ended.names == ["early", "late"]
    assert time.monotonic() - now_s >= 0.06 - 0.001  # uvloop's timers may be early by half a millisecond


async def test_an_entry_that_is_added_again_has_its_new_deadline() -> None:
    deadlines, ended = Deadlines(), _Ended("second")
    deadlines.add("a", time.monotonic() + 0.01, ended.note("first"))
    deadlines.add("a", time.monotonic() + 0.05, ended.note("second"))
    await asyncio.wait_for(ended.last.wait(), 10)
    assert ended.names == ["second"]


def test_a_caller_whose_bytes_came_while_the_process_stood_still_is_not_late() -> None:
    async def wait() -> list[str]:
        deadlines, ended = Deadlines(LAST_LOOK_S), _Ended("does not")
        (reads, writes), (stops, wakes) = socket.socketpair(), socket.socketpair()

        def read() -> None:
            reads.recv(1)
            deadlines.remove("acts")

        def stand_still() -> None:
            """Past the deadlines, while the loop handles what it has read: next it runs timers, and then it reads."""
            stops.recv(1)
            writes.send(b"x")
            time.sleep(0.05)

        loop = asyncio.get_running_loop()
        loop.add_reader(reads, read)
        loop.add_reader(stops, stand_still)
        for name in ("acts", "does not"):
            deadlines.add(name, time.monotonic() + 0.02, ended.note(name))
        wakes.send(b"x")
        await asyncio.wait_for(ended.last.wait(), 10)
        for end in (reads, stops):
            loop.remove_reader(end)
        for end in (reads, writes, stops, wakes):
            end.close()
        return ended.names

    assert uvloop.run(wait()) == ["does not"]
