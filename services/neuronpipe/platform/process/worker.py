"""Processes that work for this one: each ends with it, and a crash of one ends no other."""

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, Self

_STOP_LIMIT_S = 10.0


class ProcessEnded(Exception):
    """A process ended before it answered. The message says how. `code`: its exit code, below 0 that of a signal."""

    def __init__(self, problem: str, code: int | None = None) -> None:
        super().__init__(problem)
        self.code = code


class Worker:
    """A process that works for this one, as this one sees it."""

    def __init__(self, process: SpawnProcess, pipe: "Connection[Any, Any]") -> None:
        self._process = process
        self.pipe = pipe

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, work: Callable[..., None], *arguments: object, name: str, log: Path | None = None
    ) -> Iterator[Self]:
        """Runs `work(pipe, *arguments)` in a spawned process, which ends with the block: by itself once its pipe is
        closed, or at once where the block raises, with the processes that it started.

        `log`: the file that gets what it and those print. A program that calls this must be importable
        (`if __name__ == "__main__"`).
        """
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(log, work, theirs, *arguments), name=name, daemon=True)
        with _sigint_blocked():
            process.start()
        theirs.close()
        try:
            yield cls(process, ours)
        except BaseException:
            _kill(process)
            raise
        finally:
            ours.close()
            process.join(_STOP_LIMIT_S)
            _kill(process)
            process.join()

    def send(self, message: object) -> None:
        """Raises ProcessEnded."""
        try:
            self.pipe.send(message)
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> Any:
        """Blocks until it says something. Raises ProcessEnded."""
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionError):
            raise self._ended() from None

    def _ended(self) -> ProcessEnded:
        self._process.join(_STOP_LIMIT_S)
        code = self._process.exitcode
        if code is None or code >= 0:
            return ProcessEnded(f"the process ended with code {code}", code)
        name = signal.Signals(-code).name
        hint = "; there may be too little memory" if name == "SIGKILL" else ""
        return ProcessEnded(f"the process ended with signal {name}{hint}", code)


def _kill(process: SpawnProcess) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended, or has not begun to lead its group
        if process.pid and process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _work(log: Path | None, work: Callable[..., None], *arguments: object) -> None:
    os.setsid()  # the leader of what it starts, which ends with it
    if log:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        for standard in (1, 2):  # also of what prints that is no Python
            os.dup2(descriptor, standard)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with contextlib.suppress(EOFError, ConnectionError):  # the parent needs no more
        work(*arguments)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent  # noqa: S101 (it was spawned)
    connection.wait([parent.sentinel])
    os.killpg(0, signal.SIGKILL)


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Blocks SIGINT in processes that are started in the block: Ctrl-C reaches all processes of a terminal, and this
    one tells the others when to end.
    """
    # Otherwise starting a process starts the tracker first, which unblocks SIGINT.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
