"""Redis, by redis-py, as the caches use it.

URLs are redis-py's own (redis://, rediss:// with TLS, unix://; user, password, database and, after a question mark, any
option of its connections, such as ssl_ca_certs). Two more forms exist, because redis-py has no URLs for them:

    redis+cluster://HOST:PORT                                  a cluster, found from one of its nodes
    redis+sentinel://HOST:PORT,HOST:PORT/SERVICE[/DATABASE]    the master that sentinels name

User and password in a sentinel URL belong to the master. rediss+cluster and rediss+sentinel use TLS.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.connection import SSLConnection, parse_url
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import RedisClusterException, RedisError

from neuronpipe.core.errors import SetupError

try:
    from redis.driver_info import DriverInfo
except ImportError:  # redis-py before 7.2, which looks up its own version once
    _DRIVER: dict[str, Any] = {}
else:
    # Without DriverInfo, each new connection looks for the version in the files of installed packages, for 1 to 3 ms.
    _DRIVER = {"driver_info": DriverInfo()}

ReplyT = TypeVar("ReplyT")

_FORMS = "redis[s]://HOST:PORT/0, unix://PATH, redis[s]+cluster://HOST:PORT, redis[s]+sentinel://HOST:PORT,HOST:PORT/SERVICE/0"
_CONNECT_LIMIT_S = 1.0
_SENTINEL_PORT = 26379
_SCAN_KEYS = 1000


class RemoteError(Exception):
    """Redis is unreachable or too slow, or its answer is invalid."""


class Remote:
    """The keys under one prefix. Connects when it is first used.

    Every call ends within `timeout_s`, with RemoteError if Redis has not answered by then.
    """

    def __init__(self, url: str, *, prefix: str, timeout_s: float, connections: int) -> None:
        """Raises SetupError if the URL is invalid."""
        self._prefix = prefix.encode() + b":"
        self._timeout_s = timeout_s
        self._asking: set[asyncio.Future[Any]] = set()
        # No retry: the circuit breaker decides when to ask again.
        options = {
            # A safety net: every call has its own limit.
            "socket_timeout": max(timeout_s, _CONNECT_LIMIT_S),
            "socket_connect_timeout": max(timeout_s, _CONNECT_LIMIT_S),
            "retry": Retry(NoBackoff(), 0),
            # A connection of an abandoned call is released only when that call has ended.
            "max_connections": 2 * connections,
        }
        try:
            self._client, self._sentinels = open_client(url, options)
        except (ValueError, TypeError, RedisError, RedisClusterException) as error:
            # Without the parser's message, which may hold a password.
            raise SetupError(f"redis_url: not a Redis URL; it must be one of {_FORMS} (see docs/caching.md)") from error

    async def get(self, keys: Sequence[bytes], limit_s: float | None = None) -> list[bytes | None]:
        """Returns the values of keys, in order; None for a missing key. `limit_s` replaces the limit of all calls."""
        names = [self._prefix + key for key in keys]
        client = self._client
        reply = client.mget_nonatomic(names) if isinstance(client, RedisCluster) else client.mget(names)
        values = await self._within_limit(reply, limit_s)
        if not isinstance(values, list) or len(values) != len(keys):
            raise RemoteError("an invalid answer")
        return [value if isinstance(value, bytes) else None for value in values]

    async def put(self, values: Mapping[bytes, bytes], ttl_s: int) -> int:
        """Stores values for `ttl_s` seconds in one pipeline.

        Returns the number of values that Redis refused because it is full or read-only.
        """
        pipeline = self._client.pipeline(transaction=False)
        for key, value in values.items():
            pipeline.set(self._prefix + key, value, ex=ttl_s)
        replies = await self._within_limit(pipeline.execute(raise_on_error=False))
        return sum(isinstance(reply, Exception) for reply in replies)

    async def scan(self) -> AsyncIterator[list[bytes]]:
        """Yields all keys, without the prefix, in lists."""
        keys: list[bytes] = []
        try:
            async for name in self._client.scan_iter(match=_literal(self._prefix) + b"*", count=_SCAN_KEYS):
                keys.append(name.removeprefix(self._prefix))
                if len(keys) == _SCAN_KEYS:
                    yield keys
                    keys = []
        except Exception as error:
            raise RemoteError(_reason(error)) from error
        if keys:
            yield keys

    async def sizes(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the memory of keys in the server, in bytes, including values and overhead; 0 for a missing key."""
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.memory_usage(self._prefix + key)
        return [size or 0 for size in await self._within_limit(pipeline.execute())]

    async def delete(self, keys: Sequence[bytes]) -> int:
        """Deletes keys. Returns the number of deleted keys."""
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.unlink(self._prefix + key)
        return sum(await self._within_limit(pipeline.execute()))

    async def evaluate(self, script: str, key: bytes, *arguments: str) -> Any:
        return await self._within_limit(self._client.eval(script, 1, self._prefix + key, *arguments))

    async def close(self) -> None:
        for asking in self._asking:
            asking.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)
        for client in (self._client, *self._sentinels):
            await client.aclose()

    async def _within_limit(self, call: Awaitable[ReplyT], limit_s: float | None = None) -> ReplyT:
        asking = ask_apart(call, self._asking)
        try:
            await asyncio.wait({asking}, timeout=limit_s or self._timeout_s)
        finally:
            is_answered = not asking.cancel()
        if not is_answered or asking.cancelled():
            raise RemoteError("no answer in time")
        # An invalid answer makes redis-py's parser raise various exceptions.
        if error := asking.exception():
            raise RemoteError(_reason(error)) from error
        return asking.result()


def ask_apart(call: Awaitable[ReplyT], asking: "set[asyncio.Future[Any]]") -> "asyncio.Future[ReplyT]":
    """Sends a command in a task of its own, which is in `asking` until it ends: when redis-py is cancelled, it may take
    long to clean up, or swallow the cancellation (also bpo-42130, in Python 3.11).
    """

    def end(ended: "asyncio.Future[ReplyT]") -> None:
        asking.discard(ended)
        if not ended.cancelled():
            ended.exception()  # marks the exception as retrieved; the caller has it already, or has left

    reply = asyncio.ensure_future(call)
    asking.add(reply)
    reply.add_done_callback(end)
    return reply


def open_client(url: str, options: Mapping[str, Any]) -> "tuple[Redis | RedisCluster, Sequence[Redis]]":
    """Returns a URL's client, and the clients of its sentinels. Raises redis-py's errors for an invalid URL."""
    client, sentinels = _open_client(url, options)
    for connected in (client, *sentinels):
        if isinstance(connected, Redis):
            pool = connected.connection_pool
            pool.connection_kwargs |= _DRIVER
            if issubclass(kind := pool.connection_class, SSLConnection):
                pool.connection_class = type(f"Fresh{kind.__name__}", (_FreshFiles, kind), {})
    return client, sentinels


class _FreshFiles(SSLConnection):
    """Reads the TLS files at each connection. redis-py's class keeps the content that it read first, and its pool keeps
    connections that can no longer connect.
    """

    async def _connect(self) -> None:
        self.ssl_context.context = None
        await super()._connect()  # type: ignore[no-untyped-call]


def _open_client(url: str, options: Mapping[str, Any]) -> "tuple[Redis | RedisCluster, Sequence[Redis]]":
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    plain = urlunsplit(parts._replace(scheme=scheme))
    if not kind:
        return Redis.from_url(plain, **options), ()
    if kind == "cluster":
        return RedisCluster.from_url(plain, **options), ()
    if kind != "sentinel":
        raise ValueError(f"{parts.scheme}:// is not known")
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ValueError("it names no service, as in redis+sentinel://HOST:PORT/SERVICE")
    credentials, _, hosts = parts.netloc.rpartition("@")
    url_options = parse_url(
        urlunsplit(parts._replace(scheme=scheme, netloc=f"{credentials}@" if credentials else "", path=f"/{database}"))
    )
    # Redis itself has no connection class but accepts ssl=True; Sentinel passes all options to it.
    settings: dict[str, Any] = {**options, **url_options}
    settings.pop("connection_class", None)
    sentinels = [_address(host) for host in hosts.split(",")]
    settings["ssl"] = scheme == "rediss"
    # Connections to sentinels have the master's options, except for its user and database.
    sentinel_options = {
        name: value for name, value in settings.items() if name == "retry" or name.startswith(("socket_", "ssl"))
    }
    sentinel = Sentinel(sentinels, sentinel_kwargs=sentinel_options, **settings)  # type: ignore[no-untyped-call]
    return sentinel.master_for(service), sentinel.sentinels


def _address(host: str) -> tuple[str, int]:
    parts = urlsplit(f"//{host}")
    if not parts.hostname:
        raise ValueError("it names no host")
    return parts.hostname, parts.port or _SENTINEL_PORT


def _literal(prefix: bytes) -> bytes:
    """Returns the prefix with the special characters of a SCAN pattern escaped."""
    return b"".join(b"\\" + bytes([sign]) if sign in b"*?[]^\\" else bytes([sign]) for sign in prefix)


def _reason(error: BaseException) -> str:
    """Returns the kind of an error, without Redis's message, which may hold keys."""
    return type(error).__name__
