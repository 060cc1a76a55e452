"""core/parsing.py: what comes compressed is read up to a limit, and to its end."""

import gzip
import random
import zlib

import pytest

from neuronpipe.core.parsing import Truncated, inflate

_GZIP = 16 + zlib.MAX_WBITS
_DATA = [b"", b"a", b"a" * 5_000_000, random.Random(1).randbytes(3_000_000)]
_IDS = ["nothing", "a letter", "what becomes large", "what stays large"]


@pytest.mark.parametrize("data", _DATA, ids=_IDS)
def test_data_are_read_up_to_the_limit(data: bytes) -> None:
    packed = gzip.compress(data, 1)
    assert inflate(packed, _GZIP, len(data)) == data
    if data:
        assert inflate(packed, _GZIP, len(data) - 1) is None


@pytest.mark.parametrize("data", _DATA, ids=_IDS)
def test_an_end_that_comes_too_early_or_too_late_is_an_error(data: bytes) -> None:
    packed = gzip.compress(data, 1)
    for wrong in (packed[:-3], packed + b"more", packed + b"x" * 100_000, b""):
        with pytest.raises(Truncated):
            inflate(wrong, _GZIP, 10 << 20)


def test_what_is_not_compressed_is_an_error() -> None:
    with pytest.raises(zlib.error):
        inflate(b"{}", 32 + zlib.MAX_WBITS, 100)


@pytest.mark.parametrize("window_bits", [_GZIP, 32 + zlib.MAX_WBITS], ids=["gzip", "gzip or zlib"])
def test_members_are_read_as_one(window_bits: int) -> None:
    """RFC 1952, 2.2."""
    parts = [b"a" * 300_000, b"", random.Random(1).randbytes(200_000), b"b"]
    packed = b"".join(gzip.compress(part) for part in parts)
    data = b"".join(parts)
    assert inflate(packed, window_bits, len(data)) == data == gzip.decompress(packed)
    assert inflate(packed, window_bits, len(data) - 1) is None
    assert inflate(packed, window_bits, 300_000) is None
    with pytest.raises(Truncated):
        inflate(packed[:-1], window_bits, len(data))


def test_data_of_zlib_have_no_members() -> None:
    one, other = zlib.compress(b"a"), gzip.compress(b"a")
    for wrong, window_bits in ((one + one, zlib.MAX_WBITS), (one + other, 32 + zlib.MAX_WBITS), (other + one, _GZIP)):
        with pytest.raises(Truncated):
            inflate(wrong, window_bits, 100)


def test_members_without_data_take_a_bounded_time() -> None:
    empty, last = gzip.compress(b""), gzip.compress(b"a")
    assert inflate(empty * 2047 + last, _GZIP, 100) == b"a"
    with pytest.raises(Truncated):
        inflate(empty * 2048 + last, _GZIP, 100)
