"""The budgets of a minute that several gateways share, through Redis.

Every gateway tells Redis a few times a second what its tenants took, and learns what is left of each budget. No request
waits for it. While Redis does not answer, each gateway uses its share alone: the budget divided by the last known
number of gateways.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.gateway.tenants.tenants import Tenant, Tenants, TokenBucket
from neuronpipe.platform.cache.remote import Remote, RemoteError
from neuronpipe.platform.cache.settings import RedisSettings
from neuronpipe.platform.process.background import run_beside

_EXCHANGE_EVERY_S = 0.2
# Redis counts a gateway for the first time after its last exchange, and keeps that exchange's number for the second.
_GATEWAY_LIFE_S, _GATEWAY_KEPT_S = 10, 180
_CONNECTIONS = 4
# A token bucket (tenants.py) by Redis's clock, and the gateways that use it. Returns the level, and the number of
# gateways. A gateway repeats an unanswered exchange with the same number; Redis does not take the tokens of a known
# number again.
_EXCHANGE = f"""
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local capacity, taken = tonumber(ARGV[1]), tonumber(ARGV[2])
local told = 'told:' .. ARGV[3]
if tonumber(ARGV[4]) <= tonumber(redis.call('HGET', KEYS[1], told) or 0) then
  taken = 0
end
local level = tonumber(redis.call('HGET', KEYS[1], 'level') or capacity)
local at = tonumber(redis.call('HGET', KEYS[1], 'at') or now)
level = math.min(capacity, level + math.max(0, now - at) * capacity / 60) - taken
redis.call('HSET', KEYS[1], 'level', tostring(level), 'at', tostring(now), told, ARGV[4])
redis.call('HSET', KEYS[1], 'gateway:' .. ARGV[3], tostring(now))
redis.call('EXPIRE', KEYS[1], {_GATEWAY_KEPT_S} + math.ceil((capacity - level) / capacity * 60))
local gateways, fields = 0, redis.call('HGETALL', KEYS[1])
for i = 1, #fields, 2 do
  if string.sub(fields[i], 1, 8) == 'gateway:' then
    local silent = now - tonumber(fields[i + 1])
    if silent <= {_GATEWAY_LIFE_S} then
      gateways = gateways + 1
    elseif silent > {_GATEWAY_KEPT_S} then
      redis.call('HDEL', KEYS[1], fields[i], 'told:' .. string.sub(fields[i], 9))
    end
  end
end
return {{tostring(level), gateways}}
"""


class BudgetExchange:
    """The exchange of one gateway with Redis."""

    def __init__(self, remote: Remote, tenants: Tenants) -> None:
        self.is_unreachable = False
        self._remote = remote
        self._tenants = tenants
        self._gateway = secrets.token_hex(8)
        self._numbers = itertools.count(1)

    async def run(self) -> None:
        """Exchanges until it is cancelled."""
        while True:
            await asyncio.sleep(_EXCHANGE_EVERY_S)
            try:
                for tenant, bucket in self._tenants.with_budgets():
                    await self._exchange(tenant, bucket)
            except RemoteError as error:
                if not self.is_unreachable:
                    log_warning("budgets are not shared: Redis does not answer", problem=str(error))
                self.is_unreachable = True
                for tenant, bucket in self._tenants.with_budgets():
                    bucket.share = 1 / tenant.gateways
            else:
                if self.is_unreachable:
                    log("budgets are shared again")
                self.is_unreachable = False

    async def _exchange(self, tenant: Tenant, bucket: TokenBucket) -> None:
        bucket.unanswered = number, taken = bucket.unanswered or (next(self._numbers), bucket.taken)
        arguments = str(bucket.capacity), str(taken), self._gateway, str(number)
        reply = await self._remote.evaluate(_EXCHANGE, b"budget:" + tenant.name.encode(), *arguments)
        try:
            level, gateways = float(reply[0]), int(reply[1])
        except (TypeError, ValueError, IndexError) as error:
            raise RemoteError("not an answer to the question") from error
        bucket.share, bucket.unanswered = 1.0, None
        bucket.taken -= taken
        bucket.level = level - bucket.taken  # tokens that were taken meanwhile
        tenant.gateways = max(1, gateways)


@asynccontextmanager
async def running_shared_budgets(settings: RedisSettings, tenants: Tenants, meters: Meters) -> AsyncIterator[None]:
    """Shares the budgets while the block runs. Raises SetupError if the URL is invalid."""
    timeout_s = settings.redis_timeout_ms / 1000
    remote = Remote(settings.redis_url, prefix=settings.redis_prefix, timeout_s=timeout_s, connections=_CONNECTIONS)
    budgets = BudgetExchange(remote, tenants)
    meters.gauge(Metrics.BUDGET_REDIS, lambda: not budgets.is_unreachable)
    try:
        async with run_beside(budgets.run()):
            yield
    finally:
        await remote.close()
