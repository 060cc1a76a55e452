"""Lets commands that write files clean up on SIGTERM."""

import contextlib
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """SIGTERM ends the block by an exception, so that it cleans up, with the exit code that shells expect."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
