"""Lets commands that write files clean up on SIGTERM."""

import contextlib
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM into an exception in the block, which then cleans up. The exit code is that which shells expect."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
