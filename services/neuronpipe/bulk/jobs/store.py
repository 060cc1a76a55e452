"""Jobs in Redis, by redis-py. The scripts say what happens there (bulk/jobs/scripts.py)."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Literal, TypeVar

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import OutOfMemoryError, RedisClusterException, RedisError, ResponseError

from neuronpipe.bulk.jobs import scripts
from neuronpipe.bulk.jobs.job import Counts, EndState, Job, NewJob, TakenJob
from neuronpipe.bulk.jobs.settings import JobStoreSettings
from neuronpipe.core.errors import NeuronpipeError, NotConfigured, Overloaded, SetupError, Unavailable
from neuronpipe.core.logs import log_warning
from neuronpipe.platform.cache.remote import open_client

ReadT = TypeVar("ReadT")

_STREAMS = ("high", "normal", "low")
_MIN_VERSION = 7
_TIMEOUT_S = 5.0
# A gateway that starts waits no longer.
_REACH_LIMIT_S = 3.0
# Commands at once, which wait for each other instead of for connections.
_CONNECTIONS = 32
# Those that wait for a place. While Redis hangs, more of them would leave no room in the process for other calls.
_MAX_WAITING = 1024
# Results in one list of jobs; the last one may exceed it.
_MAX_LISTED_BYTES = 2 << 20
_FULL_RETRY_S = 30.0
_PAUSE_S = 1.0
# Of Redis's own words, in the log.
_MAX_PROBLEM = 300


class JobStore:
    """Jobs in Redis. Raises Unavailable while Redis does not answer, Overloaded while it is full, and NotConfigured
    while it is one that would lose jobs.
    """

    def __init__(self, settings: JobStoreSettings) -> None:
        """Raises SetupError for an invalid URL."""
        options = {
            "socket_timeout": _TIMEOUT_S,
            "socket_connect_timeout": _TIMEOUT_S,
            # Every script may be run twice. A restart of Redis leaves stale connections in the pool. One that hangs is
            # not asked again: its caller has waited.
            "retry": Retry(ExponentialBackoff(cap=0.5, base=0.05), 3, supported_errors=(ConnectionLost,)),
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
        wrong = await self._ask(self._client.info("everything"), _faults)
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
            async with asyncio.timeout(_REACH_LIMIT_S):
                await self.check()
        except (NeuronpipeError, TimeoutError) as error:
            log_warning("the Redis of jobs is not usable yet", problem=str(error) or "no answer in time")

    async def is_over(self, job: Job) -> bool:
        """Whether the time to live of a job is over, by Redis's clock."""
        now = self._client.time()
        return await self._ask(now, lambda time: bool(time[0] * 1000 + time[1] // 1000 >= job.expires_ms))

    async def submit(self, new: NewJob, max_open: int, max_of_tenant: int, max_bytes: int) -> tuple[str, str]:
        """Stores a job. Returns its id and digest, or those of the job that has its key already. Raises Overloaded.
        `max_of_tenant`, `max_bytes`: its open jobs, and memory of all that are kept; 0 for no limit.
        """
        fields = [str(part) for name_and_value in new.fields.items() for part in name_and_value]
        content = (new.id, new.key, new.digest, new.priority, new.tenant, new.request)
        limits = (new.ttl_s * 1000, new.retention_s, max_open, max_of_tenant, max_bytes)
        id, digest = await self._run(
            "SUBMIT", *content, *limits, *fields, read=lambda reply: (reply[0].decode(), reply[1].decode())
        )
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
        await self._check_again()
        stored = self._client.hgetall(f"{self._prefix}:job:{id}")
        return await self._ask(stored, lambda fields: Job.of(id, fields) if fields else None)

    async def jobs_of(self, tenant: str, before: str, count: int) -> tuple[Sequence[Job], bool]:
        """A tenant's jobs, the newest first, without their requests, and whether there may be more: fewer than `count`
        are listed where their results are large. `before`: the id of the last one that was listed; empty for the first.
        """
        await self._check_again()
        listed, skip = f"{self._prefix}:jobs:{tenant}", 0
        found: list[Job] = []
        left_bytes = _MAX_LISTED_BYTES
        if before:
            skip = await self._ask(
                self._client.zrevrank(listed, before), lambda place: 0 if place is None else int(place) + 1
            )
        while ids := await self._ask(self._client.zrevrange(listed, skip, skip + count - 1), _texts):
            for id in ids:
                job = await self.get(id)
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

        def read(found: Any) -> list[TakenJob]:
            taken = list[TakenJob]()
            for id, entry, _, left, fields in found:
                try:
                    taken.append(TakenJob(_job(id, fields), entry.decode(), left / 1000))
                except ValueError:  # those that were taken with it are run all the same
                    log_warning("a job in Redis is damaged; it ends with its time to live", job=repr(id))
            return taken

        return await self._run("TAKE", worker, round(lease_s * 1000), count, *closed, read=read)

    async def renew(self, worker: str, taken: Sequence[tuple[TakenJob, int]]) -> list[bool]:
        """Begins the leases of jobs anew, with the number of their completed inputs. Whether each is the worker's."""
        arguments = [part for one, completed in taken for part in (one.job.id, one.job.priority, one.entry, completed)]

        def read(kept: Any) -> list[bool]:
            return [bool(is_mine) for _, is_mine in zip(taken, kept, strict=True)]

        return await self._run("RENEW", worker, *arguments, read=read)

    async def give_back(self, worker: str, taken: TakenJob) -> None:
        """Lets another worker take a job now, as if this one had not had it."""
        await self._run("GIVE_BACK", worker, taken.job.id, taken.job.priority, taken.entry)

    async def end(self, id: str, state: EndState, end: bytes) -> bool:
        """Ends a job. Returns whether this is how it ended: it may have ended before, and the first end stays."""
        return await self._run("END", id, state, end, read=bool)

    async def sweep(self, count: int, end: bytes) -> int:
        """Ends up to so many jobs whose time to live is over. Returns how many."""
        return await self._run("SWEEP", count, end, read=int)

    async def delete(self, id: str) -> bool:
        """Deletes a job that has ended. Returns whether there was one."""
        return await self._run("DELETE", id, read=bool)

    async def dead(self) -> list[Job]:
        """The jobs that were set aside."""
        await self._check_again()
        found: list[Job] = []
        for id in await self._ask(self._client.zrange(f"{self._prefix}:dead", 0, -1), _texts):
            if job := await self.get(id):
                found.append(job)
            else:
                await self._ask(self._client.zrem(f"{self._prefix}:dead", id))
        return found

    async def retry(self, id: str) -> bool:
        """Lets a job that was set aside wait again. Returns whether there was one."""
        return await self._run("RETRY", id, read=bool)

    async def take_notifications(self, count: int, hold_s: float) -> list[Job]:
        """Ended jobs whose receivers must be told now. Nobody else gets them in the next `hold_s` seconds."""
        hold_ms = round(hold_s * 1000)
        return await self._run("TAKE_NOTIFICATIONS", count, hold_ms, read=lambda found: [_job(*one) for one in found])

    async def postpone_notification(self, id: str, delay_s: float) -> None:
        """Tries again later."""
        await self._run("POSTPONE_NOTIFICATION", id, round(delay_s * 1000))

    async def end_notification(self, id: str) -> None:
        """The receiver was told, or never will be."""
        await self._ask(self._client.zrem(f"{self._prefix}:notify", id))

    async def count(self) -> tuple[dict[str, Counts], int, int]:
        """The counts of each priority; how many jobs were set aside; how many notifications wait."""

        def read(reply: Any) -> tuple[dict[str, Counts], int, int]:
            *counts, dead, notifications = reply
            by_priority = {
                priority: Counts(waiting, running, age_ms / 1000)
                for priority, (waiting, running, age_ms) in zip(_STREAMS, counts, strict=True)
            }
            return by_priority, int(dead), int(notifications)

        return await self._run("COUNT", read=read)

    @asynccontextmanager
    async def listening(self, channel: Literal["queued", "ended"]) -> AsyncIterator[AsyncIterator[str]]:
        """The ids that are published on a channel, from now on. Raises Unavailable where Redis is lost."""
        async with self._client.pubsub(ignore_subscribe_messages=True) as pubsub:
            await self._ask(pubsub.subscribe(f"{self._prefix}:{channel}"))

            async def messages() -> AsyncIterator[str]:
                while True:
                    told = pubsub.get_message(timeout=_TIMEOUT_S / 2)
                    if id := await self._told(told, lambda message: message["data"].decode() if message else ""):
                        yield id

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

    async def _check_again(self) -> None:
        """See `check`. Raises NotConfigured: once the process runs, Redis may be another one, and then the old one."""
        try:
            await self.check()
        except SetupError as error:
            raise NotConfigured(str(error)) from error

    async def _run(
        self, script: str, *arguments: str | bytes | float, read: Callable[[Any], ReadT] = lambda reply: reply
    ) -> ReadT:
        await self._check_again()
        return await self._ask(self._scripts[script](keys=[], args=[self._prefix, *arguments]), read)

    async def _ask(self, reply: Any, read: Callable[[Any], ReadT] = lambda reply: reply) -> ReadT:
        if self._asked >= _CONNECTIONS + _MAX_WAITING:
            reply.close()
            raise Overloaded(f"{_MAX_WAITING} commands wait for the Redis of jobs, the limit", _PAUSE_S)
        self._asked += 1
        try:
            async with self._places:
                return await self._told(reply, read)
        finally:
            self._asked -= 1

    async def _told(self, reply: Any, read: Callable[[Any], ReadT]) -> ReadT:
        """What is read of a reply. One that Redis would not give makes redis-py and `read` raise various exceptions."""
        try:
            return read(await reply)
        except ResponseError as error:
            words = str(error)
            first = words.partition(" ")[0]
            # redis-py takes the code off the words of the errors that it knows; before version 7, it then has none.
            code = getattr(error, "status_code", None) or (first if first.isupper() else type(error).__name__)
            if code == "NOGROUP":  # it has lost its data: the streams must be created again
                self._is_checked = False
            if code == "ERR":
                log_warning("the Redis of jobs does not understand a command", problem=words[:_MAX_PROBLEM])
            if isinstance(error, OutOfMemoryError) or "OOM" in words:
                raise Overloaded("the Redis of jobs is full", _FULL_RETRY_S) from error
            raise Unavailable(f"the Redis of jobs refuses a command ({code})") from error
        except Exception as error:
            raise Unavailable(f"the Redis of jobs does not answer ({type(error).__name__})") from error


def _faults(found: Mapping[str, Any]) -> list[str]:
    """Why a Redis would lose jobs, by what it says of itself."""
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
    return wrong


def _texts(reply: Any) -> list[str]:
    return [one.decode() for one in reply]


def _job(id: bytes, fields: Sequence[bytes]) -> Job:
    return Job.of(id.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))


def worker_name() -> str:
    """A name that no other worker has."""
    return f"{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}"
