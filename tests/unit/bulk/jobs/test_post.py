"""HTTP requests of workers: which hosts they reach, and what ends them."""

import asyncio
import ipaddress
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import pytest

from neuronpipe.bulk.jobs.post import Destination, PostFailed, check_host, post, resolve
from tests.suite.waiting import happens

_LOOPBACK = [ipaddress.ip_network("127.0.0.0/8")]


@asynccontextmanager
async def _server(answer: Callable[[bytes], Awaitable[bytes]]) -> AsyncIterator[Destination]:
    """Answers each connection with bytes, made of what it sent first."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await answer(await reader.read(1 << 16)))
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        yield Destination.of(f"http://receiver.example:{server.sockets[0].getsockname()[1]}/a?b=c")


async def test_a_request_goes_to_the_address_and_names_the_host() -> None:
    heads: list[bytes] = []

    async def answer(head: bytes) -> bytes:
        heads.append(head)
        return b"HTTP/1.1 202 Accepted\r\nContent-Length: 2\r\nX-A: b\r\n\r\nok"

    async with _server(answer) as to:
        answered = await post(to, "127.0.0.1", {"x-own": "1"}, b"body", timeout_s=5.0, max_bytes=100)
    assert (answered.status, answered.headers["x-a"], answered.body) == (202, "b", b"ok")
    lines = heads[0].split(b"\r\n")
    assert lines[0] == b"POST /a?b=c HTTP/1.1"
    assert f"Host: receiver.example:{to.port}".encode() in lines


async def test_a_redirect_is_an_answer_as_any_other() -> None:
    hits = 0

    async def answer(head: bytes) -> bytes:
        nonlocal hits
        hits += 1
        return b"HTTP/1.1 307 x\r\nLocation: http://169.254.169.254/\r\nContent-Length: 0\r\n\r\n"

    async with _server(answer) as to:
        assert (await post(to, "127.0.0.1", {}, b"", timeout_s=5.0, max_bytes=100)).status == 307
    assert hits == 1


@pytest.mark.parametrize("first", [b"", b"HTTP/1.1 200 OK\r\n"])
async def test_a_receiver_that_hangs_or_trickles_is_left(first: bytes) -> None:
    released = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(first)
        while first and not released.is_set():
            writer.write(b"X-Header: 1\r\n")
            await asyncio.sleep(0.05)
        await released.wait()
        writer.close()

    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        to = Destination.of(f"http://x:{server.sockets[0].getsockname()[1]}/")
        began_s = time.monotonic()
        with pytest.raises(PostFailed, match=r"no answer within 0\.5 s|the request failed"):
            await post(to, "127.0.0.1", {}, b"", timeout_s=0.5, max_bytes=100)
        released.set()
        assert time.monotonic() - began_s < 20


async def test_an_answer_without_end_is_cut() -> None:
    async def answer(head: bytes) -> bytes:
        return b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000

    async with _server(answer) as to:
        with pytest.raises(PostFailed, match="larger than 100 bytes"):
            await post(to, "127.0.0.1", {}, b"", timeout_s=5.0, max_bytes=100)


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "10.0.0.1",
        "172.16.3.4",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
        "[::1]",
        "[fd00::1]",
        "[fe80::1]",
        "[::ffff:127.0.0.1]",
        "2130706433",
        "0x7f.1",
        "two..dots.example",
        f"{'x' * 64}.example",
    ],
)
async def test_addresses_that_are_not_public_are_refused(host: str) -> None:
    with pytest.raises(PostFailed, match=r"not public|has no address"):
        await resolve(Destination.of(f"http://{host}/"), [])


async def test_networks_that_are_allowed_are_reached_and_no_others() -> None:
    assert await resolve(Destination.of("http://127.0.0.1/"), _LOOPBACK) == "127.0.0.1"
    assert await resolve(Destination.of("https://8.8.8.8/"), []) == "8.8.8.8"
    with pytest.raises(PostFailed):
        await resolve(Destination.of("http://10.0.0.1/"), _LOOPBACK)


async def test_a_host_with_one_forbidden_address_of_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", ("8.8.8.8", 80)), (0, 0, 0, "", ("10.0.0.1", 80))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", found, raising=False)
    with pytest.raises(PostFailed, match="not public"):
        await resolve(Destination.of("http://two.example/"), [])


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("ftp://a/", "must begin with https://"),
        ("https://user:secret@a/", "without a user"),
        ("https:///path", "must name a host"),
        ("https://a/b c", "without spaces"),
        ("https://a/\r\nX: y", "host must be|without spaces"),
        ("https://a/ä", "ASCII"),
        ("https://b.example/", "its host must be a or [*].c.example"),
        ("https://c.example/", "its host must be"),
        ("https://ac.example/", "its host must be"),
    ],
)
def test_urls_that_are_refused(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        check_host(url, "a, *.c.example")


def test_hosts_that_are_allowed() -> None:
    for url in ("https://a/x?y=z", "http://A:8080", "https://d.c.example/"):
        check_host(url, "a, *.c.example")
    with pytest.raises(ValueError, match="jobs_notification_hosts"):
        check_host("https://a/", "")


@pytest.mark.parametrize(
    "address",
    [
        "64:ff9b::a00:1",
        "64:ff9b:1::1",
        "2002:a00:1::1",
        "2001:0:1::1",
        "fec0::1",
        "::ffff:10.0.0.1",
        "::10.0.0.1",
        "::ffff:0:10.0.0.1",
        "10.0.0.1",
    ],
)
async def test_an_address_that_may_lead_inside_is_not_public(address: str) -> None:
    to = Destination("http", address, 80, "/")
    with pytest.raises(PostFailed, match="not public"):
        await resolve(to, [])


async def test_what_the_request_is_to_blame_for_is_told_from_a_server_that_is_away() -> None:
    async def answer(head: bytes) -> bytes:
        await asyncio.sleep(0.3)
        return b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n" + b"x" * 1000

    async with _server(answer) as to:
        statuses = []
        for timeout_s, max_bytes in ((0.1, 2000), (5.0, 100)):
            with pytest.raises(PostFailed) as failed:
                await post(to, "127.0.0.1", {}, b"", timeout_s=timeout_s, max_bytes=max_bytes)
            statuses.append(failed.value.status)
    with pytest.raises(PostFailed) as failed:
        await post(to, "127.0.0.1", {}, b"", timeout_s=5.0, max_bytes=100)
    assert [*statuses, failed.value.status] == [504, 502, 0]


async def test_the_body_of_an_answer_ends_as_its_headers_say_or_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\n"
    answers = [
        b"HTTP/1.1 100 Continue\r\n\r\n" + head + b"Content-Length: 2\r\n\r\nokand more",
        head + b"Transfer-Encoding: chunked\r\n\r\n1;a=b\r\no\r\n1\r\nk\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\n\nok",
    ]

    async def answer(head: bytes) -> bytes:
        return answers.pop(0)

    async with _server(answer) as to:
        for _ in range(3):
            answered = await post(to, "127.0.0.1", {}, b"", timeout_s=5.0, max_bytes=2)
            assert (answered.status, answered.body) == (200, b"ok")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/1.1 ok\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nok",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
        b"HTTP/1.1 200 OK\r\n" + b"X: x\r\n" * 20_000,
    ],
    ids=lambda answer: repr(answer[:40]),
)
async def test_an_answer_that_is_none_of_http_has_failed(answer: bytes) -> None:
    async def give(head: bytes) -> bytes:
        return answer

    async with _server(give) as to:
        with pytest.raises(PostFailed, match="the request failed") as failed:
            await post(to, "127.0.0.1", {}, b"", timeout_s=5.0, max_bytes=100)
    assert failed.value.status == 0


async def test_posts_need_no_threads_and_a_cancelled_one_sends_nothing_more() -> None:
    """With the one thread of the process in use, and more posts than it would have threads."""
    sent: list[bytes] = []
    released = asyncio.Event()

    async def answer(head: bytes) -> bytes:
        sent.append(head.split()[1])
        await released.wait()
        return b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

    busy = threading.Event()
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    waiting = asyncio.create_task(asyncio.to_thread(busy.wait))
    try:
        async with _server(answer) as to:
            posts = [
                asyncio.create_task(post(to, "127.0.0.1", {}, b"x", timeout_s=5.0, max_bytes=100)) for _ in range(64)
            ]
            cancelled = asyncio.create_task(post(to, "127.0.0.1", {}, b"x", timeout_s=5.0, max_bytes=100))
            cancelled.cancel()
            await happens(lambda: len(sent) == 64)
            with pytest.raises(PostFailed, match=r"no answer within 0\.2 s"):
                await post(to, "127.0.0.1", {}, b"x", timeout_s=0.2, max_bytes=100)
            released.set()
            assert {answer.status for answer in await asyncio.gather(*posts)} == {200}
            assert len(sent) == 65
            assert cancelled.cancelled()
    finally:
        busy.set()
        await waiting
