"""bulk/jobs/store.py with a Redis: which jobs are taken, by whom, and what a tenant's jobs take."""

import asyncio
import signal
import time
from collections.abc import Sequence
from typing import Any

import pytest

from neuronpipe.api.v1.jobs_pb2 import JobMetadata
from neuronpipe.bulk.jobs import store as store_module
from neuronpipe.bulk.jobs.job import ListPlace, NewJob, TakenJob, cancelled, end_of, new_id
from neuronpipe.bulk.jobs.settings import JobSettings
from neuronpipe.bulk.jobs.store import JobStore
from neuronpipe.core.errors import NotConfigured, Overloaded, Unavailable
from tests.servers.redis import RedisServer, proxy

_LEASE_S = 30.0
_END = end_of(cancelled())


async def _submit(
    store: JobStore,
    tenant: str,
    max_bytes: int = 0,
    *,
    outcomes: int = 0,
    request_bytes: int = 1000,
    retention_s: int = 1,
) -> str:
    fields: dict[str, str | int] = {"request_id": "", "notify": "", "limit": 900, "trace": "", "inputs": 1}
    id = new_id()
    given: Any = {"ttl_s": 100, "retention_s": retention_s, "fields": fields | {"outcomes": outcomes}}
    new = NewJob(id, id, "digest", tenant, "normal", b"x" * request_bytes, **given)
    return (await store.submit(new, 1000, 0, max_bytes))[0]


def _ids(taken: Sequence[TakenJob]) -> list[str]:
    return [held.job.id for held in taken]


async def _take(store: JobStore, worker: str, count: int, *has: str, lease_s: float = _LEASE_S) -> list[TakenJob]:
    """As a worker takes jobs, which says what it has."""
    return await store.take_jobs(worker, lease_s, count, (), has)


def _end_leases(redis: RedisServer, *ids: str) -> None:
    """As if the time of these jobs' leases were over."""
    for id in ids:
        redis.ask("ZADD", "neuronpipe-jobs:running:normal", "XX", 1, id)


async def _waiting(store: JobStore) -> int:
    counts, _, _ = await store.count()
    return counts["normal"].waiting


async def test_jobs_of_a_refused_tenant_wait_behind_those_of_others_and_keep_their_order(store: JobStore) -> None:
    small = [await _submit(store, "small") for _ in range(20)]
    victim = await _submit(store, "victim")
    taken = await store.take_jobs("w", _LEASE_S, 8, {"small"})
    assert [held.job.id for held in taken] == [victim]
    assert await _waiting(store) == 20
    await store.end_job(small[0], "cancelled", _END)
    assert await _waiting(store) == 19
    assert await store.take_jobs("w", _LEASE_S, 8, {"small"}) == []
    small.append(await _submit(store, "small"))
    taken = await store.take_jobs("w", _LEASE_S, 8, ())
    assert _ids(taken) == small[1:9]
    assert {held.job.attempts for held in taken} == {1}
    assert await _waiting(store) == 12


async def test_a_user_of_redis_without_channels_has_jobs_all_the_same(store: JobStore, redis: RedisServer) -> None:
    """Redis 7 gives new users none, unless it is told to."""
    redis.ask("ACL", "SETUSER", "default", "resetchannels")
    try:
        job = await _submit(store, "a")
        (taken,) = await store.take_jobs("w", _LEASE_S, 8, ())
        await store.give_back("w", taken)
        assert _ids(await store.take_jobs("w", _LEASE_S, 8, ())) == [job]
        assert await store.end_job(job, "cancelled", _END) == "cancelled"
    finally:
        redis.ask("ACL", "SETUSER", "default", "allchannels")


async def test_jobs_of_a_refused_tenant_are_not_moved(store: JobStore, redis: RedisServer) -> None:
    for _ in range(50):
        await _submit(store, "big")
    redis.ask("CONFIG", "RESETSTAT")
    for _ in range(3):
        assert await store.take_jobs("w", _LEASE_S, 8, {"big"}) == []
    commands = {name.removeprefix("cmdstat_"): of["calls"] for name, of in redis.ask("INFO", "commandstats").items()}
    assert not commands.keys() & {"zadd", "zrem", "hset", "xadd"}
    assert sum(commands.values()) < 3 * 20


async def test_the_oldest_job_without_a_worker_is_taken_first(store: JobStore, redis: RedisServer) -> None:
    """Of a worker that died, and given back, behind more jobs of living workers than are looked at, and before newer
    ones.
    """
    running = [await _submit(store, "a") for _ in range(30)]
    live = await store.take_jobs("live", _LEASE_S, 30, ())
    dead, given_back = await _submit(store, "a"), await _submit(store, "b")
    assert _ids(await store.take_jobs("dead", _LEASE_S, 1, ())) == [dead]
    (back,) = await store.take_jobs("drains", _LEASE_S, 1, ())
    newer = await _submit(store, "a")
    await store.give_back("drains", back)
    _end_leases(redis, dead)
    taken = [held for _ in range(3) for held in await store.take_jobs("other", _LEASE_S, 1, ())]
    assert _ids(taken) == [dead, given_back, newer]
    assert [held.job.attempts for held in taken] == [2, 1, 1]
    assert await store.renew_leases("live", [(job_id, 0) for job_id in live]) == [True] * 30
    assert _ids(live) == running


async def test_a_worker_does_not_get_what_it_has_whose_lease_has_ended(store: JobStore, redis: RedisServer) -> None:
    id = await _submit(store, "a")
    (taken,) = await _take(store, "w", 1)
    _end_leases(redis, id)
    assert await _take(store, "w", 0, id) == []
    assert await _waiting(store) == 0
    _end_leases(redis, id)
    assert await store.take_jobs("w", _LEASE_S, 1, ()) == []
    assert await store.renew_leases("w", [(taken, 3)]) == [True]
    job = await store.get(id)
    assert job
    assert (job.attempts, job.completed, job.state) == (1, 3, "running")


async def test_a_job_whose_lease_ended_is_its_workers_until_another_has_it(store: JobStore, redis: RedisServer) -> None:
    ids = [await _submit(store, "a"), await _submit(store, "a")]
    taken = await store.take_jobs("slow", _LEASE_S, 2, ())
    _end_leases(redis, *ids)
    assert _ids(await store.take_jobs("other", _LEASE_S, 1, ())) == ids[:1]
    assert await store.renew_leases("slow", [(held, 0) for held in taken]) == [False, True]
    assert await store.take_jobs("other", _LEASE_S, 2, ()) == []
    assert await _waiting(store) == 0


async def test_jobs_in_a_lost_answer_are_given_again_as_the_same_attempt(store: JobStore, redis: RedisServer) -> None:
    ids = [await _submit(store, "a") for _ in range(3)]
    async with proxy(redis.port) as between:
        cut_off = JobStore(JobSettings(jobs_redis_url=between.url))
        assert _ids(await _take(cut_off, "w", 1)) == ids[:1]
        between.is_cutting = True
        with pytest.raises(Unavailable):
            await _take(cut_off, "w", 1, ids[0])
        between.is_cutting = False
        taken = await _take(cut_off, "w", 2, ids[0])
        assert _ids(taken) == ids[1:]
        assert [held.job.attempts for held in taken] == [1, 1]
        assert await _take(store, "w", 2, *ids) == []
        await cut_off.close()


async def test_no_lease_ends_before_its_worker_can_renew_it_as_redis_hangs(store: JobStore, redis: RedisServer) -> None:
    id = await _submit(store, "a")
    (taken,) = await _take(store, "one", 1, lease_s=0.4)
    redis.send(signal.SIGSTOP)
    try:
        asked = asyncio.create_task(_take(store, "two", 1, lease_s=0.4))
        await asyncio.sleep(0.8)
    finally:
        redis.send(signal.SIGCONT)
    assert await asked == []
    assert await store.renew_leases("one", [(taken, 0)]) == [True]
    began_s = time.monotonic()
    while not (found := await _take(store, "two", 1, lease_s=0.4)):  # `one` has died now
        await asyncio.sleep(0.05)
    assert (_ids(found), found[0].job.attempts) == ([id], 2)
    assert 0.2 < time.monotonic() - began_s < 2


async def test_a_longer_lease_of_another_worker_ends_none_as_redis_hangs(store: JobStore, redis: RedisServer) -> None:
    await _submit(store, "a")
    (taken,) = await _take(store, "short", 1, lease_s=1.0)
    assert await _take(store, "long", 1, lease_s=600.0) == []
    redis.send(signal.SIGSTOP)
    await asyncio.sleep(2.0)
    redis.send(signal.SIGCONT)
    assert await _take(store, "long", 1, lease_s=600.0) == []
    assert await store.renew_leases("short", [(taken, 0)]) == [True]


async def test_what_is_read_of_a_job_is_not_its_request(store: JobStore, redis: RedisServer) -> None:
    id = await _submit(store, "a", request_bytes=1 << 20)
    redis.ask("CONFIG", "RESETSTAT")
    assert (await store.get(id)) is not None
    assert len((await store.jobs_of("a", None, 10))[0]) == 1
    await store.end_job(id, "dead", _END)
    assert [job.id for job in await store.dead_jobs()] == [id]
    assert redis.ask("INFO", "stats")["total_net_output_bytes"] < 100_000


async def test_results_reserve_their_room_before_they_are_computed(store: JobStore, redis: RedisServer) -> None:
    limit, result = 200_000, b"r" + bytes(40_000)
    ids = [await _submit(store, "a", limit, outcomes=40) for _ in range(20)]
    ended, running = list[str](), list[str]()
    while (taken := _ids(await _take(store, "w", 8, *running))) or running:
        running += taken
        ended.append(running.pop(0))
        assert await store.end_job(ended[-1], "succeeded", result) == "succeeded"
        assert int(redis.ask("GET", "neuronpipe-jobs:bytes:a")) <= limit
    assert ended == ids[:4]
    other = await _submit(store, "b", limit, outcomes=40)
    assert _ids(await _take(store, "w", 8)) == [other]
    await store.delete(ended[0])
    assert _ids(await _take(store, "w", 8, other)) == [ids[4]]


async def test_a_result_without_room_becomes_an_error_that_names_the_limit(store: JobStore) -> None:
    limit = 10_000
    kept = await _submit(store, "a", limit)
    await store.end_job(kept, "succeeded", b"r" + bytes(5000))
    id = await _submit(store, "a", limit)
    await store.take_jobs("w", _LEASE_S, 8, ())
    assert await store.end_job(id, "succeeded", b"r" + bytes(6000)) == "failed"
    job = await store.get(id)
    assert job
    message = job.operation().error.message
    assert "the result has 6001 bytes" in message
    assert "10000 bytes, the limit (the gateway's jobs_max_tenant_bytes)" in message
    assert await store.end_job(id, "succeeded", b"r") is None


async def test_room_for_results_comes_back_with_the_job(store: JobStore, redis: RedisServer) -> None:
    def size() -> int:
        return int(redis.ask("GET", "neuronpipe-jobs:bytes:a"))

    id = await _submit(store, "a", 100_000, outcomes=20)
    before = size()
    for back in ("given back", "dead", "cancelled"):
        (taken,) = await store.take_jobs("w", _LEASE_S, 1, ())
        assert size() > before + 15_000, back
        if back == "given back":
            await store.give_back("w", taken)
            assert size() == before
        elif back == "dead":
            _end_leases(redis, id)
            await store.take_jobs("other", _LEASE_S, 0, ())
            assert size() == before
        else:
            await store.end_job(id, "cancelled", _END)
            assert size() < before
    assert int(redis.ask("HGET", "neuronpipe-jobs:room:a", "reserved")) == 0


async def test_a_job_is_run_where_only_its_own_estimate_leaves_no_room(store: JobStore) -> None:
    id = await _submit(store, "a", 10_000, outcomes=1000)
    assert _ids(await store.take_jobs("w", _LEASE_S, 1, ())) == [id]
    assert await store.end_job(id, "succeeded", b"r") == "succeeded"


async def test_room_of_results_that_redis_has_forgotten_is_there_for_jobs_that_wait(store: JobStore) -> None:
    kept = await _submit(store, "a", 12_000)
    await store.end_job(kept, "succeeded", b"r" + bytes(9000))  # for a second
    waiting = await _submit(store, "a", 12_000, outcomes=5)
    assert await store.take_jobs("w", _LEASE_S, 1, ()) == []
    await asyncio.sleep(1.05)
    assert _ids(await store.take_jobs("w", _LEASE_S, 1, ())) == [waiting]


_LIMIT = 30_000


async def _fill(store: JobStore, tenant: str) -> tuple[str, str]:
    """A job that has ended and leaves no room, and one that waits for room."""
    kept = await _submit(store, tenant, _LIMIT, retention_s=100)
    assert await store.end_job(kept, "succeeded", b"r" + bytes(24_000)) == "succeeded"
    return kept, await _submit(store, tenant, _LIMIT, outcomes=20)


def _scripted(redis: RedisServer) -> tuple[int, int]:
    """How many scripts ran since the figures were reset, and their commands."""
    calls = {name: of["calls"] for name, of in redis.ask("INFO", "commandstats").items()}
    others = {"cmdstat_evalsha", "cmdstat_config|resetstat", "cmdstat_info"}
    return calls["cmdstat_evalsha"], sum(count for name, count in calls.items() if name not in others)


async def test_tenants_without_room_are_looked_at_once_in_short_scripts(store: JobStore, redis: RedisServer) -> None:
    for number in range(120):
        await _fill(store, f"full {number}")
    last = await _submit(store, "last", _LIMIT)
    await _take(store, "w", 0)  # Redis has the script
    redis.ask("CONFIG", "RESETSTAT")
    assert _ids(await _take(store, "w", 8)) == [last]
    scripts, commands = _scripted(redis)
    assert scripts == 120 // 50 + 1
    assert commands < 120 * 20
    redis.ask("CONFIG", "RESETSTAT")
    assert await _take(store, "w", 8, last) == []
    scripts, commands = _scripted(redis)
    assert scripts == 1
    assert commands < 20


async def test_tenants_that_a_worker_may_run_no_more_of_are_passed(store: JobStore, redis: RedisServer) -> None:
    closed = [f"closed {number}" for number in range(300)]
    for tenant in closed:
        await _submit(store, tenant)
    last = await _submit(store, "last")
    redis.ask("CONFIG", "RESETSTAT")
    assert _ids(await store.take_jobs("w", _LEASE_S, 8, closed, ())) == [last]
    assert _scripted(redis)[1] < 40
    assert len(await store.take_jobs("other", _LEASE_S, 1000, closed[:-1], ())) == 1


@pytest.mark.parametrize("change", ["deleted", "limit raised", "cancelled", "given back", "dead", "next is smaller"])
async def test_a_tenant_without_room_is_looked_at_again_when_something_changes(
    store: JobStore, redis: RedisServer, change: str
) -> None:
    """And in its order, before newer jobs of others."""
    running, kept = "", ""
    if change in ("deleted", "limit raised"):
        kept, waiting = await _fill(store, "a")
    else:
        running = await _submit(store, "a", _LIMIT, outcomes=12)
        (taken,) = await _take(store, "w", 1)
        waiting = await _submit(store, "a", _LIMIT, outcomes=15)
    other, small = await _submit(store, "b", _LIMIT), await _submit(store, "a", _LIMIT)
    has = [running] if running else []
    assert _ids(await _take(store, "w", 1, *has)) == [other]
    assert redis.ask("ZRANGE", "neuronpipe-jobs:refused:normal", 0, -1) == [b"a"]
    await _submit(store, "c", _LIMIT)
    expected = waiting
    if change == "deleted":
        await store.delete(kept)
    elif change == "limit raised":
        await _submit(store, "a", 10 * _LIMIT)
    elif change == "cancelled":
        await store.end_job(running, "cancelled", _END)
    elif change == "next is smaller":
        await store.end_job(waiting, "cancelled", _END)
        expected = small
    else:
        expected = running
        if change == "given back":
            await store.give_back("w", taken)
        else:
            _end_leases(redis, running)
    assert _ids(await _take(store, "third", 1)) == [expected]


async def test_jobs_of_tenants_without_room_wait_since_they_came(store: JobStore, redis: RedisServer) -> None:
    await _fill(store, "a")
    await asyncio.sleep(0.3)
    await _submit(store, "b", _LIMIT)
    assert len(await _take(store, "w", 1)) == 1
    for submits in (False, True):
        if submits:
            await _submit(store, "c", _LIMIT)
        counts, _, _ = await store.count()
        assert 0.3 <= counts["normal"].oldest_s < 5
    assert redis.ask("ZCARD", "neuronpipe-jobs:refused:normal") == 1


async def test_a_tenant_without_room_is_looked_at_again_after_a_time(store: JobStore, redis: RedisServer) -> None:
    """Also if nothing tells of a change."""
    prefix = "neuronpipe-jobs"
    kept, waiting = await _fill(store, "a")
    assert await _take(store, "w", 1) == []
    assert redis.ask("ZRANGE", f"{prefix}:waiting:normal", 0, -1) == [b"a"]
    added = await _submit(store, "x")
    order = redis.ask("ZSCORE", f"{prefix}:waiting:normal:x", added)
    redis.ask("ZREM", f"{prefix}:waiting:normal:x", added)
    redis.ask("ZREM", f"{prefix}:waiting:normal", "x")
    redis.ask("HSET", f"{prefix}:job:{added}", "tenant", "a")
    redis.ask("ZADD", f"{prefix}:waiting:normal:a", order, added)
    redis.ask("ZADD", f"{prefix}:waiting:normal", "LT", order, "a")
    assert await _take(store, "w", 1) == []
    (member,) = redis.ask("ZRANGE", f"{prefix}:kept:a", 0, -1)
    redis.ask("ZREM", f"{prefix}:kept:a", member)
    redis.ask("DECRBY", f"{prefix}:bytes:a", member.rpartition(b":")[2])
    assert member.startswith(kept.encode())
    assert await _take(store, "w", 1) == []
    redis.ask("ZADD", f"{prefix}:refused:normal", 1, "a")  # the time has come
    assert _ids(await _take(store, "w", 2)) == [waiting, added]
    assert redis.ask("KEYS", f"{prefix}:refused:*") == []


async def test_a_job_that_could_reserve_nothing_ends(store: JobStore, redis: RedisServer) -> None:
    id = await _submit(store, "a", 10_000, outcomes=1000)
    redis.ask("SET", "neuronpipe-jobs:bytes:a", 10_000)
    assert _ids(await _take(store, "w", 1)) == [id]
    assert await store.end_job(id, "cancelled", _END) == "cancelled"


async def test_a_damaged_job_is_left_and_those_taken_with_it_are_run(store: JobStore, redis: RedisServer) -> None:
    first, damaged, last = [await _submit(store, "small") for _ in range(3)]
    redis.ask("HSET", f"neuronpipe-jobs:job:{damaged}", "inputs", "many")
    assert [held.job.id for held in await store.take_jobs("w", _LEASE_S, 8, {})] == [first, last]


@pytest.mark.parametrize(
    ("field", "value"),
    [("inputs", b"many"), ("request_id", b"\xff"), ("created", b"1.5"), ("state", b"\xff"), ("tenant", b"\xff")],
    ids=lambda value: str(value),
)
async def test_a_damaged_job_is_listed_as_failed_beside_the_others(
    store: JobStore, redis: RedisServer, caplog: pytest.LogCaptureFixture, field: str, value: bytes
) -> None:
    ids = [await _submit(store, "a") for _ in range(3)]
    redis.ask("HSET", f"neuronpipe-jobs:job:{ids[1]}", field, value)
    listed, _ = await store.jobs_of("a", None, 10)
    assert {job.id: job.operation().done for job in listed} == {ids[0]: False, ids[1]: True, ids[2]: False}
    (operation,) = [job.operation() for job in listed if job.id == ids[1]]
    assert operation.error.message == "the job is damaged in Redis"
    assert not JobMetadata.FromString(operation.metadata.value).HasField("create_time")
    assert [record.getMessage() for record in caplog.records] == ["a job in Redis is damaged"]


@pytest.mark.parametrize("page", [1, 2, 3])
async def test_a_list_continues_behind_a_job_that_is_gone(store: JobStore, redis: RedisServer, page: int) -> None:
    ids = [await _submit(store, "a") for _ in range(7)]
    for number, id in enumerate(ids):  # ids are by another clock, and several jobs come in one millisecond
        redis.ask("ZADD", "neuronpipe-jobs:jobs:a", 5 + number // 3, id)
    expected = [id for number in (2, 1, 0) for id in sorted(ids[3 * number : 3 * number + 3], reverse=True)]
    seen, place, asked = list[str](), None, 0
    while place or not asked:
        jobs, place = await store.jobs_of("a", place and ListPlace.parse(place.token), page)
        seen += [job.id for job in jobs]
        asked += 1
        if jobs:
            redis.ask("DEL", f"neuronpipe-jobs:job:{jobs[-1].id}")
            redis.ask("ZREM", "neuronpipe-jobs:jobs:a", jobs[-1].id)
    assert seen == expected


async def test_a_list_shows_no_job_that_names_another_tenant(store: JobStore, redis: RedisServer) -> None:
    id = await _submit(store, "a")
    redis.ask("HSET", f"neuronpipe-jobs:job:{id}", "tenant", "b", "request_id", "theirs")
    ((job,), _) = await store.jobs_of("a", None, 10)
    assert (job.tenant, job.request_id, job.state) == ("a", "", "failed")


async def test_a_redis_that_hangs_leaves_room_for_calls_of_other_kinds(redis: RedisServer) -> None:
    store = JobStore(JobSettings(jobs_redis_url=redis.url))
    await store.check()
    redis.send(signal.SIGSTOP)
    try:
        asking = [asyncio.create_task(store.get("none")) for _ in range(1100)]
        done, waiting = await asyncio.wait(asking, timeout=0.2)
    finally:
        redis.send(signal.SIGCONT)
    assert [len(waiting), len(done)] == [1024 + 32, 1100 - 1024 - 32]
    assert all("the Redis of jobs, the limit" in str(task.exception()) for task in done)
    assert set(await asyncio.gather(*waiting)) == {None}
    await store.close()


async def test_a_start_does_not_wait_for_a_hanging_redis(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
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
    job_bytes = size() // 4
    assert 1500 < job_bytes < 2500
    for id in ids[:3]:
        await store.end_job(id, "succeeded", b"r" + b"y" * 5000)
    assert size() == pytest.approx(3 * 5700 + job_bytes, abs=1000)
    await store.delete(ids[0])
    assert size() == pytest.approx(2 * 5700 + job_bytes, abs=700)
    with pytest.raises(Overloaded, match="the jobs of tenant 'a' and their results have 10000 bytes, the limit"):
        await _submit(store, "a", max_bytes=10_000)
    await asyncio.sleep(1.1)
    await _submit(store, "a", max_bytes=10_000)
    assert size() == pytest.approx(2 * job_bytes, abs=10)
    assert redis.ask("ZCARD", "neuronpipe-jobs:jobs:a") == 2


async def test_what_is_kept_of_a_tenant_goes_with_its_last_job(store: JobStore, redis: RedisServer) -> None:
    await store.end_job(await _submit(store, "a"), "cancelled", _END)
    times = {name: int(redis.ask("TTL", f"neuronpipe-jobs:{name}:a")) for name in ("jobs", "bytes", "kept")}
    assert len(set(times.values())) == 1
    assert 3600 < times["kept"] <= 3701


async def test_a_job_that_runs_again_counts_once(store: JobStore, redis: RedisServer) -> None:
    id = await _submit(store, "a")
    await store.take_jobs("w", _LEASE_S, 1, {})
    await store.end_job(id, "dead", _END)
    assert await store.retry(id)
    assert redis.ask("ZCARD", "neuronpipe-jobs:kept:a") == 0
    await store.take_jobs("w", _LEASE_S, 1, {})
    await store.end_job(id, "succeeded", b"r")
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
        for asked in (_submit(store, "a"), store.take_jobs("w", _LEASE_S, 1, {}), store.count(), store.get(new_id())):
            with pytest.raises(Unavailable, match=f"the Redis of jobs {told}"):
                await asked
        if says.startswith(b"-"):
            with pytest.raises(Unavailable):
                async with store.listening("queued") as queued:
                    await anext(queued)
        between.says = b""
        await _submit(store, "a")
        await store.close()


async def test_a_redis_that_would_lose_jobs_is_told_to_callers_until_it_does_not(redis: RedisServer) -> None:
    store = JobStore(JobSettings(jobs_redis_url=redis.url))
    redis.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    with pytest.raises(NotConfigured, match="this Redis would lose jobs: maxmemory-policy is 'allkeys-lru'"):
        await _submit(store, "a")
    redis.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
    await _submit(store, "a")
    await store.close()
