"""The terminal: tables, and commands that clean up when they are ended."""

import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Prints rows, the heading first, with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Turns SIGTERM into an exception in the block, which then cleans up. The exit code is that which shells expect."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
