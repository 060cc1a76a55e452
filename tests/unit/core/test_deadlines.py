"""core/deadlines.py: one timer ends every entry whose deadline has passed, and no other."""

import asyncio
import socket
import time

import uvloop

from neuronpipe.core.deadlines import LAST_LOOK_S, Deadlines


async def test_entries_end_in_time_whatever_their_order_and_removed_entries_do_not() -> None:
    deadlines, ended, last = Deadlines(), list[str](), asyncio.Event()
    now_s = time.monotonic()
    for name, after_s in {"late": 0.06, "removed": 0.02, "early": 0.01, "far": 60.0}.items():
        deadlines.add(name, now_s + after_s, lambda name=name: (ended.append(name), name == "late" and last.set()))
    deadlines.remove("removed")
    await asyncio.wait_for(last.wait(), 10)
    assert ended == ["early", "late"]
    assert time.monotonic() - now_s >= 0.06


async def test_an_entry_that_is_added_again_has_its_new_deadline() -> None:
    deadlines, ended, last = Deadlines(), list[str](), asyncio.Event()
    deadlines.add("a", time.monotonic() + 0.01, lambda: ended.append("first"))
    deadlines.add("a", time.monotonic() + 0.05, lambda: (ended.append("second"), last.set()))
    await asyncio.wait_for(last.wait(), 10)
    assert ended == ["second"]


def test_a_caller_whose_bytes_came_while_the_process_stood_still_is_not_late() -> None:
    async def wait() -> list[str]:
        deadlines, ended, later = Deadlines(LAST_LOOK_S), list[str](), asyncio.Event()
        reads, writes = socket.socketpair()
        reads.setblocking(False)

        def read() -> None:
            reads.recv(1)
            deadlines.remove("acts")

        asyncio.get_running_loop().add_reader(reads, read)
        deadlines.add("acts", time.monotonic() + 0.01, lambda: ended.append("acts"))
        deadlines.add("does not", time.monotonic() + 0.01, lambda: (ended.append("does not"), later.set()))
        await asyncio.sleep(0)
        writes.send(b"x")
        time.sleep(0.05)
        await asyncio.wait_for(later.wait(), 10)
        asyncio.get_running_loop().remove_reader(reads)
        reads.close()
        writes.close()
        return ended

    assert uvloop.run(wait()) == ["does not"]
