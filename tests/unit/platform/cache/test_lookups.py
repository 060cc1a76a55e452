"""platform/cache/lookups.py: Redis is asked in batches, where that saves time, and not while it fails."""

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

import pytest

from neuronpipe.platform.cache.lookups import Breaker, Lookups
from neuronpipe.platform.cache.remote import Remote, RemoteError
from neuronpipe.platform.cache.sealing import ValueCodec, seal
from tests.suite.fixed_clock import FixedClock


def test_nothing_is_asked_before_a_probe_went_well_or_after_a_failure_until_a_pause_is_over() -> None:
    clock = FixedClock()
    breaker = Breaker(clock)
    seen = [(breaker.is_closed, breaker.pause_s)]
    for happens in breaker.close, breaker.open:
        happens()
        seen.append((breaker.is_closed, round(breaker.pause_s, 9)))
    clock.now_s += 0.11
    assert [*seen, breaker.pause_s] == [(False, 0), (True, 0), (False, 0.1), 0]


def test_pauses_grow_to_five_seconds_and_begin_anew_after_ten_that_went_well() -> None:
    clock = FixedClock()
    breaker = Breaker(clock)
    pauses = []
    for _ in range(8):
        breaker.open()
        pauses.append(breaker.pause_s)
        clock.now_s += breaker.pause_s
    assert [round(pause, 3) for pause in pauses] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    breaker.close()
    clock.now_s += 10
    assert breaker.open()
    assert round(breaker.pause_s, 3) == 0.1


def test_probes_that_succeed_where_questions_fail_do_not_begin_the_pauses_anew() -> None:
    clock = FixedClock()
    breaker = Breaker(clock)
    pauses = []
    for _ in range(4):
        breaker.close()
        clock.now_s += 0.5
        assert not breaker.open()
        pauses.append(breaker.pause_s)
        clock.now_s += breaker.pause_s
    assert [round(pause, 3) for pause in pauses] == [0.1, 0.2, 0.4, 0.8]


def test_failures_of_what_was_under_way_do_not_make_the_pause_longer() -> None:
    breaker = Breaker(FixedClock())
    breaker.close()
    for _ in range(50):
        breaker.open()
    assert breaker.pause_s == pytest.approx(0.1)


def test_pauses_never_shrink_while_failures_go_on() -> None:
    clock = FixedClock()
    breaker = Breaker(clock)
    pauses = []
    for _ in range(20):
        breaker.open()
        pauses.append(breaker.pause_s)
        clock.now_s += 10
    assert all(before <= after for before, after in itertools.pairwise(pauses))


_CONNECTIONS = 8
_BYTES: ValueCodec[bytes] = ValueCodec(bytes, bytes, len)


class _Redis(Remote):
    """Answers at once, unless held; notes what it is asked by requests (measurements ask for keys that begin with a
    minus).
    """

    def __init__(self) -> None:
        self.values: dict[bytes, bytes] = {}
        self.asked: list[list[bytes]] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.fails = False
        self.measured = 0
        # What the next measurement raises.
        self.fault: Exception | None = None

    async def get(self, keys: Sequence[bytes], limit_s: float | None = None) -> list[bytes | None]:
        if keys[0].startswith(b"-"):
            self.measured += 1
            fault, self.fault = self.fault, None
            if fault:
                raise fault
            return [None] * len(keys)
        self.asked.append(list(keys))
        await self.answers.wait()
        if self.fails:
            raise RemoteError("it fails")
        return [self.values.get(key) for key in keys]

    async def put(self, values: Mapping[bytes, bytes], ttl_s: int) -> int:
        self.values |= values
        return 0

    async def close(self) -> None:
        pass


@asynccontextmanager
async def _lookups(redis: _Redis) -> AsyncIterator[Lookups[bytes]]:
    lookups = Lookups(redis, _BYTES, ttl_s=60, connections=_CONNECTIONS)
    try:
        await lookups.find(b"first")
        await _settle()
        assert lookups.breaker.is_closed
        yield lookups
    finally:
        await lookups.close()


async def _settle() -> None:
    for _ in range(40):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("wanted", "questions"), [(100, [100]), (600, [256, 256, 88])])
async def test_what_is_wanted_in_one_pass_is_one_question_or_as_few_as_it_fits_into(
    wanted: int, questions: list[int]
) -> None:
    redis = _Redis()
    async with _lookups(redis) as lookups:
        await asyncio.gather(*(lookups.find(b"%d" % number) for number in range(wanted)))
    assert [len(keys) for keys in redis.asked] == questions


async def test_nobody_waits_for_a_connection() -> None:
    redis = _Redis()
    async with _lookups(redis) as lookups:
        redis.answers.clear()
        waiting = []
        for number in range(_CONNECTIONS - 2):
            waiting.append(asyncio.create_task(lookups.find(b"%d" % number)))
            await _settle()
        assert await lookups.find(b"one more") == (None, False)
        redis.answers.set()
        assert await asyncio.gather(*waiting) == [(None, True)] * (_CONNECTIONS - 2)


async def test_a_failure_lets_everybody_go_on_and_is_the_last() -> None:
    redis = _Redis()
    async with _lookups(redis) as lookups:
        redis.fails = True
        assert await asyncio.gather(*(lookups.find(b"%d" % number) for number in range(10))) == [(None, True)] * 10
        assert await lookups.find(b"later") == (None, False)
    assert len(redis.asked) == 1


async def test_what_is_stored_without_being_looked_up_before_connects() -> None:
    redis = _Redis()
    lookups = Lookups(redis, _BYTES, ttl_s=60, connections=_CONNECTIONS)
    lookups.store(b"key", b"value")
    await _settle()
    lookups.store(b"key", b"value")
    await _settle()
    await lookups.close()
    assert redis.values == {b"key": seal(b"key", b"value")}


async def test_who_waits_is_let_go_at_the_end() -> None:
    redis = _Redis()
    async with _lookups(redis) as lookups:
        redis.answers.clear()
        waiting = [asyncio.create_task(lookups.find(b"%d" % number)) for number in range(3)]
        await asyncio.sleep(0)
    assert [asked for _, asked in await asyncio.wait_for(asyncio.gather(*waiting), 5)] in ([False] * 3, [True] * 3)


async def test_too_much_to_store_is_dropped() -> None:
    redis = _Redis()
    async with _lookups(redis) as lookups:
        for number in range(20):
            lookups.store(b"%d" % number, bytes(1 << 20))
        lookups.store(b"too large by itself", bytes((1 << 20) + 1))
        await _settle()
    assert len(redis.values) == 8


async def test_a_fault_while_measuring_does_not_end_the_use_of_redis(caplog: pytest.LogCaptureFixture) -> None:
    redis = _Redis()
    redis.fault = ZeroDivisionError("unexpected")
    lookups = Lookups(redis, _BYTES, ttl_s=60, connections=_CONNECTIONS)
    with caplog.at_level(logging.ERROR, "neuronpipe"):
        async with asyncio.timeout(10):
            while not lookups.breaker.is_closed:
                await lookups.find(b"key")
                await asyncio.sleep(0.01)
        redis.values[b"key"] = seal(b"key", b"value")
        assert await lookups.find(b"key") == (b"value", True)
    await lookups.close()
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


async def test_faults_while_measuring_are_logged_once_and_pauses_follow(caplog: pytest.LogCaptureFixture) -> None:
    class Faulty(_Redis):
        async def get(self, keys: Sequence[bytes], limit_s: float | None = None) -> list[bytes | None]:
            self.measured += 1
            raise ZeroDivisionError

    redis = Faulty()
    lookups = Lookups(redis, _BYTES, ttl_s=60, connections=_CONNECTIONS)
    with caplog.at_level(logging.ERROR, "neuronpipe"):
        async with asyncio.timeout(10):
            while redis.measured < 2:
                assert await lookups.find(b"key") == (None, False)
                await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)  # the next one is due after 0.2 s
        assert redis.measured == 2
    await lookups.close()
    assert len(caplog.records) == 1


async def test_what_is_packed_in_one_pass_of_the_event_loop_is_limited() -> None:
    class Counting(_Redis):
        async def put(self, values: Mapping[bytes, bytes], ttl_s: int) -> int:
            stored.append(len(values))
            await asyncio.sleep(0)
            return await super().put(values, ttl_s)

    stored: list[int] = []
    async with _lookups(Counting()) as lookups:
        for number in range(8):
            lookups.store(b"%d" % number, bytes(100_000))
        for number in range(300):
            lookups.store(b"small %d" % number, b"value")
        await _settle()
    # 256 KiB or 256 values at a time.
    assert stored == [3, 3, 256, 46]


async def test_a_redis_that_was_not_asked_yet_is_not_away() -> None:
    redis = _Redis()
    lookups = Lookups(redis, _BYTES, ttl_s=60, connections=_CONNECTIONS)
    found = [lookups.is_away]
    redis.fails = True
    redis.fault = RemoteError("refused")
    await lookups.find(b"first")
    await _settle()
    assert [*found, lookups.is_away] == [False, True]
    await lookups.close()
