"""bulk/jobs/store.py with a Redis: jobs that are put off, and what a tenant's jobs take."""

import asyncio
import signal

import pytest

from neuronpipe.bulk.jobs import store as store_module
from neuronpipe.bulk.jobs.job import NewJob, cancelled, end_of, new_id
from neuronpipe.bulk.jobs.settings import JobSettings
from neuronpipe.bulk.jobs.store import JobStore
from neuronpipe.core.errors import NotConfigured, Overloaded, Unavailable
from tests.redis_server import RedisServer, proxy

_LEASE_S = 30.0
_END = end_of(cancelled())


async def _submit(store: JobStore, tenant: str, max_bytes: int = 0) -> str:
    fields: dict[str, str | int] = {"request_id": "", "notify": "", "limit": 900, "trace": "", "inputs": 1}
    id = new_id()
    new = NewJob(id, id, "digest", tenant, "normal", b"x" * 1000, ttl_s=100, retention_s=1, fields=fields)
    return (await store.submit(new, 1000, 0, max_bytes))[0]


async def _waiting(store: JobStore) -> int:
    counts, _, _ = await store.count()
    return counts["normal"].waiting


async def test_jobs_of_a_refused_tenant_wait_behind_those_of_others(store: JobStore) -> None:
    small = [await _submit(store, "small") for _ in range(20)]
    victim = await _submit(store, "victim")
    taken = await store.take("w", _LEASE_S, 8, {"small": 0.3})
    assert [one.job.id for one in taken] == [victim]
    assert await _waiting(store) == 20
    await store.end(small[0], "cancelled", _END)
    assert await _waiting(store) == 19
    assert await store.take("w", _LEASE_S, 8, {}) == []
    await asyncio.sleep(0.4)
    taken = await store.take("w", _LEASE_S, 8, {})
    assert len({one.job.id for one in taken} & set(small[1:])) == 8
    assert {one.job.attempts for one in taken} == {1}
    assert await _waiting(store) == 11


async def test_a_damaged_job_is_left_and_those_taken_with_it_are_run(store: JobStore, redis: RedisServer) -> None:
    first, damaged, last = [await _submit(store, "small") for _ in range(3)]
    redis.ask("HSET", f"neuronpipe-jobs:job:{damaged}", "inputs", "many")
    assert [one.job.id for one in await store.take("w", _LEASE_S, 8, {})] == [first, last]


async def test_a_redis_that_hangs_leaves_room_for_calls_of_other_kinds(redis: RedisServer) -> None:
    store = JobStore(JobSettings(jobs_redis_url=redis.url))
    await store.check()
    redis.ask("CLIENT", "PAUSE", "500")
    asking = [asyncio.create_task(store.get("none")) for _ in range(1100)]
    done, waiting = await asyncio.wait(asking, timeout=0.2)
    assert [len(waiting), len(done)] == [1024 + 32, 1100 - 1024 - 32]
    assert all("the Redis of jobs, the limit" in str(one.exception()) for one in done)
    assert set(await asyncio.gather(*waiting)) == {None}
    await store.close()


async def test_a_start_does_not_wait_for_a_redis_that_hangs(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_REACH_LIMIT_S", 0.05)
    store = JobStore(JobSettings(jobs_redis_url=redis.url))
    redis.send(signal.SIGSTOP)
    try:
        await asyncio.wait_for(store.check_if_reached(), 2)
    finally:
        redis.send(signal.SIGCONT)
    await store.close()


async def test_what_a_tenants_jobs_take_is_known_until_redis_forgets_them(store: JobStore, redis: RedisServer) -> None:
    def size() -> int:
        return int(redis.ask("GET", "neuronpipe-jobs:bytes:a"))

    ids = [await _submit(store, "a") for _ in range(4)]
    one = size() // 4
    assert 1500 < one < 2500
    for id in ids[:3]:
        await store.end(id, "succeeded", b"r" + b"y" * 5000)
    assert size() == pytest.approx(3 * 5700 + one, abs=1000)
    await store.delete(ids[0])
    assert size() == pytest.approx(2 * 5700 + one, abs=700)
    with pytest.raises(Overloaded, match="the jobs of tenant 'a' and their results have 10000 bytes, the limit"):
        await _submit(store, "a", max_bytes=10_000)
    await asyncio.sleep(1.1)
    await _submit(store, "a", max_bytes=10_000)
    assert size() == pytest.approx(2 * one, abs=10)
    assert redis.ask("ZCARD", "neuronpipe-jobs:jobs:a") == 2


async def test_what_is_kept_of_a_tenant_goes_with_its_last_job(store: JobStore, redis: RedisServer) -> None:
    await store.end(await _submit(store, "a"), "cancelled", _END)
    times = {name: int(redis.ask("TTL", f"neuronpipe-jobs:{name}:a")) for name in ("jobs", "bytes", "kept")}
    assert len(set(times.values())) == 1
    assert 3600 < times["kept"] <= 3701


async def test_a_job_that_runs_again_counts_once(store: JobStore, redis: RedisServer) -> None:
    id = await _submit(store, "a")
    await store.take("w", _LEASE_S, 1, {})
    await store.end(id, "dead", _END)
    assert await store.retry(id)
    assert redis.ask("ZCARD", "neuronpipe-jobs:kept:a") == 0
    await store.take("w", _LEASE_S, 1, {})
    await store.end(id, "succeeded", b"r")
    await store.delete(id)
    assert int(redis.ask("GET", "neuronpipe-jobs:bytes:a")) == 0


@pytest.mark.parametrize(
    ("says", "told"),
    [
        (b"-READONLY You can't write against a read only replica.", r"refuses a command \(READONLY\)"),
        (b"-NOREPLICAS Not enough good replicas to write.", r"refuses a command \(NOREPLICAS\)"),
        (b"-WRONGTYPE Operation against a key holding the wrong kind of value", r"refuses a command \(WRONGTYPE\)"),
        (b"-NOPERM User default has no permissions to run the command", r"refuses a command \(NOPERM\)"),
        (b"-NOSCRIPT No matching script.", r"refuses a command \(NOSCRIPT\)"),
        (b"-ERR unknown command", r"refuses a command \(ERR\)"),
        (b"-LOADING Redis is loading the dataset in memory", r"does not answer \(BusyLoadingError\)"),
        (b"+OK", "does not answer"),
        (b":7", "does not answer"),
        (b"*1\r\n*1\r\n:1", "does not answer"),
        (b"HTTP/1.1 400 Bad Request", "does not answer"),
    ],
    ids=lambda value: value.split()[0].decode() if isinstance(value, bytes) else "",
)
async def test_an_answer_that_redis_gives_for_no_job_is_unavailable(redis: RedisServer, says: bytes, told: str) -> None:
    async with proxy(redis.port) as between:
        store = JobStore(JobSettings(jobs_redis_url=between.url))
        await _submit(store, "a")
        between.says = says + b"\r\n"
        for asked in (_submit(store, "a"), store.take("w", _LEASE_S, 1, {}), store.count(), store.get(new_id())):
            with pytest.raises(Unavailable, match=f"the Redis of jobs {told}"):
                await asked
        if says.startswith(b"-"):
            with pytest.raises(Unavailable):
                async with store.listening("queued") as queued:
                    await anext(queued)
        between.says = b""
        await _submit(store, "a")
        await store.close()


async def test_a_redis_that_would_lose_jobs_is_told_to_callers_and_used_again_once_it_does_not(
    redis: RedisServer,
) -> None:
    store = JobStore(JobSettings(jobs_redis_url=redis.url))
    redis.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(NotConfigured, match="this Redis would lose jobs: maxmemory-policy is 'allkeys-lru'"):
        await _submit(store, "a")
    redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    await _submit(store, "a")
    await store.close()
