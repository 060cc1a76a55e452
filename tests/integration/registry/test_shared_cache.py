"""The cache with a real Redis: shared, and in nobody's way when Redis is absent, slow, full, or talks nonsense."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.platform.cache.cache import Cache
from neuronpipe.platform.cache.sealing import ValueCodec
from neuronpipe.platform.cache.settings import CachePolicy, RedisSettings
from tests.servers.certificates import Authority, replace
from tests.servers.redis import RedisServer, proxy, redis_server
from tests.suite.constants import with_constants
from tests.suite.waiting import happens

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_HIT, _MISS, _BYPASS = (
    CacheOutcome.CACHE_OUTCOME_HIT_REDIS,
    CacheOutcome.CACHE_OUTCOME_MISS,
    CacheOutcome.CACHE_OUTCOME_BYPASS,
)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


@asynccontextmanager
async def _cache(url: str, policy: CachePolicy = "always", **settings: object) -> AsyncIterator[Cache[bytes]]:
    """A cache that has no memory of its own, so that Redis is asked every time."""
    # A machine that is busy answers late; where that is not what a test is about, Redis is waited for.
    redis = with_constants(RedisSettings, **{"redis_url": url, "redis_timeout_ms": 1000} | settings)
    cache = Cache("tokens", 0, redis, policy, ValueCodec(bytes, bytes, len))
    try:
        yield cache
    finally:
        await cache.close()


def _value_of(key: bytes) -> bytes:
    return b"the value of " + key


async def _get(cache: Cache[bytes], key: bytes, size_bytes: int = 100) -> "CacheOutcome.ValueType":
    """Where a key's value came from; whatever happened, it is the right one."""

    async def compute() -> bytes:
        return _value_of(key)

    value, outcome = await cache.get(key, size_bytes, compute)
    assert value == _value_of(key)
    return outcome


async def _connected(cache: Cache[bytes]) -> None:
    """Waits until Redis is asked."""

    async def is_asked() -> bool:
        return await _get(cache, random.randbytes(8)) != _BYPASS

    await happens(is_asked)


async def _stored(cache: Cache[bytes], key: bytes) -> None:
    """Waits until Redis has a key."""

    async def is_found() -> bool:
        return await _get(cache, key) == _HIT

    await happens(is_found)


async def test_what_is_stored_ends_some_day(server: RedisServer) -> None:
    async with _cache(server.url, redis_ttl_s=77) as cache:
        await _connected(cache)
        await _stored(cache, b"key")
        assert all(70 <= server.ask("TTL", name) <= 77 for name in server.stored_keys())


async def test_deployments_with_prefixes_of_their_own_do_not_see_each_other(server: RedisServer) -> None:
    async with _cache(server.url, redis_prefix="one") as first, _cache(server.url, redis_prefix="two") as second:
        await _connected(first)
        await _connected(second)
        await _stored(first, b"key")
        assert await _get(second, b"key") == _MISS
        assert all(name.startswith((b"one:tokens:", b"two:tokens:")) for name in server.stored_keys())


async def test_a_redis_that_was_absent_is_used_once_it_is_there() -> None:
    server = RedisServer()
    async with _cache(server.url) as cache:
        for number in range(20):
            assert await _get(cache, b"%d" % number) == _BYPASS
            await asyncio.sleep(0.01)  # it is tried to connect meanwhile
        with server:
            await _connected(cache)
            await _stored(cache, b"key")


async def test_a_redis_that_hangs_is_waited_for_once(server: RedisServer) -> None:
    async with _cache(server.url, redis_timeout_ms=50) as cache:
        await _connected(cache)
        await _stored(cache, b"key")
        server.send(signal.SIGSTOP)
        outcomes = [await _get(cache, b"key") for _ in range(200)]
        assert outcomes == [_MISS] + [_BYPASS] * 199
        server.send(signal.SIGCONT)
        await _stored(cache, b"key")


async def test_with_auto_redis_is_asked_for_texts_of_2_kib_or_more(server: RedisServer) -> None:
    async with _cache(server.url) as cache:
        await _connected(cache)
        await _stored(cache, b"key")
    async with _cache(server.url, "auto") as cache:
        async with asyncio.timeout(10):
            while await _get(cache, b"key", 2048) != _HIT:
                await asyncio.sleep(0.01)
        assert await _get(cache, b"key", 2047) == _BYPASS


async def test_late_answers_are_never_taken_for_those_to_other_questions(server: RedisServer) -> None:
    async with proxy(server.port) as between, _cache(between.url, redis_timeout_ms=20) as cache:
        await _connected(cache)
        for number in range(30):
            await _get(cache, b"%d" % number)
        chance = random.Random(1)
        for round_ in range(60):
            between.delay_s = chance.choice([0, 0.015, 0.025, 0.06])
            # Each asserts that it gets its own value.
            await asyncio.gather(*(_get(cache, b"%d" % chance.randrange(30)) for _ in range(5)))
            if round_ % 10 == 0:
                between.delay_s = 0
                await _connected(cache)


async def test_connections_that_are_cut_cost_no_request(server: RedisServer) -> None:
    async with proxy(server.port) as between, _cache(between.url, redis_timeout_ms=25) as cache:
        await _connected(cache)
        between.is_cutting = True
        assert [await _get(cache, b"%d" % number) for number in range(50)][1:] == [_BYPASS] * 49
        between.is_cutting = False
        await _connected(cache)


@pytest.mark.parametrize("fault", ["is_corrupting", "is_babbling"])
async def test_nonsense_is_never_taken_for_a_value(server: RedisServer, fault: str) -> None:
    async with proxy(server.port) as between, _cache(between.url, redis_timeout_ms=25) as cache:
        await _connected(cache)
        for number in range(20):
            await _get(cache, b"%d" % number)
        await _stored(cache, b"0")
        setattr(between, fault, True)
        for round_ in range(40):
            await asyncio.gather(*(_get(cache, b"%d" % number) for number in range(20)))
            await asyncio.sleep(0.01 if round_ % 4 else 0.1)
        setattr(between, fault, False)
        await _stored(cache, b"0")


@pytest.mark.parametrize("value", [b"", b"garbage", b"\x02" + bytes(30), "a value of another key"], ids=str)
async def test_a_value_that_is_none_of_ours_is_replaced(server: RedisServer, value: bytes | str) -> None:
    async with _cache(server.url) as cache:
        await _connected(cache)
        await _stored(cache, b"key")
        await _stored(cache, b"other")
        names = (b"neuronpipe:tokens:key", b"neuronpipe:tokens:other")
        server.ask("SET", names[0], value if isinstance(value, bytes) else server.ask("GET", names[1]))
        assert await _get(cache, b"key") == _MISS
        await _stored(cache, b"key")


async def test_a_key_that_holds_no_string_is_a_miss(server: RedisServer) -> None:
    async with _cache(server.url) as cache:
        await _connected(cache)
        server.ask("RPUSH", "neuronpipe:tokens:key", "a list")
        assert await _get(cache, b"key") == _MISS


@pytest.mark.parametrize("refusal", ["full", "read-only"])
async def test_a_redis_that_refuses_to_store_is_still_read(server: RedisServer, refusal: str) -> None:
    async with _cache(server.url) as cache:
        await _connected(cache)
        await _stored(cache, b"key")
        if refusal == "full":
            server.ask("CONFIG", "SET", "maxmemory", 1)
        else:
            server.ask("REPLICAOF", "127.0.0.1", 1)
        for number in range(20):
            assert await _get(cache, b"new %d" % number) == _MISS
            assert await _get(cache, b"key") == _HIT
            await asyncio.sleep(0.01)
        if refusal == "full":
            server.ask("CONFIG", "SET", "maxmemory", 0)
        else:
            server.ask("REPLICAOF", "NO", "ONE")
        await _stored(cache, b"new 1")


async def test_a_password_and_a_user_are_given_to_redis(server: RedisServer) -> None:
    server.ask("ACL", "SETUSER", "reader", "on", ">se/cret", "~*", "+@all")
    host = f"127.0.0.1:{server.port}"
    async with (
        _cache(f"redis://reader:se%2Fcret@{host}/3") as cache,
        _cache(f"redis://reader:wrong@{host}/3") as refused,
    ):
        await _connected(cache)
        await _stored(cache, b"key")
        assert "reader" in {client["user"] for client in server.ask("CLIENT LIST")}
        for _ in range(20):
            assert await _get(refused, b"key") == _BYPASS
            await asyncio.sleep(0.01)
        assert {entry["reason"] for entry in server.ask("ACL LOG")} == {"auth"}


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    """A folder of files for Redis and its clients alike."""
    authority = Authority()
    authority.issue().write(tmp_path)
    replace(tmp_path / "ca.crt", authority.certificate)
    return tmp_path


async def test_redis_is_asked_over_tls_by_a_client_with_a_certificate(tls: Path) -> None:
    with redis_server(tls=tls) as server:
        async with _cache(server.url) as cache:
            await _connected(cache)
            await _stored(cache, b"key")
        assert b"neuronpipe:tokens:key" in server.stored_keys()


@pytest.mark.parametrize("kind", ["plain", "other authority", "no certificate", "other name"])
async def test_a_redis_that_is_not_to_be_trusted_is_told_nothing(tls: Path, kind: str) -> None:
    authority = Authority("another")
    replace(tls / "other.crt", authority.certificate)
    with redis_server(tls=tls) as server:
        url = {
            "plain": f"redis://127.0.0.1:{server.port}/0",
            "other authority": server.url.replace("ca.crt", "other.crt"),
            "no certificate": f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs={tls}/ca.crt",
            "other name": server.url.replace("127.0.0.1", "127.0.0.2"),
        }[kind]
        if kind == "other name":
            server.ask("CONFIG", "SET", "bind", "127.0.0.1 127.0.0.2")
        async with _cache(url) as cache:
            assert {await _get(cache, b"key") for _ in range(20)} == {_BYPASS}
        assert server.stored_keys() == []


async def test_new_connections_to_redis_take_certificates_that_have_changed(tls: Path) -> None:
    """A client certificate of a new authority, and a server that is started again with files of its own."""
    with redis_server(tls=tls) as server:
        async with _cache(server.url) as cache:
            await _connected(cache)
            new = Authority("the next one")
            new.issue().write(tls)
            replace(tls / "ca.crt", new.certificate)
            server.stop()
            server.start()
            await _connected(cache)
            await _stored(cache, b"key")


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
async def test_a_master_is_found_by_its_sentinel(
    tls: Path, tmp_path_factory: pytest.TempPathFactory, is_encrypted: bool
) -> None:
    folder = tls if is_encrypted else None
    configuration = tmp_path_factory.mktemp("sentinel") / "sentinel.conf"
    with redis_server(tls=folder) as server:
        configuration.write_text(f"sentinel monitor ours 127.0.0.1 {server.port} 1\n")
        with RedisServer.sentinel(configuration, folder) as sentinel:
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/ours/0"
            if is_encrypted:
                url = f"rediss{url.removeprefix('redis')}?{server.tls_query}"
            async with _cache(url, redis_timeout_ms=500) as cache:
                await _connected(cache)
                await _stored(cache, b"key")
        assert b"neuronpipe:tokens:key" in server.stored_keys()


@pytest.mark.parametrize("is_encrypted", [False, True], ids=["plain", "TLS"])
async def test_a_cluster_is_asked_node_by_node(tls: Path, is_encrypted: bool) -> None:
    with redis_server("--cluster-enabled", "yes", tls=tls if is_encrypted else None) as server:
        server.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16383)

        async def is_up() -> bool:
            return bool(server.ask("CLUSTER INFO")["cluster_state"] == "ok")

        await happens(is_up)
        url = f"redis+cluster://127.0.0.1:{server.port}"
        if is_encrypted:
            url = f"rediss{url.removeprefix('redis')}?{server.tls_query}"
        async with _cache(url, redis_timeout_ms=500) as cache:
            await _connected(cache)
            await asyncio.gather(*(_get(cache, b"%d" % number) for number in range(30)))
            await _stored(cache, b"0")
            outcomes = await asyncio.gather(*(_get(cache, b"%d" % number) for number in range(30)))
            assert outcomes == [_HIT] * 30
