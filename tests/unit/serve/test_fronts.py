"""serve/fronts.py: front processes that end, and cannot be started again at once."""

import asyncio
import errno
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.serve import fronts as fronts_module
from neuronpipe.serve.fronts import Fronts
from tests.suite.waiting import happens

# Speaks to its parent as a front process does, and lives until it is told to end.
_FRONT = """
import socket, time
lines = socket.socket(fileno=0).makefile("rwb", buffering=0)
lines.readline()
lines.write(b'"loaded"\\n')
lines.readline()
lines.write(b'"opened"\\n')
time.sleep(60)
"""


class _Starts:
    """Starts of processes, each of which raises an error or is that of a front process of the test."""

    def __init__(self, *errors: OSError | None) -> None:
        self.errors = list(errors)
        self.processes: list[asyncio.subprocess.Process] = []
        self.count = 0
        self._start: Callable[..., Any] = asyncio.create_subprocess_exec

    async def __call__(self, *command: str, **options: Any) -> asyncio.subprocess.Process:
        self.count += 1
        if self.errors and (error := self.errors.pop(0)):
            raise error
        self.processes.append(await self._start(sys.executable, "-c", _FRONT, **options))
        return self.processes[-1]


def _error(number: int) -> OSError:
    return OSError(number, os.strerror(number))


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fronts_module, "_FIRST_PAUSE_S", 0.01)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENOENT])
async def test_a_front_process_that_cannot_be_started_again_ends_no_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    starts = _Starts(None, None, _error(number), _error(number))
    monkeypatch.setattr(asyncio, "create_subprocess_exec", starts)
    open_files = _open_files()
    fronts = Fronts(2, {}, [])
    async with fronts.running():
        await fronts.open()
        starts.processes[0].kill()
        await happens(lambda: len(starts.processes) == 3)
        assert starts.count == 5
        assert starts.processes[1].returncode is None
    codes = [
        record.__dict__["fields"]["code"] for record in caplog.records if "a front process ended" in record.message
    ]
    assert codes == [-9, os.strerror(number), os.strerror(number)]
    assert [process.returncode for process in starts.processes] == [-9, -15, -15]
    await happens(lambda: _open_files() <= open_files)


async def test_a_front_process_that_ends_within_a_message_ends_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    half = _FRONT.replace('"opened"\\n', '"opened"\\n[["half').replace("time.sleep(60)", "lines.readline()")
    starts = _Starts()
    monkeypatch.setitem(globals(), "_FRONT", half)
    monkeypatch.setattr(asyncio, "create_subprocess_exec", starts)
    fronts = Fronts(1, {}, [])
    async with fronts.running():
        await fronts.open()
        await happens(lambda: len(starts.processes) >= 3)


async def test_no_socket_for_a_front_process_ends_no_service(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = _Starts()
    monkeypatch.setattr(asyncio, "create_subprocess_exec", starts)
    fronts = Fronts(1, {}, [])
    async with fronts.running():
        await fronts.open()
        make_pair, errors = socket.socketpair, [_error(errno.EMFILE)]

        def socketpair() -> Any:
            if errors:
                raise errors.pop()
            return make_pair()

        monkeypatch.setattr(socket, "socketpair", socketpair)
        starts.processes[0].kill()
        await happens(lambda: len(starts.processes) == 2)
        assert not errors


async def test_a_front_process_that_cannot_be_started_at_first_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asyncio, "create_subprocess_exec", _Starts(_error(errno.EAGAIN)))
    with pytest.raises(OSError, match=os.strerror(errno.EAGAIN)):
        async with Fronts(1, {}, []).running():
            await asyncio.Event().wait()
