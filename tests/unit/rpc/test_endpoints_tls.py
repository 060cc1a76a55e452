"""rpc/endpoints.py over TLS: the name of the target is verified, and new certificates take over without a gap."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from neuronpipe.platform.tls import ServerTls, TlsFiles, WatchedTls, watched_tls
from neuronpipe.rpc.endpoints import StageStream, follow_endpoints
from neuronpipe.rpc.items import TOKENIZE
from tests.servers.certificates import Authority, peer_names, replace, server_credentials
from tests.suite.waiting import cancelled, happens

_AUTHORITY = Authority()


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is tried again is tried again soon."""
    for name in ("_RESOLVE_EVERY_S", "_PAUSE_S", "_REFUSED_PAUSE_S"):
        monkeypatch.setattr(f"neuronpipe.rpc.endpoints.{name}", 0.005)


class _Process:
    """A stage's process that takes gateways whose certificate it is told to take, and keeps their streams open."""

    def __init__(self) -> None:
        # The first name of each gateway that it has taken, and those that it takes.
        self.taken: list[str] = []
        self.takes = {"first.example", "second.example", "third.example"}
        self.open = 0
        self.target = ""

    async def answer(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        [name] = peer_names(context)
        if name not in self.takes:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not this one")
        self.taken.append(name)
        self.open += 1
        try:
            yield b""
            async for _ in requests:
                pass
        finally:
            self.open -= 1


@asynccontextmanager
async def _running(folder: Path, name: str) -> AsyncIterator[_Process]:
    """A process whose certificate has this name only."""
    _AUTHORITY.issue(name).write(folder)
    replace(folder / "ca.crt", _AUTHORITY.certificate)
    tls = ServerTls(TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt"))
    process = _Process()
    server = grpc.aio.server()
    methods: dict[str, Any] = {"Tokenize": grpc.stream_stream_rpc_method_handler(process.answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(TOKENIZE.service, methods),))
    process.target = f"localhost:{server.add_secure_port('127.0.0.1:0', server_credentials(tls))}"
    await server.start()
    try:
        yield process
    finally:
        await server.stop(0)


class _Served:
    """Keeps each stream until it is retired, as a coalescer does that has nothing to send, or lost."""

    def __init__(self) -> None:
        self.now = 0
        self.fewest_after_first = 1
        self.begun = 0

    async def __call__(self, stream: StageStream) -> None:
        self.begun += 1
        self.now += 1
        receiving = asyncio.create_task(stream.receive())
        retired = asyncio.create_task(stream.retired.wait())
        try:
            await asyncio.wait([receiving, retired], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self.now -= 1
            self.fewest_after_first = min(self.fewest_after_first, self.now)
            for task in (receiving, retired):
                task.cancel()
            await asyncio.gather(receiving, retired, return_exceptions=True)


@asynccontextmanager
async def _following(process: _Process, served: _Served, tls: WatchedTls) -> AsyncIterator[None]:
    task = asyncio.create_task(follow_endpoints(TOKENIZE, process.target, served, tls))
    try:
        yield
    finally:
        await cancelled(task)


def _gateway(folder: Path) -> WatchedTls:
    _AUTHORITY.issue("first.example").write(folder)
    replace(folder / "ca.crt", _AUTHORITY.certificate)
    return watched_tls(TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt"), "client")


async def test_a_process_proves_the_name_of_the_target_though_its_address_is_called(tmp_path: Path) -> None:
    served = _Served()
    async with (
        _running(tmp_path / "stage", "localhost") as process,
        _following(process, served, _gateway(tmp_path / "gateway")),
    ):
        await happens(lambda: served.now == 1)


async def test_a_process_that_proves_another_name_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = _Served()
    tls = _gateway(tmp_path / "gateway")
    async with (
        _running(tmp_path / "wrong", "other.example") as wrong,
        _running(tmp_path / "right", "localhost") as right,
    ):
        right.target = f"{wrong.target},{right.target}"
        async with _following(right, served, tls):
            await happens(lambda: served.now == 1)
            await asyncio.sleep(0.2)  # time for a stream to the wrong one, which nobody opens
    assert (wrong.taken, right.taken, served.begun) == ([], ["first.example"], 1)


@asynccontextmanager
async def _secured(context: ssl.SSLContext | None) -> AsyncIterator[str]:
    """A process with TLS of its own, or none, that says nothing; gives its target."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context) as server:
        yield f"localhost:{server.sockets[0].getsockname()[1]}"


def _context(folder: Path, authority: Authority, name: str, *protocols: str) -> ssl.SSLContext:
    authority.issue(name).write(folder)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    if protocols:
        context.set_alpn_protocols(list(protocols))
    return context


@pytest.mark.parametrize(
    ("authority", "name", "protocols", "reason"),
    [
        (Authority("another authority"), "localhost", ["h2"], "TLS: unable to get local issuer certificate"),
        (_AUTHORITY, "other.example", ["h2"], "TLS: Hostname mismatch, certificate is not valid for 'localhost'."),
        (_AUTHORITY, "localhost", ["http/1.1"], "the server does not speak HTTP/2"),
        (_AUTHORITY, "localhost", [], "the server does not speak HTTP/2"),
    ],
    ids=["another authority", "another name", "another protocol", "no protocol"],
)
async def test_the_log_says_why_a_stage_cannot_be_reached_over_tls(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, authority: Authority, name: str, protocols: list[str], reason: str
) -> None:
    process = _Process()
    tls = _gateway(tmp_path / "gateway")
    async with _secured(_context(tmp_path / "stage", authority, name, *protocols)) as process.target:
        async with _following(process, _Served(), tls):
            await happens(lambda: reason in _reasons(caplog))
        assert _reasons(caplog).count(reason) == 1


def _reasons(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Why stages cannot be reached at IPv4."""
    fields = [record.__dict__["fields"] for record in caplog.records if record.message == "a stage cannot be reached"]
    return [field["reason"] for field in fields if field["address"].startswith("ipv4:")]


async def test_a_new_certificate_has_its_stream_before_the_old_one_loses_its_own(tmp_path: Path) -> None:
    served = _Served()
    tls = _gateway(tmp_path / "gateway")
    async with _running(tmp_path / "stage", "localhost") as process, _following(process, served, tls):
        await happens(lambda: served.now == 1)
        for number, name in enumerate(("second.example", "third.example"), 2):
            _AUTHORITY.issue(name).write(tmp_path / "gateway")
            await happens(lambda number=number: served.begun == number and served.now == 1)  # type: ignore[misc]
        assert process.taken == ["first.example", "second.example", "third.example"]
        assert served.fewest_after_first == 1
        await happens(lambda: process.open == 1)


async def test_a_certificate_that_the_process_refuses_leaves_the_old_stream_until_another(tmp_path: Path) -> None:
    served = _Served()
    tls = _gateway(tmp_path / "gateway")
    async with _running(tmp_path / "stage", "localhost") as process, _following(process, served, tls):
        await happens(lambda: served.now == 1)
        process.takes.remove("second.example")
        _AUTHORITY.issue("second.example").write(tmp_path / "gateway")
        await asyncio.sleep(0.2)  # time to lose the stream, which nobody does
        assert (served.begun, served.now, process.open) == (1, 1, 1)
        _AUTHORITY.issue("third.example").write(tmp_path / "gateway")
        await happens(lambda: served.begun == 2 and served.now == 1)
        assert process.taken == ["first.example", "third.example"]
        assert served.fewest_after_first == 1
        await happens(lambda: process.open == 1)


async def test_an_address_that_left_takes_older_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = _Served()
    tls = _gateway(tmp_path / "gateway")
    addresses: dict[str, str] = {}

    async def resolve(target: str) -> tuple[dict[str, str], dict[str, str]]:
        return addresses, {}

    monkeypatch.setattr("neuronpipe.rpc.endpoints.resolve", resolve)
    monkeypatch.setattr("neuronpipe.rpc.endpoints._MAX_ABSENCES", 2)
    async with _running(tmp_path / "stage", "localhost") as process:
        addresses[f"ipv4:127.0.0.1:{process.target.rpartition(':')[2]}"] = process.target
        async with _following(process, served, tls):
            await happens(lambda: served.now == 1)
            process.takes.remove("second.example")
            _AUTHORITY.issue("second.example").write(tmp_path / "gateway")
            await happens(lambda: tls.value.certificate == (tmp_path / "gateway" / "tls.crt").read_bytes())
            addresses.clear()
            await happens(lambda: served.now == 0 and process.open == 0)
            assert process.taken == ["first.example"]
