"""Servers of others over HTTP, in processes of their own."""

import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def running_web_server(
    command: Sequence[str], asked: urllib.request.Request, *, limit_s: float, folder: Path | None = None
) -> Iterator[None]:
    """Runs a server, from when it answers what it is asked, within `limit_s`, until the block ends."""
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            deadline_s = time.monotonic() + limit_s
            while True:
                try:
                    urllib.request.urlopen(asked, timeout=5).close()
                    break
                except OSError:
                    assert server.poll() is None, f"{command[0]} has ended"
                    assert time.monotonic() < deadline_s, f"{command[0]} does not answer"
                    time.sleep(0.1)
            yield
        finally:
            server.terminate()
