"""bulk/jobs/notifications.py: when a receiver is told again, and when it is not told any more."""

import asyncio
import base64
import contextlib
import ipaddress
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from neuronpipe.bulk.jobs import notifications
from neuronpipe.bulk.jobs.job import NewJob, cancelled, end_of, new_id
from neuronpipe.bulk.jobs.notifications import Notifier
from neuronpipe.bulk.jobs.settings import JobSettings, WorkerSettings
from neuronpipe.bulk.jobs.store import JobStore
from neuronpipe.core.errors import SetupError
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from tests.servers.redis import RedisServer, proxy
from tests.suite.waiting import happens

_LOOPBACK = [ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128")]
_NOTIFY = "neuronpipe-jobs:notify"


class _Receiver:
    def __init__(self, status: int) -> None:
        self.status = status
        self.asked = 0
        self.url = ""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1 << 16)
        self.asked += 1
        writer.write(b"HTTP/1.1 %d x\r\nContent-Length: 0\r\n\r\n" % self.status)
        writer.close()


@asynccontextmanager
async def _receiver(status: int) -> AsyncIterator[_Receiver]:
    made = _Receiver(status)
    async with await asyncio.start_server(made.answer, "127.0.0.1", 0) as server:
        made.url = f"http://localhost:{server.sockets[0].getsockname()[1]}/"
        yield made


@asynccontextmanager
async def _running(store: JobStore, jobs_secret: bytes = b"") -> AsyncIterator[Meters]:
    meters = Meters()
    running = asyncio.create_task(Notifier(store, b"secret", _LOOPBACK, meters, jobs_secret).run())
    try:
        yield meters
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def _ended(store: JobStore, redis: RedisServer, url: str, attempts: int = 0, tenant: str = "a") -> str:
    """A job that has ended, whose receiver was tried to be told so often."""
    fields: dict[str, str | int] = {"request_id": "", "notify": url, "limit": 900, "trace": "", "inputs": 1}
    id = new_id()
    new = NewJob(id, id, "digest", tenant, "normal", b"x", ttl_s=100, retention_s=100, fields=fields)
    await store.submit(new, 1000, 0, 0)
    await store.end_job(id, "cancelled", end_of(cancelled()))
    redis.ask("HSET", f"neuronpipe-jobs:job:{id}", "notified", attempts)
    return id


def _counts(meters: Meters) -> dict[str, float]:
    found = {name: meters.counter(Metrics.NOTIFICATIONS, name).value for name in ("accepted", "refused", "given_up")}
    return {name: value for name, value in found.items() if value}


# After the first attempt, the second and so on; a quarter more at random.
@pytest.mark.parametrize(("attempts", "delay_s"), [(0, 1), (1, 5), (2, 30), (3, 120), (4, 600), (5, 1800), (6, 3600)])
async def test_a_receiver_that_refuses_is_told_again_later_each_time(
    store: JobStore, redis: RedisServer, attempts: int, delay_s: float
) -> None:
    async with _receiver(500) as receiver:
        id = await _ended(store, redis, receiver.url, attempts)
        before_s = time.time()
        async with _running(store) as meters:
            await happens(lambda: bool(_counts(meters)))
            # Until it is put off, it is held for a minute.
            await happens(lambda: not 55 < float(redis.ask("ZSCORE", _NOTIFY, id)) / 1000 - before_s < 65)
        next_s = float(redis.ask("ZSCORE", _NOTIFY, id)) / 1000
        assert delay_s <= next_s - before_s <= 1.25 * delay_s + 20
        assert (receiver.asked, _counts(meters)) == (1, {"refused": 1})


async def test_a_receiver_that_refuses_the_eighth_time_is_given_up(store: JobStore, redis: RedisServer) -> None:
    async with _receiver(302) as receiver:
        id = await _ended(store, redis, receiver.url, attempts=7)
        async with _running(store) as meters:
            await happens(lambda: redis.ask("ZSCORE", _NOTIFY, id) is None)
        assert (receiver.asked, _counts(meters)) == (1, {"given_up": 1})
    assert (await store.count())[2] == 0
    assert (await store.get(id)) is not None, "its caller can still ask for it"


async def test_a_url_that_is_none_is_given_up_like_a_receiver_that_refuses(store: JobStore, redis: RedisServer) -> None:
    ids = [await _ended(store, redis, "ftp://x/", attempts) for attempts in (0, 7)]
    async with _running(store) as meters:
        await happens(lambda: len(_counts(meters)) == 2)
        await happens(lambda: redis.ask("ZSCORE", _NOTIFY, ids[1]) is None)
    assert _counts(meters) == {"refused": 1, "given_up": 1}
    assert redis.ask("ZSCORE", _NOTIFY, ids[0]) is not None


async def test_a_receiver_that_accepts_is_told_once(store: JobStore, redis: RedisServer) -> None:
    async with _receiver(204) as receiver:
        id = await _ended(store, redis, receiver.url, attempts=7)
        async with _running(store) as meters:
            await happens(lambda: redis.ask("ZSCORE", _NOTIFY, id) is None)
        assert (receiver.asked, _counts(meters)) == (1, {"accepted": 1})


async def test_of_a_job_that_no_gateway_signed_no_receiver_is_told(store: JobStore, redis: RedisServer) -> None:
    async with _receiver(204) as receiver:
        id = await _ended(store, redis, receiver.url)
        async with _running(store, jobs_secret=b"a secret of thirty-two bytes, or more") as meters:
            await happens(lambda: redis.ask("ZSCORE", _NOTIFY, id) is None)
        assert (receiver.asked, _counts(meters)) == (0, {})


async def test_a_job_deleted_while_its_receiver_is_told_is_not_told_again(store: JobStore, redis: RedisServer) -> None:
    async with _receiver(500) as receiver:
        id = await _ended(store, redis, receiver.url)
        (taken,) = await store.take_notifications(16, 60.0)
        await store.delete(id)
        await store.postpone_notification(taken.id, 0.0)
    assert redis.ask("ZCARD", _NOTIFY) == 0


@asynccontextmanager
async def _silent(address: str = "127.0.0.1", host: str = "localhost") -> AsyncIterator[str]:
    """The URL of a receiver that takes no connection: its queue is full."""
    with contextlib.ExitStack() as opened:
        full = opened.enter_context(socket.create_server((address, 0), backlog=0))
        for _ in range(4):
            filling = opened.enter_context(socket.socket())
            filling.setblocking(False)
            filling.connect_ex(full.getsockname())
        yield f"http://{host}:{full.getsockname()[1]}/"


async def test_a_receiver_that_hangs_holds_up_no_other(
    store: JobStore, redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "_AT_ONCE", 40)
    async with _silent() as silent, _receiver(204) as receiver:
        hung = [await _ended(store, redis, silent) for _ in range(100)]
        for _ in range(50):
            await _ended(store, redis, receiver.url)
        began_s = time.monotonic()
        async with _running(store) as meters:
            await happens(lambda: receiver.asked == 50)
            await happens(lambda: _counts(meters) == {"accepted": 50})
            assert time.monotonic() - began_s < 8  # an attempt at the other one takes ten seconds
        # Those that were put off are told later, as if they had not been taken.
        stored = [int(redis.ask("HGET", f"neuronpipe-jobs:job:{id}", "notified")) for id in hung]
        assert stored.count(0) >= 100 - 40
        assert redis.ask("ZCARD", _NOTIFY) == 100


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"] * 10, [f"127.0.0.{number}" for number in range(1, 11)]],
    ids=["ports of one host", "hosts"],
)
async def test_many_receivers_of_a_tenant_that_hang_hold_up_those_of_no_other(
    store: JobStore, redis: RedisServer, monkeypatch: pytest.MonkeyPatch, addresses: list[str]
) -> None:
    monkeypatch.setattr(notifications, "_AT_ONCE", 40)
    monkeypatch.setattr(notifications, "_AT_ONCE_OF_TENANT", 20)
    async with contextlib.AsyncExitStack() as opened, _receiver(204) as receiver:
        for address in addresses:
            silent = await opened.enter_async_context(_silent(address, address))
            for _ in range(10):
                await _ended(store, redis, silent, tenant="mallory")
        for _ in range(50):
            await _ended(store, redis, receiver.url, tenant="victim")
        began_s = time.monotonic()
        async with _running(store):
            await happens(lambda: receiver.asked == 50)
        assert time.monotonic() - began_s < 8  # an attempt at another one takes ten seconds


async def test_a_stop_waits_for_no_receiver(store: JobStore, redis: RedisServer) -> None:
    async with _silent() as silent:
        id = await _ended(store, redis, silent)
        running = asyncio.create_task(Notifier(store, b"secret", _LOOPBACK, Meters()).run())
        await happens(lambda: redis.ask("HGET", f"neuronpipe-jobs:job:{id}", "notified") == b"1")
        await asyncio.sleep(0.1)
        began_s = time.monotonic()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert time.monotonic() - began_s < 1


async def test_the_result_of_a_job_is_not_read_to_tell_of_it(store: JobStore, redis: RedisServer) -> None:
    async with _receiver(204) as receiver:
        id = await _ended(store, redis, receiver.url)
        redis.ask("HSET", f"neuronpipe-jobs:job:{id}", "end", b"r" + bytes(1 << 20))
        redis.ask("CONFIG", "RESETSTAT")
        (taken,) = await store.take_notifications(16, 60.0)
        assert (taken.id, taken.state, taken.notify, taken.notified) == (id, "cancelled", receiver.url, 1)
        assert redis.ask("INFO", "stats")["total_net_output_bytes"] < 10_000


async def test_receivers_are_told_once_redis_answers_again(
    redis: RedisServer, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notifications, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(notifications, "_HOLD_S", 0.1)  # Redis holds what it could not answer with
    async with proxy(redis.port) as between, _receiver(204) as receiver:
        behind = JobStore(JobSettings(jobs_redis_url=between.url))
        await behind.check()
        between.says = b"-LOADING Redis is loading the dataset in memory\r\n"
        await _ended(store, redis, receiver.url)
        async with _running(behind) as meters:
            asked = between.requests
            await happens(lambda: between.requests > asked + 8)  # after the retries of several looks
            assert receiver.asked == 0
            between.says = b""
            await happens(lambda: _counts(meters) == {"accepted": 1})
        await behind.close()


def _settings(folder: Path, written: str = "", networks: str = "") -> WorkerSettings:
    (folder / "secret").write_text(written or f"whsec_{base64.b64encode(bytes(24)).decode()}\n")
    return WorkerSettings.of(notification_secret=str(folder / "secret"), notification_networks=networks)


async def test_the_secret_and_the_networks_of_a_worker_are_read(store: JobStore, tmp_path: Path) -> None:
    notifier = Notifier.of(_settings(tmp_path, networks="10.1.0.0/16, fd00::/8"), store, Meters(), b"")
    assert notifier._secret == bytes(24)
    assert [*map(str, notifier._networks)] == ["10.1.0.0/16", "fd00::/8"]


@pytest.mark.parametrize(
    ("written", "networks", "problem"),
    [
        ("", "10.1.0.1/16", "--notification-networks: 10.1.0.1/16 has host bits set"),
        ("", "inside", "--notification-networks: 'inside' does not appear to be"),
        ("secret", "", "/secret: must be whsec_ and 24 bytes or more in Base64"),
        ("whsec_" + "A" * 31 + "=", "", "/secret: must be whsec_"),  # 23 bytes
        ("whsec_%%%", "", "/secret: must be whsec_"),
        ("whsec_\u00e9", "", "/secret: must be whsec_"),
    ],
)
async def test_a_worker_that_could_not_sign_or_send_does_not_start(
    store: JobStore, tmp_path: Path, written: str, networks: str, problem: str
) -> None:
    with pytest.raises(SetupError, match=re.escape(problem)):
        Notifier.of(_settings(tmp_path, written, networks), store, Meters(), b"")


async def test_a_secret_that_is_not_there_is_told_by_its_file(store: JobStore, tmp_path: Path) -> None:
    settings = WorkerSettings.of(notification_secret=str(tmp_path / "none"))
    with pytest.raises(SetupError, match=f"--notification-secret {tmp_path}/none: "):
        Notifier.of(settings, store, Meters(), b"")
