"""Processes that work for this process. Each ends with this process, and the crash of one ends no other."""

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
    """A process ended before it answered. The message names the cause. `code`: its exit code, negative for a signal."""

    def __init__(self, problem: str, code: int | None = None) -> None:
        super().__init__(problem)
        self.code = code


class Worker:
    """The handle of a process that works for this process."""

    def __init__(self, process: SpawnProcess, pipe: "Connection[Any, Any]") -> None:
        self._process = process
        self.pipe = pipe

    @classmethod
    @contextlib.contextmanager
    def started(
        cls, work: Callable[..., None], *arguments: object, name: str, log: Path | None = None
    ) -> Iterator[Self]:
        """Runs `work(pipe, *arguments)` in a spawned process, which ends with the block.

        After the block the process ends by itself, because its pipe is closed. If the block raises, the process and its
        child processes are killed at once. `log`: the file for the output of the process and of its children. A program
        that calls this method must be importable (`if __name__ == "__main__"`).
        """
        context = multiprocessing.get_context("spawn")
        our_end, their_end = context.Pipe()
        process = context.Process(target=_work, args=(log, work, their_end, *arguments), name=name, daemon=True)
        with _sigint_blocked():
            process.start()
        their_end.close()
        try:
            yield cls(process, our_end)
        except BaseException:
            _kill(process)
            raise
        finally:
            our_end.close()
            process.join(_STOP_LIMIT_S)
            _kill(process)
            process.join()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid or 0

    def send(self, message: object) -> None:
        """Sends a message to the process. Raises ProcessEnded."""
        try:
            self.pipe.send(message)
        except OSError as error:
            raise self._ended() from error

    def receive(self) -> Any:
        """Blocks until the process sends a message, and returns it. Raises ProcessEnded."""
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
    with contextlib.suppress(ProcessLookupError):  # the process has ended, or does not lead its group yet
        if process.pid and process.is_alive():
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def _work(log: Path | None, work: Callable[..., None], *arguments: object) -> None:
    os.setsid()  # leads the group of its child processes, which end with it
    if log:
        descriptor = os.open(log, os.O_WRONLY | os.O_APPEND)
        for standard in (1, 2):  # also the output of libraries that are not Python
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
    process tells the others when to end.
    """
    # Otherwise starting a process first starts the tracker, which unblocks SIGINT.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
