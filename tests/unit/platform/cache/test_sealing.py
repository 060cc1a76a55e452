"""platform/cache/sealing.py: what comes back is used only where it is what was stored."""

import random

import pytest

from neuronpipe.platform.cache.sealing import FORMAT, seal, unseal


@pytest.mark.parametrize("payload", [b"", b"x", bytes(100_000)], ids=len)
def test_a_payload_comes_back_as_it_was(payload: bytes) -> None:
    assert unseal(b"key", seal(b"key", payload)) == payload


def test_a_value_of_another_key_is_none() -> None:
    assert unseal(b"other", seal(b"key", b"payload")) is None


def test_a_value_of_another_version_is_none() -> None:
    value = seal(b"key", b"payload")
    assert unseal(b"key", bytes([FORMAT[0] + 1]) + value[1:]) is None


def test_a_value_cut_anywhere_is_none() -> None:
    value = seal(b"key", b"a payload")
    assert [unseal(b"key", value[:length]) for length in range(len(value))] == [None] * len(value)


def test_a_value_with_any_bit_changed_is_none() -> None:
    value = bytearray(seal(b"key", b"a payload"))
    for bit in range(8 * len(value)):
        value[bit // 8] ^= 1 << bit % 8
        assert unseal(b"key", bytes(value)) is None
        value[bit // 8] ^= 1 << bit % 8


def test_noise_is_none() -> None:
    chance = random.Random(5)
    assert all(unseal(b"key", FORMAT + chance.randbytes(chance.randrange(100))) is None for _ in range(1000))
