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
