"""Jobs in Redis, by redis-py. The scripts in lua/ define the operations."""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis.exceptions import ConnectionError as ConnectionLost
from redis.exceptions import OutOfMemoryError, RedisClusterException, RedisError, ResponseError

from neuronpipe.bulk.jobs.job import (
    DAMAGED_EVENT,
    Counts,
    EndState,
    ListPlace,
    NewJob,
    StoredJob,
    TakenJob,
    damage,
    end_of,
    stored_name,
)
from neuronpipe.bulk.jobs.settings import JobStoreSettings
from neuronpipe.core.errors import NeuronpipeError, NotConfigured, Overloaded, SetupError, Unavailable
from neuronpipe.core.logs import SeldomWarnings, log_warning
from neuronpipe.platform.cache.remote import ask_apart, open_client

ReadT = TypeVar("ReadT")

# An argument of a script. Lists and objects become JSON.
_Argument: TypeAlias = str | bytes | int | Collection[str] | Mapping[str, str] | Sequence[Mapping[str, object]]

_LUA = Path(__file__).parent / "lua"
_PRIORITIES = ("high", "normal", "low")
_MIN_VERSION = 7
_TIMEOUT_S = 5.0
# The longest time for which a starting gateway waits.
_REACH_LIMIT_S = 3.0
# Maximum number of commands at once. Further commands wait for each other instead of for connections.
_CONNECTIONS = 32
# Maximum number of commands that wait for a place. While Redis hangs, more would leave no room in the process for other
# calls.
_MAX_WAITING = 1024
# Maximum number of bytes of results in one list of jobs; the last result may exceed it.
_MAX_LISTED_BYTES = 2 << 20
_FULL_RETRY_S = 30.0
_PAUSE_S = 1.0
# The prefix of all keys. Gateways and workers of a deployment have the same.
_PREFIX = "neuronpipe-jobs"
# Maximum number of characters of Redis's own messages in the log.
_MAX_PROBLEM = 300
# The fields of a job, except its id and its request, by their names in its hash.
_KEPT_FIELDS = [stored_name(kept.name) for kept in fields_of(StoredJob) if kept.name not in ("id", "request")]


class JobStore:
    """Jobs in Redis. Raises Unavailable while Redis does not answer, Overloaded while it is full, and NotConfigured
    while Redis is configured so that it would lose jobs.
    """

    def __init__(self, settings: JobStoreSettings) -> None:
        """Raises SetupError if the URL is invalid."""
        options = {
            "socket_timeout": _TIMEOUT_S,
            "socket_connect_timeout": _TIMEOUT_S,
            # Every script may be run twice. A restart of Redis leaves stale connections in the pool. After a time-out
            # no command is repeated: its caller has waited.
            "retry": Retry(ExponentialBackoff(cap=0.5, base=0.05), 3, supported_errors=(ConnectionLost,)),
        }
        try:
            client, self._sentinels = open_client(settings.jobs_redis_url, options)
        except (ValueError, TypeError, RedisError, RedisClusterException) as error:
            raise SetupError("--jobs-redis-url: not a Redis URL (see docs/jobs.md)") from error
        if isinstance(client, RedisCluster):
            raise SetupError("--jobs-redis-url: a cluster cannot hold jobs, whose keys must be on one server")
        self._client: Redis = client
        self._prefix = _PREFIX
        self._is_checked = False
        self._warnings = SeldomWarnings()
        self._places = asyncio.Semaphore(_CONNECTIONS)
        self._asked = 0
        self._asking: set[asyncio.Future[Any]] = set()
        common = (_LUA / "common.lua").read_text(encoding="utf-8")
        self._scripts = {
            file.stem: client.register_script(file.read_text(encoding="utf-8").replace("\n", f"\n{common}", 1))
            for file in _LUA.glob("*.lua")
            if file.stem != "common"
        }

    async def check(self) -> None:
        """Raises SetupError, until the first success, for a Redis that would lose jobs."""
        if self._is_checked:
            return
        faults = await self._ask(self._client.info("everything"), _faults)
        if faults:
            raise SetupError(f"--jobs-redis-url: this Redis would lose jobs: {'; '.join(faults)} (see docs/jobs.md)")
        self._is_checked = True

    async def wait_until_usable(self) -> None:
        """Returns when Redis answers. Raises SetupError if Redis would lose jobs."""
        while True:
            try:
                return await self.check()
            except NeuronpipeError as error:
                log_warning("the Redis of jobs is not usable yet", problem=error.message)
                await asyncio.sleep(_PAUSE_S)

    async def check_if_reached(self) -> None:
        """Raises SetupError if Redis would lose jobs. If Redis does not answer now, it is checked later."""
        try:
            async with asyncio.timeout(_REACH_LIMIT_S):
                await self.check()
        except (NeuronpipeError, TimeoutError) as error:
            log_warning("the Redis of jobs is not usable yet", problem=str(error) or "no answer in time")

    async def is_over(self, job: StoredJob) -> bool:
        """Returns whether the time to live of a job is over, by Redis's clock."""
        now = self._client.time()
        return await self._ask(now, lambda time: bool(time[0] * 1000 + time[1] // 1000 >= job.expires_ms))

    async def submit(self, new: NewJob, max_open: int, max_of_tenant: int, max_bytes: int) -> tuple[str, str]:
        """Stores a job. Returns its id and digest, or the id and digest of the job that has its key already.

        `max_of_tenant`, `max_bytes`: limits of the tenant's open jobs, and of the memory of all its kept jobs; 0 for no
        limit. Raises Overloaded.
        """
        id, digest = await self._run(
            "submit",
            _texts,
            id=new.id,
            key=new.key,
            digest=new.digest,
            priority=new.priority,
            tenant=new.tenant,
            request=new.request,
            ttl_ms=new.ttl_s * 1000,
            retention_s=new.retention_s,
            max_open=max_open,
            max_of_tenant=max_of_tenant,
            max_bytes=max_bytes,
            fields={name: str(value) for name, value in new.fields.items()},
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

    async def get(self, id: str) -> StoredJob | None:
        """Returns a job without its request, a damaged job as failed; None if it does not exist."""
        await self._check_again()
        stored = self._client.hmget(f"{self._prefix}:job:{id}", _KEPT_FIELDS)
        return await self._ask(stored, lambda values: self._kept_job(id, values) if any(values) else None)

    async def jobs_of(
        self, tenant: str, before: ListPlace | None, count: int
    ) -> tuple[list[StoredJob], ListPlace | None]:
        """Lists a tenant's jobs, the newest first. Large results make a list shorter than `count`.

        `before`: the place of the last job of the previous list, which may be gone; None for the first list. Returns
        also the place of the last job; None if there are no more jobs.
        """
        await self._check_again()
        list_key, newest = f"{self._prefix}:jobs:{tenant}", before.created_ms if before else "+inf"
        jobs: list[StoredJob] = []
        skip, left_bytes = 0, _MAX_LISTED_BYTES

        def read(reply: Any) -> list[ListPlace]:
            return [ListPlace(int(created_ms), id.decode()) for id, created_ms in reply]

        while places := await self._ask(
            self._client.zrevrangebyscore(list_key, newest, "-inf", skip, count, withscores=True), read
        ):
            for place in places:
                if before and place >= before:
                    skip += 1
                    continue
                job = await self.get(place.id)
                if job is None:
                    await self._ask(self._client.zrem(list_key, place.id))
                    continue
                skip += 1
                jobs.append(job if job.tenant == tenant else StoredJob.damaged(place.id, tenant))
                left_bytes -= len(job.end)
                if len(jobs) == count or left_bytes <= 0:
                    return jobs, place
        return jobs, None

    async def take_jobs(
        self, worker: str, lease_s: float, count: int, closed: Collection[str], has: Collection[str] | None = None
    ) -> list[TakenJob]:
        """Takes the oldest jobs for a worker, also jobs of workers that have died.

        `closed`: tenants whose jobs wait, because this worker may run no more of them. `has`: the ids of the worker's
        jobs. It also gets its other jobs again, which were in an answer that was lost. None: unknown, and the worker
        gets none of its own jobs.
        """
        taken, damaged_ids = list[TakenJob](), list[str]()

        def read(reply: Any) -> bool:
            is_more, entries = reply
            for id, left_ms, fields in entries:
                try:
                    job = StoredJob.of(id.decode(), dict(zip(fields[::2], fields[1::2], strict=True)))
                    taken.append(TakenJob(job, left_ms / 1000))
                except ValueError:  # the jobs that were taken with it run all the same
                    damaged_ids.append(id.decode(errors="replace"))
            return bool(is_more)

        is_more = True
        while is_more:
            known = {} if has is None else {"has": [*has, *(held.job.id for held in taken), *damaged_ids]}
            lease_ms, places = round(lease_s * 1000), count - len(taken)
            is_more = await self._run(
                "take", read, worker=worker, lease_ms=lease_ms, max_jobs=places, closed=[*closed], **known
            )
        for id in damaged_ids:
            log_warning("a job in Redis is damaged; it has failed", job=id)
            with suppress(NeuronpipeError):  # the job ends with its time to live
                await self.end_job(id, "failed", end_of(damage()))
        return taken

    async def renew_leases(self, worker: str, taken: Sequence[tuple[TakenJob, int]]) -> list[bool]:
        """Renews the leases of jobs, and stores how many inputs of each are completed. Returns for each job whether the
        worker still has it.
        """
        jobs = [{"id": held.job.id, "priority": held.job.priority, "completed": completed} for held, completed in taken]

        def read(renewals: Any) -> list[bool]:
            return [bool(is_mine) for _, is_mine in zip(taken, renewals, strict=True)]

        return await self._run("renew", read, worker=worker, jobs=jobs)

    async def give_back(self, worker: str, taken: TakenJob) -> None:
        """Lets another worker take a job now, as if this worker had not had it."""
        await self._run("give_back", worker=worker, id=taken.job.id, priority=taken.job.priority)

    async def end_job(self, id: str, state: EndState, end: bytes) -> EndState | None:
        """Ends a job, and returns its state; None if the job had ended before, because the first end stays. If the
        tenant has no room for the result, the job fails.
        """
        ended = await self._run("end", int, id=id, state=state, result=end)
        if ended < 0:
            problem = (
                f"the result has {len(end)} bytes: with it, the tenant's jobs and their results have more than "
                f"{-ended} bytes, the limit (the gateway's jobs_max_tenant_bytes); delete those that are no longer "
                "needed, or give an output_uri, and submit it again"
            )
            return await self.end_job(id, "failed", end_of(Overloaded(problem, _FULL_RETRY_S)))
        return state if ended else None

    async def end_expired(self, count: int, end: bytes) -> int:
        """Ends up to `count` jobs whose time to live is over, and returns their number."""
        return await self._run("sweep", int, max_jobs=count, result=end)

    async def delete(self, id: str) -> bool:
        """Deletes a job that has ended. Returns whether it existed."""
        return await self._run("delete", bool, id=id)

    async def dead_jobs(self) -> list[StoredJob]:
        """Returns the jobs that were set aside."""
        await self._check_again()
        jobs: list[StoredJob] = []
        for id in await self._ask(self._client.zrange(f"{self._prefix}:dead", 0, -1), _texts):
            if job := await self.get(id):
                jobs.append(job)
            else:
                await self._ask(self._client.zrem(f"{self._prefix}:dead", id))
        return jobs

    async def retry(self, id: str) -> bool:
        """Lets a job that was set aside wait again. Returns whether it existed."""
        return await self._run("retry", bool, id=id)

    async def take_notifications(self, count: int, hold_s: float) -> list[StoredJob]:
        """Takes ended jobs whose receivers must be notified now, without their results.

        No other call returns these jobs in the next `hold_s` seconds.
        """
        names = [name for name in _KEPT_FIELDS if name != "end"]

        def read(reply: Any) -> list[StoredJob]:
            return [self._kept_job(id.decode(), values, names) for id, values in reply]

        return await self._run("take_notifications", read, max_jobs=count, hold_ms=round(hold_s * 1000), names=names)

    async def postpone_notification(self, id: str, delay_s: float, *, is_attempt: bool = True) -> None:
        """Postpones a notification. `is_attempt`: whether it was tried now, which counts as an attempt."""
        await self._run("postpone_notification", id=id, delay_ms=round(delay_s * 1000), uncounted=int(not is_attempt))

    async def end_notification(self, id: str) -> None:
        """Removes a notification that was delivered, or never will be."""
        await self._ask(self._client.zrem(f"{self._prefix}:notify", id))

    async def count(self) -> tuple[dict[str, Counts], int, int]:
        """Returns the counts of each priority, the number of jobs that were set aside, and the number of waiting
        notifications.
        """

        def read(reply: Any) -> tuple[dict[str, Counts], int, int]:
            *counts, dead, notifications = reply
            by_priority = {
                priority: Counts(waiting, running, age_ms / 1000)
                for priority, (waiting, running, age_ms) in zip(_PRIORITIES, counts, strict=True)
            }
            return by_priority, int(dead), int(notifications)

        return await self._run("count", read)

    @asynccontextmanager
    async def listening(self, channel: Literal["queued", "ended"]) -> AsyncIterator[AsyncIterator[str]]:
        """Yields the ids that are published on a channel, from now on. Raises Unavailable if Redis is lost."""
        async with self._client.pubsub(ignore_subscribe_messages=True) as pubsub:
            await self._ask(pubsub.subscribe(f"{self._prefix}:{channel}"))

            async def messages() -> AsyncIterator[str]:
                while True:
                    reply = pubsub.get_message(timeout=_TIMEOUT_S / 2)
                    if id := await self._read_reply(reply, lambda message: message["data"].decode() if message else ""):
                        yield id

            yield messages()

    async def listen(self, channel: Literal["queued", "ended"], heard: Callable[[str], object]) -> None:
        """Calls `heard` with each id that is published on a channel while Redis is there, until it is cancelled."""
        while True:
            with suppress(NeuronpipeError):
                async with self.listening(channel) as ids:
                    async for id in ids:
                        heard(id)
            await asyncio.sleep(_PAUSE_S)

    async def close(self) -> None:
        await asyncio.gather(*self._asking, return_exceptions=True)
        for client in (self._client, *self._sentinels):
            await client.aclose()

    def _kept_job(self, id: str, values: Sequence[bytes | None], names: Sequence[str] = _KEPT_FIELDS) -> StoredJob:
        fields = {name.encode(): value for name, value in zip(names, values, strict=True) if value is not None}
        try:
            return StoredJob.of(id, fields)
        except ValueError:
            self._warnings.log(DAMAGED_EVENT, job=id)
            return StoredJob.damaged(id, fields.get(b"tenant", b"").decode(errors="replace"))

    async def _check_again(self) -> None:
        """Calls `check`. Raises NotConfigured: while the process runs, another Redis may replace it, and the old one
        may return.
        """
        try:
            await self.check()
        except SetupError as error:
            raise NotConfigured(str(error)) from error

    async def _run(
        self, operation: str, read: Callable[[Any], ReadT] = lambda reply: reply, /, **arguments: _Argument
    ) -> ReadT:
        """Runs the script of an operation. The script's file describes its arguments and its reply."""
        await self._check_again()
        named: list[str | bytes | int] = ["prefix", self._prefix]
        for name, value in arguments.items():
            named += name, value if isinstance(value, str | bytes | int) else json.dumps(value)
        return await self._ask(self._scripts[operation](keys=[], args=named), read)

    async def _ask(self, reply: Any, read: Callable[[Any], ReadT] = lambda reply: reply) -> ReadT:
        if self._asked >= _CONNECTIONS + _MAX_WAITING:
            reply.close()
            raise Overloaded(f"{_MAX_WAITING} commands wait for the Redis of jobs, the limit", _PAUSE_S)
        self._asked += 1
        try:
            async with self._places:
                return await self._read_reply(reply, read)
        finally:
            self._asked -= 1

    async def _read_reply(self, reply: Any, read: Callable[[Any], ReadT]) -> ReadT:
        """Reads a reply. For a reply that Redis would not give, redis-py and `read` raise various exceptions."""
        asking = ask_apart(reply, self._asking)
        try:
            await asyncio.wait({asking})
            return read(asking.result())
        except ResponseError as error:
            message = str(error)
            first = message.partition(" ")[0]
            # redis-py removes the code from the messages of errors that it knows; before version 7, the code is then
            # lost.
            code = getattr(error, "status_code", None) or (first if first.isupper() else type(error).__name__)
            if code == "ERR":
                log_warning("the Redis of jobs does not understand a command", problem=message[:_MAX_PROBLEM])
            if isinstance(error, OutOfMemoryError) or "OOM" in message:
                raise Overloaded("the Redis of jobs is full", _FULL_RETRY_S) from error
            raise Unavailable(f"the Redis of jobs refuses a command ({code})") from error
        except Exception as error:
            raise Unavailable(f"the Redis of jobs does not answer ({type(error).__name__})") from error
        finally:
            asking.cancel()


def _faults(information: Mapping[str, Any]) -> list[str]:
    """Returns the reasons why a Redis would lose jobs, by its own information."""
    problems = [
        f"{name} is {information.get(key)!r}, must be {must!r}"
        for name, key, must, value in (
            ("maxmemory-policy", "maxmemory_policy", "noeviction", "noeviction"),
            ("appendonly", "aof_enabled", "yes (1)", 1),
        )
        if information.get(key) != value
    ]
    if int(str(information.get("redis_version", "0")).partition(".")[0]) < _MIN_VERSION:
        problems.append(f"its version is {information.get('redis_version')}, must be at least {_MIN_VERSION}")
    return problems


def _texts(reply: Any) -> list[str]:
    return [text.decode() for text in reply]


def worker_name() -> str:
    return f"{os.uname().nodename}-{os.getpid()}-{os.urandom(4).hex()}"
