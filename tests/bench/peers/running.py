"""Starts a peer once, to be measured many times: so that the systems of a benchmark can take turns."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.bench.peers.environments import ROOT, environment_python

_STOP_LIMIT_S = 20
_POLL_S = 0.02
_LAST_WORDS = 3000
# No peer may call home or look for a model on the network.
_ENVIRONMENT = {
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "INFINITY_ANONYMOUS_USAGE_STATS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONUNBUFFERED": "1",
    "PYTHONPATH": str(ROOT),
}


class PeerUnavailable(Exception):
    """A peer that cannot be installed or started, or that answers wrongly. Report it with its reason; do not leave it
    out.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


def peer_python(name: str, environment: str, program: str = "", source: str = "") -> str:
    """The interpreter that starts a peer. `program`: what must be on the PATH; `source`: how to get it. Raises
    PeerUnavailable.
    """
    if program and not shutil.which(program):
        raise PeerUnavailable(name, f"{program} is not on the PATH; {source}")
    try:
        return str(environment_python(environment)) if environment else sys.executable
    except RuntimeError as error:
        raise PeerUnavailable(name, f"cannot be installed: {error}") from error


class PeerProcess:
    """A process of a peer, with its log in a file. Lines of JSON with an `event` are its words to us."""

    def __init__(
        self, peer: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._peer, self._log = peer, log
        with log.open("w") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                text=True,
                cwd=ROOT,
                env={**os.environ, **_ENVIRONMENT, **(environment or {})},
                # Ctrl-C in the terminal is for whoever started us; that one ends the peers.
                start_new_session=True,
            )
        self._lines = log.open()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def tell(self, command: dict[str, object]) -> None:
        """Sends a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise PeerUnavailable(self._peer, f"ended: {self._last_words()}") from error

    def wait_for(self, event: str, limit_s: float) -> dict[str, Any]:
        """What it says of an event, since the last one. Raises PeerUnavailable with the end of its log where it does
        not say it.
        """
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s:
            has_ended = self._process.poll() is not None
            for line in self._lines:
                if line.startswith('{"event"') and (said := json.loads(line)).pop("event") == event:
                    return dict(said)
            if has_ended:
                raise PeerUnavailable(self._peer, f"ended with {self._process.returncode}: {self._last_words()}")
            time.sleep(_POLL_S)
        raise PeerUnavailable(self._peer, f"did not say {event!r} in {limit_s:.0f} s: {self._last_words()}")

    def family(self) -> list[psutil.Process]:
        """The process and all that it started; none where it has ended."""
        try:
            process = psutil.Process(self._process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def pause(self) -> None:
        """Stops it, with all that it started."""
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        """Goes on after `pause`."""
        for process in reversed(self.family()):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stops it for the length of the block: LitServe and Ray take CPU time from others even where nobody calls
        them.
        """
        self.pause()
        try:
            yield
        finally:
            self.resume()

    def _last_words(self) -> str:
        return self._log.read_text(errors="replace").strip()[-_LAST_WORDS:]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends it, and by force whichever of its children are left."""
        self.resume()
        family = self.family()
        self._process.terminate()
        _, left = psutil.wait_procs(family, timeout=_STOP_LIMIT_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        # Orphans that it left since then are of its process group.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.__exit__(None, None, None)
        self._lines.close()
