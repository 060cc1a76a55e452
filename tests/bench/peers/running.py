"""Starts a peer once, to be measured many times: so that the systems of a benchmark can take turns."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from tests.bench.peers.environments import CACHE, ROOT, environment_python

_START_LIMIT_S = 120
_STOP_LIMIT_S = 20
_POLL_S = 0.02
_CHECKED_TEXTS = 16
_LAST_WORDS = 3000
_SOURCE = CACHE / "source"
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


@dataclass(frozen=True)
class Peer:
    """Where a peer's server and its client run; None is neuronpipe's own environment,
    which has transformers and torch.

    `program`: what the server's launcher starts, which no package has; `source`: how to get it.
    """

    server: str | None
    client: str | None
    program: str = ""
    source: str = ""


PEERS = {
    "transformers": Peer(server=None, client=None),
    "transformers-batch": Peer(server=None, client=None),
    "litserve": Peer(server="litserve", client="client"),
    "ray": Peer(server="ray", client="client"),
    "infinity": Peer(server="infinity", client="client"),
    "triton": Peer(server="triton", client="triton"),
    "tei": Peer(
        server="tei",
        client="client",
        program="text-embeddings-router",
        source="in huggingface/text-embeddings-inference: cargo install --path router -F mkl",
    ),
}


@dataclass(frozen=True)
class PeerResult:
    """One closed loop. Times are those of the requests that were answered in its seconds, from the caller's side."""

    peer: str
    callers: int
    seconds: float
    requests: int
    errors: int
    throughput_per_s: float
    p50_ms: float
    p90_ms: float
    p99_ms: float


class RunningPeer:
    """A peer that has given right answers."""

    def __init__(self, name: str, client: "PeerProcess", server: "PeerProcess | None") -> None:
        self.name = name
        self._client, self._server = client, server

    def measure(self, callers: int, seconds: float) -> PeerResult:
        """Blocks for the seconds and half a second of warm-up. Raises PeerUnavailable where the client ends."""
        self._client.tell({"callers": callers, "seconds": seconds})
        figures = self._client.wait_for("measured", seconds + _START_LIMIT_S)
        return PeerResult(peer=self.name, callers=callers, seconds=seconds, **figures)

    def paused(self) -> AbstractContextManager[None]:
        """Stops the server, if there is one, for the length of the block."""
        return self._server.paused() if self._server else nullcontext()


@contextmanager
def running_peer(name: str, texts: Sequence[str], settings: Sequence[str] = ()) -> Iterator[RunningPeer]:
    """A peer by its name in PEERS, ready; its server, its client and all their children end with the block.

    `settings` are options of the peer's launcher, for trying others than its defaults. Raises PeerUnavailable.
    """
    peer = PEERS[name]
    try:
        client_python = str(environment_python(peer.client)) if peer.client else sys.executable
    except RuntimeError as error:
        raise PeerUnavailable(name, f"cannot be installed: {error}") from error
    workload = _make_workload(tuple(texts))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"peer-{name}-")))
        target, server = "none", None
        if peer.server:
            server, target = stack.enter_context(running_server(name, _SOURCE, settings))
        client = stack.enter_context(
            PeerProcess(
                name,
                [client_python, "-m", "tests.bench.peers.client", name, target, str(workload)],
                folder / "client.log",
            )
        )
        checked = client.wait_for("checked", _START_LIMIT_S)
        if checked["wrong"]:
            raise PeerUnavailable(name, f"answers wrongly: {checked['wrong']}")
        yield RunningPeer(name, client, server)


@contextmanager
def running_server(
    name: str, source: Path, settings: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> Iterator[tuple["PeerProcess", str]]:
    """The server of a peer, ready, and its address. Raises PeerUnavailable.

    `source`: the folder of the model, or of a graph (tests/bench/like_for_like.py).
    """
    peer = PEERS[name]
    if peer.program and not shutil.which(peer.program):
        raise PeerUnavailable(name, f"{peer.program} is not on the PATH; {peer.source}")
    try:
        python = sys.executable if peer.program else str(environment_python(str(peer.server)))
    except RuntimeError as error:
        raise PeerUnavailable(name, f"cannot be installed: {error}") from error
    command = [python, "-m", f"tests.bench.peers.{peer.server}_server", str(source), *settings]
    with (
        tempfile.TemporaryDirectory(prefix=f"peer-{name}-") as folder,
        PeerProcess(name, command, Path(folder) / "server.log", environment) as server,
    ):
        yield server, server.wait_for("ready", _START_LIMIT_S)["target"]


@functools.cache
def _make_workload(texts: tuple[str, ...]) -> Path:
    """The file that clients read: texts, the folder of the model,
    and what transformers answers to some of the texts."""
    CACHE.mkdir(parents=True, exist_ok=True)
    texts_file, workload = CACHE / "checked-texts.json", CACHE / "workload.json"
    texts_file.write_text(json.dumps(texts[:_CHECKED_TEXTS]))
    # A process of its own: torch stays out of the one that measures.
    command = [sys.executable, "-m", "tests.bench.model", str(_SOURCE), str(texts_file)]
    reference = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    )
    workload.write_text(json.dumps({"source": str(_SOURCE), "texts": texts, "expected": json.loads(reference.stdout)}))
    return workload


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
        for one in self.family():
            with suppress(psutil.NoSuchProcess):
                one.suspend()

    def resume(self) -> None:
        """Goes on after `pause`."""
        for one in reversed(self.family()):
            with suppress(psutil.NoSuchProcess):
                one.resume()

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
        for one in left:
            with suppress(psutil.NoSuchProcess):
                one.kill()
        # Orphans that it left since then are of its process group.
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.__exit__(None, None, None)
        self._lines.close()
