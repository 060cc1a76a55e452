"""From nothing to the first answer of `serve all`: `python -m tests.bench.cold_start REPOSITORY MODEL [--rounds N]`.

CPU time is that of the server's process; it hardly depends on what else the machine does, as wall time does.
"""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

from demo.processes import ServiceProcess
from neuronpipe.client import Client
from neuronpipe.core.errors import Unavailable
from neuronpipe.measure.machine import cpu_seconds
from tests.bench.measurements import spread_text
from tests.bench.systems import NO_CACHE

_EVENTS = ("model ready", "ready")
_FIRST = "first answer"
_POLL_S = 0.005
# pip compiles packages to byte code as it installs them; the first start compiles a checkout, and does not count.
_AS_INSTALLED = {"PYTHONDONTWRITEBYTECODE": ""}


def _start(repository: Path, model: str) -> dict[str, tuple[float, float]]:
    """Event → seconds since the process was started, and CPU time of the process until then."""
    found: dict[str, tuple[float, float]] = {}
    with ServiceProcess("all", "--repository", str(repository), *NO_CACHE, environment=_AS_INSTALLED) as process:

        def note(event: str) -> None:
            found[event] = time.monotonic() - process.began_s, cpu_seconds([process.pid])

        for event in _EVENTS:
            process.wait_for(event)
            note(event)
        with Client(process.target, retries=False) as client:
            while _FIRST not in found:
                try:
                    client.embed(model, "A fine day.")
                    note(_FIRST)
                except Unavailable:
                    time.sleep(_POLL_S)
    return found


def _drop_files(folder: Path) -> None:
    """Drops the files' content from the kernel's cache, except parts that processes have mapped."""
    os.sync()
    for path in (path for path in folder.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _rows(rounds: list[dict[str, tuple[float, float]]], title: str) -> Iterator[str]:
    for event in (*_EVENTS, _FIRST):
        times = zip(*(found[event] for found in rounds), strict=True)
        yield f"| {title} | {event} | {' | '.join(spread_text(column, '.2f') for column in times)} |"


def main() -> None:
    """Prints a table: median, smallest and largest of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("model", help="a model of embeddings")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    _start(options.repository, options.model)
    found: dict[str, list[dict[str, tuple[float, float]]]] = {"files not in memory": [], "files in memory": []}
    for _ in range(options.rounds):
        for title, rounds in found.items():
            if title == "files not in memory":
                _drop_files(options.repository)
            rounds.append(_start(options.repository, options.model))
    print(f"load before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs\n")
    print("| | until | s | CPU s |\n|---|---|---:|---:|")
    for title, rounds in found.items():
        print(*_rows(rounds, title), sep="\n")


if __name__ == "__main__":
    main()
