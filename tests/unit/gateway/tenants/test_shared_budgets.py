"""gateway/tenants/shared_budgets.py: what gateways take from a budget counts once, however Redis answers."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from neuronpipe.core.metrics import Meters
from neuronpipe.gateway.tenants.shared_budgets import BudgetExchange
from neuronpipe.gateway.tenants.tenants import Rights, Tenant, Tenants, TokenBucket
from neuronpipe.platform.cache.remote import Remote, RemoteError
from tests.servers.redis import Proxy, RedisServer, proxy, redis_server
from tests.suite.waiting import LIMIT_S

_CAPACITY = 60_000
# What comes back while a test runs, at a thousand tokens a second.
_SLACK = 5_000


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with redis_server() as server:
        yield server


class _Gateway:
    """A gateway, with one tenant and its budget."""

    def __init__(self, url: str) -> None:
        self.remote = Remote(url, prefix="np", timeout_s=LIMIT_S, connections=4)
        rights = Rights(tokens_per_minute=_CAPACITY)
        # Its clock stands, so that what is put back by itself is Redis's.
        self._tenants = Tenants(lambda name: rights, (100, 10**6), 0.01, Meters(), lambda: 100.0)
        self._budgets = BudgetExchange(self.remote, self._tenants)
        self._tenants.check("t")

    @property
    def budget(self) -> tuple[Tenant, TokenBucket]:
        [budget] = self._tenants.with_budgets()
        return budget

    async def exchange(self) -> int:
        """What is left, by Redis."""
        await self._budgets._exchange(*self.budget)
        return int(self.budget[1].level)

    async def exchange_in_vain(self) -> None:
        """An exchange that is not answered, or after this gateway's patience."""
        self.remote._timeout_s = 0.05
        with pytest.raises(RemoteError):
            await self.exchange()
        self.remote._timeout_s = LIMIT_S


@asynccontextmanager
async def _gateways(redis: RedisServer) -> AsyncIterator[tuple[_Gateway, Proxy, _Gateway]]:
    """One behind a proxy, and another."""
    redis.ask("FLUSHALL")
    async with proxy(redis.port) as between:
        proxied, direct = _Gateway(between.url), _Gateway(redis.url)
        try:
            yield proxied, between, direct
        finally:
            await proxied.remote.close()
            await direct.remote.close()


def _spoil(between: Proxy, fault: str) -> None:
    if fault == "is late":
        between.delay_s = 0.2
    elif fault == "is cut":
        between.is_cutting = True
    else:
        between.says = b":5\r\n"


@pytest.mark.parametrize("fault", ["is late", "is cut", "is no answer"])
async def test_tokens_whose_exchange_is_not_answered_are_taken_once(redis: RedisServer, fault: str) -> None:
    async with _gateways(redis) as (proxied, between, direct):
        await proxied.exchange()
        for number in range(1, 4):
            proxied.budget[1].take(10_000)
            _spoil(between, fault)
            for _ in range(2):
                await proxied.exchange_in_vain()
            between.delay_s, between.is_cutting, between.says = 0.0, False, b""
            left = _CAPACITY - 10_000 * number
            assert left <= await proxied.exchange() < left + _SLACK
            assert left <= await direct.exchange() < left + _SLACK
        assert proxied.budget[1].taken == 0


async def test_what_is_taken_and_put_back_while_an_exchange_is_repeated_counts_with_the_next(
    redis: RedisServer,
) -> None:
    async with _gateways(redis) as (proxied, between, direct):
        await proxied.exchange()
        proxied.budget[1].take(10_000)
        between.delay_s = 0.2
        await proxied.exchange_in_vain()
        between.delay_s = 0.0
        proxied.budget[1].take(-8_000)  # the request cost less than it took
        proxied.budget[1].take(20_000)
        assert _CAPACITY - 22_000 <= await proxied.exchange() < _CAPACITY - 22_000 + _SLACK
        assert proxied.budget[1].taken == 12_000
        assert _CAPACITY - 22_000 <= await proxied.exchange() < _CAPACITY - 22_000 + _SLACK
        assert _CAPACITY - 22_000 <= await direct.exchange() < _CAPACITY - 22_000 + _SLACK


async def test_a_silent_gateway_counts_no_more_and_its_last_exchange_is_still_known(redis: RedisServer) -> None:
    async with _gateways(redis) as (proxied, between, direct):
        await proxied.exchange()
        proxied.budget[1].take(10_000)
        between.delay_s = 0.2
        await proxied.exchange_in_vain()
        await direct.exchange()
        assert direct.budget[0].gateways == 2
        # As if both had been silent for eleven seconds.
        (key,) = redis.stored_keys()
        for field in [field for field in redis.ask("HKEYS", key) if field.startswith(b"gateway:")]:
            redis.ask("HINCRBYFLOAT", key, field, -11)
        await direct.exchange()
        assert direct.budget[0].gateways == 1
        between.delay_s = 0.0
        assert _CAPACITY - 10_000 <= await proxied.exchange() < _CAPACITY - 10_000 + _SLACK
        assert proxied.budget[0].gateways == 2


async def test_a_gateway_that_is_gone_for_long_leaves_nothing_behind(redis: RedisServer) -> None:
    async with _gateways(redis) as (proxied, _, direct):
        await proxied.exchange()
        (key,) = redis.stored_keys()
        (field,) = [field for field in redis.ask("HKEYS", key) if field.startswith(b"gateway:")]
        redis.ask("HINCRBYFLOAT", key, field, -181)
        await direct.exchange()
        left = {name.partition(b":")[0] for name in redis.ask("HKEYS", key)}
        assert left == {b"level", b"at", b"gateway", b"told"}
        assert redis.ask("HLEN", key) == 4
