"""Starts a peer once, to be measured many times: so that the systems of a benchmark can take turns."""

import json
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from demo.processes import LoggedProcess, open_log
from tests.bench.peers.environments import ROOT, environment_python

_STOP_LIMIT_S = 20
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


def peer_python(name: str) -> str:
    """The interpreter of a peer's environment. Raises PeerUnavailable."""
    try:
        return str(environment_python(name))
    except RuntimeError as error:
        raise PeerUnavailable(name, f"cannot be installed: {error}") from error


class PeerProcess(LoggedProcess):
    """A process of a peer. Lines of JSON with an `event` are its words to us, JSON on its standard input ours to it."""

    marker = '{"event"'

    def __init__(self, peer: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        log = open_log(peer)
        self._input: Any
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            text=True,
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT, **(environment or {})},
            # Ctrl-C in the terminal is for the parent, which ends the peers.
            start_new_session=True,
        )
        super().__init__(peer, process, log)
        self._input = process.stdin
        self._heard = Counter[str]()

    def tell(self, command: Mapping[str, object]) -> None:
        """Sends a line."""
        try:
            self._input.write(json.dumps(command) + "\n")
            self._input.flush()
        except BrokenPipeError as error:
            raise PeerUnavailable(self.service, f"ended: {self._last_words()}") from error

    def hear(self, event: str, limit_s: float) -> dict[str, Any]:
        """What it says of an event, since the last one. Raises PeerUnavailable with the end of its log where it does
        not say it.
        """
        self._heard[event] += 1
        try:
            return self.wait_for(event, self._heard[event], limit_s)
        except RuntimeError as error:
            reason = f"did not say {event!r} in {limit_s:.0f} s, or ended: {self._last_words()}"
            raise PeerUnavailable(self.service, reason) from error

    def family(self) -> list[psutil.Process]:
        """The process and all that it started; none where it has ended."""
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(self.pid)
            return [process, *process.children(recursive=True)]
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
        return self.log_text().strip()[-_LAST_WORDS:]

    def stop(self) -> None:
        """Ends it, and by force what is left of its children."""
        self.resume()
        family = self.family()
        self._process.terminate()
        _, left = psutil.wait_procs(family, timeout=_STOP_LIMIT_S)
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        # Orphans that it left since then are of its process group.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with suppress(BrokenPipeError):
            self._input.close()
        super().stop()
