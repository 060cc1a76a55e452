"""Starts services as processes of their own and ends them: for the demo, the tests and the benchmarks."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any, ClassVar, Self

_START_LIMIT_S = 120
_STOP_LIMIT_S = 15
_POLL_S = 0.01


def start_module(words: Sequence[str], log: IO[str], variables: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    """Runs a module, the first word, with arguments. Its errors go to a file."""
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        stderr=log,
        # Ctrl-C in the terminal is for this process's parent, which ends the services.
        start_new_session=True,
        env=variables,
    )


def open_log(name: str) -> IO[str]:
    """Opens a file for the log of a process, which deletes it in the end."""
    return tempfile.NamedTemporaryFile("w+", prefix=f"{name}-", suffix=".log")


class LoggedProcess:
    """A process whose log lines, in a file, are JSON with an `event`. It ends with the block."""

    # The start of such a line.
    marker: ClassVar[str] = "{"

    def __init__(self, service: str, process: "subprocess.Popen[Any]", log: IO[str]) -> None:
        self.service = service
        self._process, self._log = process, log

    @property
    def pid(self) -> int:
        return self._process.pid

    def log_text(self) -> str:
        return Path(self._log.name).read_text(errors="replace")

    def events(self) -> list[dict[str, Any]]:
        """Returns the log lines so far."""
        # The process may be writing the last line.
        whole, _, _ = self.log_text().rpartition("\n")
        return [json.loads(line) for line in whole.splitlines() if line.startswith(self.marker) and line.endswith("}")]

    def wait_for(self, event: str, times: int = 1, limit_s: float = _START_LIMIT_S) -> dict[str, Any]:
        """Returns the first log line of an event, or the nth.

        Raises RuntimeError with the log if the process ends without it, or has not logged it in time.
        """
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            is_running = self._process.poll() is None
            lines = [line for line in self.events() if line["event"] == event]
            if len(lines) >= times:
                return lines[times - 1]
            if not is_running:
                break
            time.sleep(_POLL_S)
        log, code = self.log_text(), self._process.poll()
        state = "runs" if code is None else f"has ended with {code}"
        last = log.strip().rpartition("\n")[2]
        raise RuntimeError(
            f"{self.service} did not log {event!r}, {state}, and logged last: {last}\nThe whole log:\n{log}"
        )

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 30) -> int:
        """Waits for the end of the process, and returns its exit code."""
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """Ends the process, by force if needed, and deletes its log."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        code = self._process.poll()
        if error and code is not None:
            error.add_note(f"{self.service} had ended with {code}:\n{self.log_text()}")
        self.stop()


class ServiceProcess(LoggedProcess):
    """Runs `neuronpipe serve SERVICE` on a free port of the loopback interface. Its log lines go to a file.

    `command`: the module of another program that serves, and its first arguments.
    """

    def __init__(
        self,
        service: str,
        *options: str,
        environment: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
    ) -> None:
        listen = () if "--listen" in options else ("--listen", "127.0.0.1:0")
        words = [*(command or ("neuronpipe", "serve", service)), *listen, *options]
        self.began_s = time.monotonic()
        log = open_log(service)
        super().__init__(service, start_module(words, log, {**os.environ, **(environment or {})}), log)

    @property
    def target(self) -> str:
        """HOST:PORT. Blocks until the service listens."""
        return str(self.wait_for("listening")["address"])

    def wait_until_ready(self, limit_s: float = _START_LIMIT_S) -> Self:
        """Blocks until the service takes requests."""
        self.wait_for("ready", limit_s=limit_s)
        return self


@contextmanager
def four_processes(
    repository: Path | str,
    *options: str,
    stage_options: Mapping[str, Sequence[str]] = MappingProxyType({}),
    gateway_options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[dict[str, ServiceProcess]]:
    """The four services, ready, by name. They end with the block.

    `options` are for all of them, `stage_options` for some stages, `gateway_options` for the gateway alone.
    """
    options = ("--repository", str(repository), *options)
    stages: dict[str, ServiceProcess] = {}

    def end_stages(*error: Any) -> None:
        with ThreadPoolExecutor() as ending:
            list(ending.map(lambda process: process.__exit__(*error), stages.values()))

    with ExitStack() as stack:
        stack.push(end_stages)
        for service in ("tokenizer", "neuron-executor", "postprocessor"):
            stages[service] = ServiceProcess(
                service, *options, *stage_options.get(service, ()), environment=environment
            )
        targets = [f"--{name}-target={stages[service].target}" for name, service in _TARGET_OPTIONS.items()]
        gateway = stack.enter_context(
            ServiceProcess("gateway", *options, *targets, *gateway_options, environment=environment)
        )
        for process in (*stages.values(), gateway):
            process.wait_until_ready()
        gateway.wait_for("all stages reached")
        yield {**stages, "gateway": gateway}


_TARGET_OPTIONS = {"tokenizer": "tokenizer", "executor": "neuron-executor", "postprocessor": "postprocessor"}
