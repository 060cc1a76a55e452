"""platform/cache/memory.py: the least recently used goes first, and never more is held than allowed."""

import random

from neuronpipe.platform.cache.memory import MemoryCache


def test_what_was_put_is_found() -> None:
    cache = MemoryCache(10_000, len)
    cache.put(b"a", b"1")
    assert (cache.get(b"a"), cache.get(b"b")) == (b"1", None)


def test_a_value_is_replaced_by_a_later_one() -> None:
    cache = MemoryCache(10_000, len)
    cache.put(b"a", b"1" * 100)
    size_bytes = cache.size_bytes
    cache.put(b"a", b"2" * 100)
    assert (cache.get(b"a"), len(cache), cache.size_bytes) == (b"2" * 100, 1, size_bytes)


def test_the_least_recently_used_is_dropped_first() -> None:
    cache = MemoryCache(10_000, len)
    for key in (b"a", b"b", b"c"):
        cache.put(key, bytes(500))
    cache.get(b"a")
    while len(cache) < 13:
        cache.put(b"%d" % len(cache), bytes(500))
    cache.put(b"one more", bytes(900))
    assert cache.get(b"a") is not None
    assert cache.get(b"b") is None


def test_no_more_is_held_than_allowed_whatever_comes() -> None:
    chance = random.Random(3)
    cache = MemoryCache(20_000, len)
    for _ in range(5000):
        cache.put(b"%d" % chance.randrange(300), bytes(chance.randrange(3000)))
        assert cache.size_bytes <= 20_000
    held = sum(len(value) for number in range(300) if (value := cache.get(b"%d" % number)) is not None)
    assert 10_000 < held <= 20_000


def test_one_large_value_does_not_drive_out_all_others() -> None:
    cache = MemoryCache(10_000, len)
    cache.put(b"a", b"1")
    cache.put(b"large", bytes(5000))
    assert cache.get(b"a") == b"1"
    assert cache.get(b"large") is None


def test_a_cache_of_no_bytes_holds_nothing() -> None:
    cache = MemoryCache(0, len)
    cache.put(b"a", b"")
    assert len(cache) == 0


def test_a_value_counts_as_what_its_codec_says() -> None:
    cache: MemoryCache[int] = MemoryCache(10_000, lambda value: 1000 * value)
    for number in (1, 1, 1, 9):
        cache.put(b"%d" % len(cache), number)
    assert len(cache) == 3
    assert 3000 <= cache.size_bytes <= 4000


def test_a_value_that_grew_since_it_was_put_leaves_what_it_took() -> None:
    cache = MemoryCache(20_000, len)
    value = [1]
    cache.put(b"a", value)
    value += [1] * 1000
    cache.put(b"a", [1])
    assert (len(cache), cache.size_bytes) == (1, 1 + 1 + 240)
