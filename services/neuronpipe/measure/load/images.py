"""Makes PNG images from texts, for load tests, with the standard library and NumPy."""

import struct
import zlib

import numpy as np

_HEIGHT, _WIDTH = 320, 480
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_RGB = 2
# They repeat within deflate's window of 32 KiB, so that the file takes 30 kB, as a photograph of this size does.
_LINES = 20


def make_image(text: str) -> bytes:
    """A PNG file. Each text gives another image."""
    generator = np.random.default_rng(zlib.crc32(text.encode()))
    lines = generator.integers(0, 256, (_LINES, _WIDTH * 3), np.uint8)
    rows = np.zeros((_HEIGHT, 1 + _WIDTH * 3), np.uint8)  # each begins with its filter: none
    rows[:, 1:] = np.resize(lines, (_HEIGHT, _WIDTH * 3))
    header = struct.pack(">IIBBBBB", _WIDTH, _HEIGHT, 8, _RGB, 0, 0, 0)
    return (
        _SIGNATURE + _chunk(b"IHDR", header) + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 1)) + _chunk(b"IEND", b"")
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
