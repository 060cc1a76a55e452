"""Services, commands and workers of tests as forks of processes that have imported what they need.

A service needs 0.7 s of CPU time until it is ready. Imports take 0.5 s of this time, and tests start hundreds of
services. Services and commands with variables that are read early are processes of their own as ever. A fork also gets
other values of constants.
"""

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.context import ForkServerContext, ForkServerProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any, NoReturn

from demo.processes import start_module
from tests.suite.commands import start_command
from tests.suite.constants import PATCH, without_patch

# Modules that `serve all` has imported when it is ready, without back ends.
_MODULES = (
    "neuronpipe.doors.http.door",
    "neuronpipe.doors.http.handlers",
    "neuronpipe.serve.server",
    "neuronpipe.serve.stages",
    "neuronpipe.stages.neuron_executor.generation.engine",
    "neuronpipe.stages.neuron_executor.stage",
    "neuronpipe.stages.postprocessor.stage",
    "neuronpipe.stages.server",
    "neuronpipe.stages.tokenizer.stage",
)
# Beginnings of variables that are read before.
_READ_EARLY = ("LD_", "OMP_", "PYTHON")
_NUMBER = struct.Struct("i")
_POLL_S = 0.01
_MAX_BYTES = 1 << 20


def _read_early(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a process reads early, without the path that `tests.suite.constants` sets."""
    unpatched = without_patch(variables)
    return {name: value for name, value in unpatched.items() if name.startswith(_READ_EARLY)}


class _Fork(subprocess.Popen[bytes]):
    """A service or a command, by the pipe that its process id and its exit code come from."""

    def __init__(self, words: Sequence[str], pipe: IO[bytes]) -> None:
        self.args = words
        self._pipe, self._lock = pipe, threading.Lock()
        (self.pid,) = _NUMBER.unpack(pipe.read(_NUMBER.size))
        self.returncode = None

    def poll(self) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._pipe], [], [], 0)[0]:
                with self._pipe as pipe:
                    (self.returncode,) = _NUMBER.unpack(pipe.read(_NUMBER.size))
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        began_s = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() > began_s + timeout:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(_POLL_S)
        return code


class Forks:
    """Starts services and commands. The process that they are forks of starts with the first."""

    def __init__(self) -> None:
        self._variables = _read_early(os.environ)
        self._source: tuple[socket.socket, subprocess.Popen[bytes]] | None = None

    def start(self, words: Sequence[str], log: IO[str], variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
        """See start_module."""
        if words[0] != "neuronpipe" or _read_early(variables) != self._variables:
            return start_module(words, log, variables)
        with Path(os.devnull).open() as nothing:
            return self._fork(words[1:], (nothing, log, log), variables)

    def start_command(
        self, words: Sequence[str], files: Sequence[IO[str]], variables: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        """See tests/suite/commands.py."""
        if _read_early(variables) != self._variables:
            return start_command(words, files, variables)
        return self._fork(words, files, variables)

    def _fork(
        self, words: Sequence[str], files: Sequence[IO[str]], variables: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]":
        self._source = self._source or _started()
        pipe, theirs = os.pipe()
        asked = {"words": words, "variables": dict(variables), "folder": str(Path.cwd())}
        socket.send_fds(self._source[0], [json.dumps(asked).encode()], [*(file.fileno() for file in files), theirs])
        os.close(theirs)
        return _Fork(words, os.fdopen(pipe, "rb", buffering=0))

    def close(self) -> None:
        """Ends that process. The services stay."""
        if self._source:
            requests, process = self._source
            requests.close()
            process.wait()


def _started() -> tuple[socket.socket, "subprocess.Popen[bytes]"]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-m", "tests.suite.forked", str(theirs.fileno())]
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)


def _serve(requests: socket.socket) -> None:
    """Starts a service or a command for each request, and writes its process id and then its exit code. Returns in the
    fork, or when the tests have ended.
    """
    pipes: dict[int, int] = {}
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake)
    while True:
        ready, _, _ = select.select([requests.fileno(), ended], [], [])
        if ended in ready:
            os.read(ended, _MAX_BYTES)
            _tell(pipes)
        if requests.fileno() in ready:
            message, files, *_ = socket.recv_fds(requests, _MAX_BYTES, 4)
            if not message:
                os._exit(0)
            *standard, pipe = files
            if not (pid := os.fork()):
                break
            for file in standard:
                os.close(file)
            os.write(pipe, _NUMBER.pack(pid))
            pipes[pid] = pipe
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    for number, file in enumerate(standard):
        os.dup2(file, number)
    for file in (*files, ended, wake, *pipes.values(), requests.detach()):
        os.close(file)
    asked = json.loads(message)
    os.environ.clear()
    os.environ.update(asked["variables"])
    os.chdir(asked["folder"])
    sys.argv[1:] = asked["words"]
    runpy.run_path(str(PATCH))


def _tell(pipes: dict[int, int]) -> None:
    """Writes the exit codes of the services that have ended."""
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pipe = pipes.pop(found[0])
            with suppress(BrokenPipeError):  # the process that started it has ended
                os.write(pipe, _NUMBER.pack(os.waitstatus_to_exitcode(found[1])))
            os.close(pipe)


def _run(main: Callable[[], None]) -> NoReturn:
    """Ends the process as multiprocessing ends a fork: Python would first free all modules, which takes 0.3 s of CPU
    time here, as each page of memory is copied.
    """
    code: object = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


_TRACING = "neuronpipe.compiler.neuronx_processes"


class ForkedWorkers(ForkServerContext):
    """Replaces the module multiprocessing in worker.py. Workers that compile for Neuron are forks of one process with
    PyTorch and transformers, whose imports take four seconds of CPU time. Other workers are spawned.
    """

    def get_context(self, method: str | None = None) -> Any:
        """Returns the context that forks, instead of the context that spawns."""
        self.set_forkserver_preload([_TRACING])
        return self

    def Process(self, *, target: Any, args: Sequence[Any], **options: Any) -> BaseProcess:  # type: ignore[override]
        """Starts a fork with the current variables, as a spawned process has them."""
        _, work, *_ = args
        if work.__module__ != _TRACING:
            return SpawnProcess(target=target, args=args, **options)
        return ForkServerProcess(target=_work, args=(dict(os.environ), target, *args), **options)


def _work(variables: Mapping[str, str], target: Callable[..., None], *arguments: object) -> None:
    os.environ.clear()
    os.environ.update(variables)
    target(*arguments)


if __name__ == "__main__":
    gc.disable()
    for module in _MODULES:
        importlib.import_module(module)
    gc.freeze()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    gc.enable()
    _run(importlib.import_module("neuronpipe.cli").main)
