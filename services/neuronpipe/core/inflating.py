"""Decompresses what callers send, up to a limit."""

import zlib

_INPUT_BYTES = 64 << 10
_OUTPUT_BYTES = 1 << 20


class Truncated(Exception):
    """The data ends too early, or goes on behind its end."""


def inflate(data: bytes, window_bits: int, max_bytes: int) -> bytes | None:
    """What compressed data become; None where they become more than `max_bytes`. Raises Truncated, and zlib.error.

    It reads them twice, in pieces for their size first: joining pieces holds the GIL, tens of milliseconds for 64 MiB.
    """
    reader, size_bytes, place = zlib.decompressobj(window_bits), 0, 0
    rest = b""
    while not reader.eof:
        if not rest:
            rest = data[place : place + _INPUT_BYTES]
            place += len(rest)
        piece = reader.decompress(rest, _OUTPUT_BYTES)
        size_bytes += len(piece)
        if size_bytes > max_bytes:
            return None
        if not (piece or rest or reader.eof):
            raise Truncated
        rest = reader.unconsumed_tail
    if reader.unused_data or place < len(data):
        raise Truncated
    return zlib.decompress(data, window_bits, max(size_bytes, 1))
