"""Jobs in Redis, by redis-py. The scripts say what happens there (bulk/jobs/scripts.py)."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import OutOfMemoryError, RedisClusterException, RedisError, ResponseError

from neuronpipe.bulk.jobs import scripts
from neuronpipe.bulk.jobs.job import Counts, EndState, Job, NewJob, TakenJob
from neuronpipe.bulk.jobs.settings import JobStoreSettings
from neuronpipe.core.errors import NeuronpipeError, Overloaded, SetupError, Unavailable
from neuronpipe.core.logs import log_warning
from neuronpipe.platform.cache.remote import open_client

ReplyT = TypeVar("ReplyT")

_STREAMS = ("high", "normal", "low")
_MIN_VERSION = 7
_TIMEOUT_S = 5.0
# Commands at once, which wait for each other instead of for connections.
_CONNECTIONS = 32
# Those that wait for a place. While Redis hangs, more of them would leave no room in the process for other calls.
_MAX_WAITING = 1024
# Results in one list of jobs; the last one may exceed it.
_MAX_LISTED_BYTES = 2 << 20
_FULL_RETRY_S = 30.0
_PAUSE_S = 1.0


class JobStore:
    """Jobs in Redis. Raises Unavailable while Redis does not answer, and Overloaded while it is full."""

    def __init__(self, settings: JobStoreSettings) -> None:
        """Raises SetupError for an invalid URL."""
        options = {
            "socket_timeout": _TIMEOUT_S,
            "socket_connect_timeout": _TIMEOUT_S,
            # Every script may be run twice. A restart of Redis leaves stale connections in the pool.
            "retry": Retry(ExponentialBackoff(cap=0.5, base=0.05), 3),
        }
        try:
            client, self._sentinels = open_client(settings.jobs_redis_url, options)
        except (ValueError, TypeError, RedisError, RedisClusterException) as error:
            raise SetupError("jobs_redis_url: not a Redis URL (see docs/jobs.md)") from error
        if isinstance(client, RedisCluster):
            raise SetupError("jobs_redis_url: a cluster cannot hold jobs, whose keys must be on one server")
        self._client: Redis = client
        self._prefix = settings.jobs_redis_prefix
        self._is_checked = False
        self._places = asyncio.Semaphore(_CONNECTIONS)
        self._asked = 0
        sources = {name: source for name, source in vars(scripts).items() if name.isupper() and name[0] != "_"}
        self._scripts = {name: client.register_script(source) for name, source in sources.items()}

    async def check(self) -> None:
        """Makes what is missing, once. Raises SetupError for a Redis that would lose jobs."""
        if self._is_checked:
            return
        found: Mapping[str, Any] = await self._ask(self._client.info("everything"))
        wrong = [
            f"{name} is {found.get(key)!r}, must be {must!r}"
            for name, key, must, value in (
                ("maxmemory-policy", "maxmemory_policy", "noeviction", "noeviction"),
                ("appendonly", "aof_enabled", "yes (1)", 1),
            )
            if found.get(key) != value
        ]
        if int(str(found.get("redis_version", "0")).partition(".")[0]) < _MIN_VERSION:
            wrong.append(f"its version is {found.get('redis_version')}, must be at least {_MIN_VERSION}")
        if wrong:
            raise SetupError(f"jobs_redis_url: this Redis would lose jobs: {'; '.join(wrong)} (see docs/jobs.md)")
        for stream in _STREAMS:
            await self._ask(self._make_group(f"{self._prefix}:{stream}"))
        self._is_checked = True

    async def wait_until_usable(self) -> None:
        """Returns once Redis answers. Raises SetupError for one that would lose jobs."""
        while True:
            try:
                return await self.check()
            except NeuronpipeError as error:
                log_warning("the Redis of jobs is not usable yet", problem=error.message)
                await asyncio.sleep(_PAUSE_S)

    async def check_if_reached(self) -> None:
        """Raises SetupError for a Redis that would lose jobs. One that does not answer now is checked when it does."""
        try:
            await self.check()
        except NeuronpipeError as error:
            log_warning("the Redis of jobs is not usable yet", problem=error.message)

    async def is_over(self, job: Job) -> bool:
        """Whether the time to live of a job is over, by Redis's clock."""
        seconds, microseconds = await self._ask(self._client.time())
        return bool(seconds * 1000 + microseconds // 1000 >= job.expires_ms)

    async def submit(self, new: NewJob, max_open: int, max_of_tenant: int, max_bytes: int) -> tuple[str, str]:
        """Stores a job. Returns its id and digest, or those of the job that has its key already. Raises Overloaded.
        `max_of_tenant`, `max_bytes`: its open jobs, and memory of all that are kept; 0 for no limit.
        """
        fields = [str(part) for name_and_value in new.fields.items() for part in name_and_value]
        limits = (max_open, max_of_tenant, max_bytes)
        content = (new.id, new.key, new.digest, new.priority, new.tenant, new.request)
        reply = await self._run("SUBMIT", *content, new.ttl_s * 1000, new.retention_s, *limits, *fields)
        id, digest = (part.decode() for part in reply)
        if not id:
            problems = {
                "all": f"{max_open} jobs of all callers wait or run, the limit",
                "tenant": f"{max_of_tenant} jobs of tenant {new.tenant!r} wait or run, the limit",
                "bytes": f"the jobs of tenant {new.tenant!r} and their results have {max_bytes} bytes, the limit: "
                "delete those that are no longer needed",
            }
            raise Overloaded(problems[digest], _FULL_RETRY_S)
        return id, digest

    async def get(self, id: str) -> Job | None:
        """A job; None if it is not there."""
        await self.check()
        fields = await self._ask(self._client.hgetall(f"{self._prefix}:job:{id}"))
        return Job.of(id, fields) if fields else None

    async def jobs_of(self, tenant: str, before: str, count: int) -> tuple[Sequence[Job], bool]:
        """A tenant's jobs, the newest first, without their requests, and whether there may be more: fewer than `count`
        are listed where their results are large. `before`: the id of the last one that was listed; empty for the first.
        """
        await self.check()
        listed, skip = f"{self._prefix}:jobs:{tenant}", 0
        found: list[Job] = []
        left_bytes = _MAX_LISTED_BYTES
        if before:
            place = await self._ask(self._client.zrevrank(listed, before))
            skip = 0 if place is None else int(place) + 1
        while ids := await self._ask(self._client.zrevrange(listed, skip, skip + count - 1)):
            for id in ids:
                job = await self.get(id.decode())
                if job is None:
                    await self._ask(self._client.zrem(listed, id))
                    continue
                skip += 1
                found.append(replace(job, request=b""))
                left_bytes -= len(job.end)
                if len(found) == count or left_bytes <= 0:
                    return found, True
        return found, False

    async def take(self, worker: str, lease_s: float, count: int, closed_s: Mapping[str, float]) -> list[TakenJob]:
        """Takes jobs for a worker, those of workers that have died first. `closed_s`: tenants whose jobs wait for so
        many seconds, behind those of others.
        """
        closed = [part for tenant, seconds in closed_s.items() for part in (tenant, round(seconds * 1000))]
        found = await self._run("TAKE", worker, round(lease_s * 1000), count, *closed)
        return [
            TakenJob(
                Job.of(id.decode(), dict(zip(fields[::2], fields[1::2], strict=True))), entry.decode(), left / 1000
            )
            for id, entry, _, left, fields in found
        ]

    async def renew(self, worker: str, taken: Sequence[tuple[TakenJob, int]]) -> list[bool]:
        """Begins the leases of jobs anew, with the number of their completed inputs. Whether each is the worker's."""
        arguments = [part for one, completed in taken for part in (one.job.id, one.job.priority, one.entry, completed)]
        return [bool(is_mine) for is_mine in await self._run("RENEW", worker, *arguments)]

    async def give_back(self, worker: str, taken: TakenJob) -> None:
        """Lets another worker take a job now, as if this one had not had it."""
        await self._run("GIVE_BACK", worker, taken.job.id, taken.job.priority, taken.entry)

    async def end(self, id: str, state: EndState, end: bytes) -> bool:
        """Ends a job. Returns whether this is how it ended: it may have ended before, and the first end stays."""
        return bool(await self._run("END", id, state, end))

    async def sweep(self, count: int, end: bytes) -> int:
        """Ends up to so many jobs whose time to live is over. Returns how many."""
        return int(await self._run("SWEEP", count, end))

    async def delete(self, id: str) -> bool:
        """Deletes a job that has ended. Returns whether there was one."""
        return bool(await self._run("DELETE", id))

    async def dead(self) -> list[Job]:
        """The jobs that were set aside."""
        await self.check()
        found: list[Job] = []
        for id in await self._ask(self._client.zrange(f"{self._prefix}:dead", 0, -1)):
            if job := await self.get(id.decode()):
                found.append(job)
            else:
                await self._ask(self._client.zrem(f"{self._prefix}:dead", id))
        return found

    async def retry(self, id: str) -> bool:
        """Lets a job that was set aside wait again. Returns whether there was one."""
        return bool(await self._run("RETRY", id))

    async def take_notifications(self, count: int, hold_s: float) -> list[Job]:
        """Ended jobs whose receivers must be told now. Nobody else gets them in the next `hold_s` seconds."""
        found = await self._run("TAKE_NOTIFICATIONS", count, round(hold_s * 1000))
        return [Job.of(id.decode(), dict(zip(fields[::2], fields[1::2], strict=True))) for id, fields in found]

    async def postpone_notification(self, id: str, delay_s: float) -> None:
        """Tries again later."""
        await self._run("POSTPONE_NOTIFICATION", id, round(delay_s * 1000))

    async def end_notification(self, id: str) -> None:
        """The receiver was told, or never will be."""
        await self._ask(self._client.zrem(f"{self._prefix}:notify", id))

    async def count(self) -> tuple[dict[str, Counts], int, int]:
        """The counts of each priority; how many jobs were set aside; how many notifications wait."""
        *counts, dead, notifications = await self._run("COUNT")
        by_priority = {
            priority: Counts(waiting, running, age_ms / 1000)
            for priority, (waiting, running, age_ms) in zip(_STREAMS, counts, strict=True)
        }
        return by_priority, dead, notifications

    @asynccontextmanager
    async def listening(self, channel: Literal["queued", "ended"]) -> AsyncIterator[AsyncIterator[str]]:
        """The ids that are published on a channel, from now on. Raises Unavailable where Redis is lost."""
        async with self._client.pubsub(ignore_subscribe_messages=True) as pubsub:
            await self._ask(pubsub.subscribe(f"{self._prefix}:{channel}"))

            async def messages() -> AsyncIterator[str]:
                while True:
                    message = await self._told(pubsub.get_message(timeout=_TIMEOUT_S / 2))
                    if message:
                        yield message["data"].decode()

            yield messages()

    async def close(self) -> None:
        """Closes the connections."""
        for client in (self._client, *self._sentinels):
            await client.aclose()

    async def _make_group(self, stream: str) -> None:
        try:
            await self._client.xgroup_create(stream, "workers", "0", mkstream=True)
        except ResponseError as error:
            if not str(error).startswith("BUSYGROUP"):  # it is there
                raise

    async def _run(self, script: str, *arguments: str | bytes | float) -> Any:
        await self.check()
        return await self._ask(self._scripts[script](keys=[], args=[self._prefix, *arguments]))

    async def _ask(self, reply: Any) -> Any:
        if self._asked >= _CONNECTIONS + _MAX_WAITING:
            reply.close()
            raise Overloaded(f"{_MAX_WAITING} commands wait for the Redis of jobs, the limit", _PAUSE_S)
        self._asked += 1
        try:
            async with self._places:
                return await self._told(reply)
        finally:
            self._asked -= 1

    async def _told(self, reply: "Awaitable[ReplyT] | Any") -> Any:
        try:
            return await reply
        except OutOfMemoryError as error:
            raise Overloaded("the Redis of jobs is full", _FULL_RETRY_S) from error
        except ResponseError as error:
            if str(error).startswith("NOGROUP"):  # it has lost its data, and the streams are to be made anew
                self._is_checked = False
            raise _known(error) from error
        except (TimeoutError, RedisError, OSError) as error:
            raise Unavailable(f"the Redis of jobs does not answer ({type(error).__name__})") from error


def _known(error: ResponseError) -> NeuronpipeError | ResponseError:
    words = str(error)
    if "OOM" in words:
        return Overloaded("the Redis of jobs is full", _FULL_RETRY_S)
    if words.startswith(("LOADING", "READONLY", "MASTERDOWN", "MISCONF", "NOGROUP", "UNBLOCKED")):
        return Unavailable(f"the Redis of jobs does not take jobs now ({words.partition(' ')[0]})")
    return error


def worker_name() -> str:
    """A name that no other worker has."""
    return f"{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}"
