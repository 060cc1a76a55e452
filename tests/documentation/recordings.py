"""Records the output that pages show, from the commands that they show: `python -m tests.documentation.recordings`.

A console block after `<!-- recorded: STEP -->` is run for real, on MiniLM and in the order of `_STEPS`, and the lines
that the page shows get the figures of this run. Servers are warm and otherwise idle; a request that took more than
`MAX_REQUEST_MS` is refused, so that no page shows a loaded machine. `tests/repository/test_recordings.py` runs the same
blocks and compares, as printed.py says.
"""

import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from demo.model import find_minilm
from neuronpipe.client import Client
from tests.documentation.pages import ROOT, Fence, all_pages, fences
from tests.documentation.printed import align, parts_of

MAX_REQUEST_MS = 20.0
# The step whose commands run while 32 callers send requests: its figures are those of a busy server, as its page says.
LOADED = "loaded"
_LOAD = "neuronpipe load --model minilm --concurrency 32 --duration 60"
# The command with which a step begins to serve → its steps. Without a command, a step is one that ends by itself.
_STEPS: Mapping[str, Sequence[str]] = {"compile": (), "serve": ("served",), "run": ("call", LOADED)}
# The addresses of the pages.
_GRPC, _HTTP = "127.0.0.1:50050", "127.0.0.1:8080"
_MINILM = "sentence-transformers/all-MiniLM-L6-v2"
_WARM_UP = 100
# A busy machine may be idle for one request of these.
_TRIES = 30
_LIMIT_S = 180
# Time until the load is as it stays.
_LOAD_S = 8
# The table of an answer, the first line of a waterfall, also in a picture, and the response as JSON.
_REQUEST = re.compile(
    r"answered in (?:<[^>]+>)?([\d.]+) ms"
    r"|^(?:<[^>]+>)?\w+ +\S+ [| ][█ ]*[| ] +(?:<[^>]+>)?([\d.]+) ms"
    r'|"total_ns": "(\d+)"',
    re.MULTILINE,
)


class TooSlowError(RuntimeError):
    """A request took so long that its figures would mislead readers."""


def request_times_ms(text: str) -> list[float]:
    """The times of the requests whose output is in a text."""
    found = _REQUEST.findall(text)
    return [
        float(answered or drawn) if answered or drawn else int(total_ns) / 1e6 for answered, drawn, total_ns in found
    ]


def refuse_slow(text: str, place: str) -> None:
    """Raises TooSlowError for a request that took more than MAX_REQUEST_MS."""
    if slow := [took_ms for took_ms in request_times_ms(text) if took_ms > MAX_REQUEST_MS]:
        raise TooSlowError(f"{place}: a request took {max(slow):.1f} ms, at most {MAX_REQUEST_MS:.0f}: is it idle?")


@dataclass(frozen=True, slots=True)
class Recording:
    """A block of a page, and its content with the output of this run."""

    fence: Fence
    content: str


class Session:
    """A folder and a home of a new user, with MiniLM as if it came from the Hub, in a terminal of 160 columns."""

    def __init__(self, folder: Path, ports: Mapping[str, str]) -> None:
        self._folder = folder
        self._ports = ports
        _fill_hub(folder / "hub")
        self._environment = {
            "HOME": str(folder / "home"),
            "HF_HUB_CACHE": str(folder / "hub"),
            "HF_HUB_OFFLINE": "1",
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{ROOT / 'services'}",
            "NEURONPIPE_TARGET": ports[_GRPC],
            "COLUMNS": "160",
            "TERM": "xterm",
        }
        for path in ("home", "bin"):
            (folder / path).mkdir()
        (folder / "bin" / "neuronpipe").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m neuronpipe "$@"\n')
        (folder / "bin" / "neuronpipe").chmod(0o755)

    def run(self, command: str) -> list[str]:
        """The lines that a command prints."""
        with self._started(command) as (process, lines):
            printed = list(lines)
            code = process.wait(_LIMIT_S)
        if code:
            raise RuntimeError(f"{command}: exit code {code}: " + "\n".join(printed))
        return printed

    def run_until_quick(self, command: str) -> list[str]:
        """The lines that a command prints when its request is quick for the first time, or at the last try."""
        for _ in range(_TRIES):
            printed = self.run(command)
            if not any(took_ms > MAX_REQUEST_MS for took_ms in request_times_ms("\n".join(printed))):
                break
        return printed

    def run_under_load(self, command: str) -> list[str]:
        """The lines that a command prints while other callers keep the server busy."""
        with self._started(_LOAD) as (process, _):
            time.sleep(_LOAD_S)
            printed = self.run(command)
            process.kill()
        return printed

    @contextmanager
    def serving(self, command: str) -> Iterator[list[str]]:
        """Starts a server; what it has printed when it is ready. It is warm in the block."""
        options = f" --listen {self._ports[_GRPC]} --http-listen {self._ports[_HTTP]}"
        with self._started(command + (options if " run " in command else "")) as (process, lines):
            printed = list[str]()
            for line in lines:
                printed.append(line)
                if '"event": "ready"' in line or line.strip().startswith("curl "):
                    break
            self._warm_up()
            yield printed
            process.send_signal(signal.SIGINT)

    def _warm_up(self) -> None:
        with Client(self._ports[_GRPC]) as client:
            for _ in range(_WARM_UP):
                client.embed("minilm", "The cat sleeps on the warm windowsill.")
                client.compare("minilm", "A fine day.", ["Lovely weather.", "The train is late."])
        time.sleep(2)  # the shapes of an idle model are prepared

    @contextmanager
    def _started(self, command: str) -> Iterator[tuple["subprocess.Popen[bytes]", Iterator[str]]]:
        """A command whose output is a terminal, and the lines that it prints, until it ends."""
        for shown, own in self._ports.items():
            command = command.replace(shown, own)
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            ["/bin/bash", "-c", f"exec {command}" if "&" not in command else command],
            cwd=self._folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        try:
            yield process, self._lines(ours)
        finally:
            try:
                process.wait(20 if process.poll() is None else 0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            os.close(ours)

    def _lines(self, terminal: int) -> Iterator[str]:
        left = b""
        while True:
            try:
                part = os.read(terminal, 65536)
            except OSError:  # the other side is closed
                part = b""
            *lines, left = (left + part).split(b"\n")
            for line in lines:
                yield self._shown(line.decode(errors="replace"))
            if not part:
                if left:
                    yield self._shown(left.decode(errors="replace"))
                return

    def _shown(self, line: str) -> str:
        """A line with the addresses of the pages; what a carriage return has overwritten is gone."""
        line = line.rstrip("\r").rpartition("\r")[2]
        for shown, own in self._ports.items():
            line = line.replace(own, shown)
        return re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", line)


def _fill_hub(cache: Path) -> None:
    """A cache of the Hub's client that has MiniLM, as if it were downloaded."""
    folder = cache / f"models--{_MINILM.replace('/', '--')}"
    revision = "c9745ed1d9f207416be6d2e6f8de32d1f16199bf"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(revision)
    shutil.copytree(find_minilm(), folder / "snapshots" / revision, symlinks=True)


def record(found: Sequence[Fence], ports: Mapping[str, str]) -> Iterator[Recording]:
    """Runs recorded blocks. `ports`: an address of this machine for each address of the pages."""
    with tempfile.TemporaryDirectory() as path:
        session = Session(Path(path), ports)
        for first, others in _STEPS.items():
            with ExitStack() as stack:
                for fence in (fence for step in (first, *others) for fence in found if fence.recorded == step):
                    yield _record(session, fence, stack if others else None)


def _record(session: Session, fence: Fence, stack: ExitStack | None) -> Recording:
    lines = list[str]()
    for command, shown in parts_of(fence.content):
        if stack and fence.recorded in _STEPS:
            stack.close()
            printed = stack.enter_context(session.serving(command))
        else:
            printed = session.run_under_load(command) if fence.recorded == LOADED else session.run_until_quick(command)
        lines += [f"$ {command}", *align(shown, printed, with_any_numbers=" load " in command)]
    return Recording(fence, "".join(f"{line}\n" for line in lines))


def recorded_fences() -> list[Fence]:
    """The recorded blocks of all pages."""
    return [fence for page in all_pages() for fence in fences(page) if fence.recorded]


def write(recording: Recording) -> None:
    """Puts the output of this run into the page. Raises TooSlowError instead where a request took too long."""
    page = recording.fence.page
    if recording.fence.recorded != LOADED:
        refuse_slow(recording.content, str(recording.fence))
    text = page.read_text(encoding="utf-8")
    assert text.count(recording.fence.content) == 1, recording.fence
    page.write_text(text.replace(recording.fence.content, recording.content), encoding="utf-8")


def record_pages() -> None:
    """Records the blocks of all pages, at the addresses that they show."""
    for recording in list(record(recorded_fences(), {_GRPC: _GRPC, _HTTP: _HTTP})):
        write(recording)


if __name__ == "__main__":
    record_pages()
