"""platform/cache/cache.py: a value is computed once, and what was used least recently goes first."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.core.errors import DeadlineExceeded, InvalidInput, Overloaded, Unavailable
from neuronpipe.platform.cache.cache import Cache, MemoryCache
from neuronpipe.platform.cache.sealing import ValueCodec
from neuronpipe.platform.cache.settings import RedisSettings


def test_what_was_put_is_found_and_not_driven_out_by_one_large_value() -> None:
    cache = MemoryCache(10_000, len)
    cache.put(b"a", b"1")
    cache.put(b"large", bytes(5000))
    assert [cache.get(key) for key in (b"a", b"b", b"large")] == [b"1", None, None]


def test_a_cache_of_no_bytes_holds_nothing() -> None:
    cache = MemoryCache(0, len)
    cache.put(b"a", b"")
    assert len(cache) == 0


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


_HIT, _MISS = CacheOutcome.CACHE_OUTCOME_HIT_MEMORY, CacheOutcome.CACHE_OUTCOME_MISS


class _Work:
    """Computes when let, and counts."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = asyncio.Event()

    async def compute(self) -> bytes:
        self.begun += 1
        await self.may_end.wait()
        return b"value %d" % self.begun


@pytest_asyncio.fixture
async def cache() -> AsyncIterator[Cache[bytes]]:
    cache = Cache("tokens", 1 << 20, RedisSettings(), "auto", ValueCodec(bytes, bytes, len))
    yield cache
    await cache.close()


@pytest.fixture
def work() -> _Work:
    return _Work()


def _failing(error: Exception) -> Callable[[], Awaitable[bytes]]:
    async def compute() -> bytes:
        await asyncio.sleep(0)
        raise error

    return compute


async def test_what_was_computed_is_found_by_its_key_alone(cache: Cache[bytes], work: _Work) -> None:
    work.may_end.set()
    assert await cache.get(b"key", 1, work.compute) == (b"value 1", _MISS)
    assert await cache.get(b"key", 1, work.compute) == (b"value 1", _HIT)
    assert await cache.get(b"other", 1, work.compute) == (b"value 2", _MISS)


async def test_many_who_ask_at_a_time_have_it_computed_once(cache: Cache[bytes], work: _Work) -> None:
    asking = [asyncio.create_task(cache.get(b"key", 1, work.compute)) for _ in range(50)]
    await asyncio.sleep(0)
    work.may_end.set()
    answers = await asyncio.gather(*asking)
    assert work.begun == 1
    assert answers == [(b"value 1", _MISS), *[(b"value 1", _HIT)] * 49]


@pytest.mark.parametrize(("leaving", "begun"), [(1, 1), (0, 2)], ids=["one who waits", "the one who computes"])
async def test_one_who_leaves_does_not_take_the_value_along(
    cache: Cache[bytes], work: _Work, leaving: int, begun: int
) -> None:
    asking = [asyncio.create_task(cache.get(b"key", 1, work.compute)) for _ in range(3)]
    await asyncio.sleep(0)
    asking.pop(leaving).cancel()
    await asyncio.sleep(0)
    work.may_end.set()
    assert [await task for task in asking] == [(b"value %d" % begun, outcome) for outcome in (_MISS, _HIT)]


@pytest.mark.parametrize(
    "error", [DeadlineExceeded("late"), Overloaded("full", 1.0), RuntimeError("a fault")], ids=repr
)
async def test_a_failure_is_nobodys_but_the_one_whose_it_is(cache: Cache[bytes], work: _Work, error: Exception) -> None:
    failing = asyncio.create_task(cache.get(b"key", 1, _failing(error)))
    await asyncio.sleep(0)
    second = asyncio.create_task(cache.get(b"key", 1, work.compute))
    work.may_end.set()
    with pytest.raises(type(error)):
        await failing
    assert await second == (b"value 1", _MISS)


@pytest.mark.parametrize("error", [InvalidInput("text", "is empty"), Unavailable("the stage is away")], ids=repr)
async def test_a_failure_of_all_ends_all_at_once(cache: Cache[bytes], work: _Work, error: Exception) -> None:
    failing = asyncio.create_task(cache.get(b"key", 1, _failing(error)))
    others = [asyncio.create_task(cache.get(b"key", 1, work.compute)) for _ in range(20)]
    ended = await asyncio.gather(failing, *others, return_exceptions=True)
    assert ended == [error] * 21
    assert work.begun == 0


async def test_interactive_work_does_not_wait_for_bulk_work(cache: Cache[bytes], work: _Work) -> None:
    bulk = asyncio.create_task(cache.get(b"key", 1, work.compute, is_bulk=True))
    await asyncio.sleep(0)
    soon = _Work()
    soon.may_end.set()
    assert await cache.get(b"key", 1, soon.compute) == (b"value 1", _MISS)
    work.may_end.set()
    await bulk


async def test_an_older_computation_does_not_replace_what_was_refreshed(cache: Cache[bytes], work: _Work) -> None:
    older = asyncio.create_task(cache.get(b"key", 1, work.compute))
    await asyncio.sleep(0)
    newer = _Work()
    newer.begun = 10
    newer.may_end.set()
    assert await cache.get(b"key", 1, newer.compute, refresh=True) == (b"value 11", _MISS)
    work.may_end.set()
    assert await older == (b"value 1", _MISS)
    assert await cache.get(b"key", 1, work.compute) == (b"value 11", _HIT)


async def test_refreshing_computes_anew_and_replaces_what_is_found_until_then(cache: Cache[bytes], work: _Work) -> None:
    work.may_end.set()
    await cache.get(b"key", 1, work.compute)
    work.may_end.clear()
    refreshing = asyncio.create_task(cache.get(b"key", 1, work.compute, refresh=True))
    await asyncio.sleep(0)
    assert await cache.get(b"key", 1, work.compute) == (b"value 1", _HIT)
    work.may_end.set()
    assert await refreshing == (b"value 2", _MISS)
    assert await cache.get(b"key", 1, work.compute) == (b"value 2", _HIT)


async def test_a_value_that_is_computed_or_found_in_memory_is_not_serialized() -> None:
    def refuse(value: object) -> bytes:
        raise AssertionError("nobody sends it")

    value = object()

    async def compute() -> object:
        return value

    settings = RedisSettings()
    cache: Cache[object] = Cache("tokens", 1 << 20, settings, "auto", ValueCodec(refuse, refuse, lambda value: 100))
    assert (await cache.get(b"key", 1, compute))[0] is value
    assert (await cache.get(b"key", 1, compute))[0] is value
    await cache.close()
