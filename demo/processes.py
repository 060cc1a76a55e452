"""Starts services as processes of their own and ends them: for the demo, the tests and the benchmarks."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import IO, Self

_START_LIMIT_S = 60
_POLL_S = 0.01


class ServiceProcess:
    """Runs `neuronpipe serve SERVICE` on a free port of the loopback interface. Its log lines go to a file."""

    def __init__(self, service: str, *options: str, environment: Mapping[str, str] | None = None) -> None:
        self.service = service
        # Closed in stop().
        self._log: IO[str] = tempfile.NamedTemporaryFile("w+", prefix=f"{service}-", suffix=".log")  # noqa: SIM115
        listen = () if "--listen" in options else ("--listen", "127.0.0.1:0")
        self.began_s = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "neuronpipe", "serve", service, *listen, *options],
            stderr=self._log,
            # Ctrl-C in the terminal is for whoever started us; that one ends the services.
            start_new_session=True,
            env={**os.environ, **(environment or {})},
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def target(self) -> str:
        """HOST:PORT, as soon as it listens."""
        return str(self.wait_for("listening")["address"])

    def wait_until_ready(self) -> Self:
        """Blocks until the service takes requests."""
        self.wait_for("ready")
        return self

    def events(self) -> list[dict[str, object]]:
        """The log lines so far."""
        lines = Path(self._log.name).read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]

    def wait_for(self, event: str, times: int = 1) -> dict[str, object]:
        """The first log line of an event, or the nth.

        Raises RuntimeError with the log if the process ends without it.
        """
        deadline_s = time.monotonic() + _START_LIMIT_S
        while time.monotonic() < deadline_s:
            is_running = self._process.poll() is None
            lines = [line for line in self.events() if line["event"] == event]
            if len(lines) >= times:
                return lines[times - 1]
            if not is_running:
                break
            time.sleep(_POLL_S)
        raise RuntimeError(f"{self.service} did not log {event!r}:\n{Path(self._log.name).read_text()}")

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal."""
        self._process.send_signal(number)

    def wait(self, timeout_s: float = 30) -> int:
        """The exit code, once it ends."""
        return self._process.wait(timeout_s)

    def stop(self) -> None:
        """Ends the process, by force if it must be, and deletes its log."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@contextmanager
def four_processes(
    repository: Path,
    *options: str,
    stage_options: Mapping[str, Sequence[str]] = MappingProxyType({}),
    gateway_options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[dict[str, ServiceProcess]]:
    """The four services, ready, by name. They end with the block.

    `options` are for all of them, `stage_options` for some stages, `gateway_options` for the gateway alone.
    """
    options = ("--repository", str(repository), *options)
    with ExitStack() as stack:
        started = {
            service: stack.enter_context(
                ServiceProcess(service, *options, *stage_options.get(service, ()), environment=environment)
            )
            for service in ("tokenizer", "neuron-executor", "postprocessor")
        }
        targets = [f"--{name}-target={started[service].target}" for name, service in _TARGET_OPTIONS.items()]
        started["gateway"] = stack.enter_context(
            ServiceProcess("gateway", *options, *targets, *gateway_options, environment=environment)
        )
        for process in started.values():
            process.wait_until_ready()
        started["gateway"].wait_for("all stages reached")
        yield started


_TARGET_OPTIONS = {"tokenizer": "tokenizer", "executor": "neuron-executor", "postprocessor": "postprocessor"}
