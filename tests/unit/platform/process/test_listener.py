"""platform/process/listener.py: connections on their way to a protocol. Doors test the rest."""

import asyncio
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from neuronpipe.core.addresses import is_listened_on
from neuronpipe.core.errors import SetupError
from neuronpipe.platform.process.listener import Listener
from neuronpipe.platform.process.settings import ProcessSettings
from neuronpipe.platform.tls import ServerTls, TlsFiles
from tests.servers.certificates import Authority, replace
from tests.suite.waiting import happens


@pytest.fixture
def socket_file() -> Iterator[Path]:
    """In a folder whose path is short enough for a socket's, which pytest's own may not be."""
    with TemporaryDirectory(prefix="np-") as name:
        yield Path(name) / "door.sock"


def _listener(path: Path) -> Listener:
    def refuse() -> None:
        raise AssertionError

    return Listener(f"unix:{path}", ProcessSettings(), [], asyncio.Protocol, refuse)


def _leave_behind(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))


async def test_a_connection_that_comes_as_the_process_ends_is_closed() -> None:
    begun: list[asyncio.Protocol] = []
    ended: list[str] = []

    def begin() -> asyncio.Protocol:
        begun.append(asyncio.Protocol())
        return begun[-1]

    def refuse() -> None:
        raise AssertionError

    limits = ProcessSettings()
    listener = Listener("127.0.0.1:0", limits, [], begin, refuse, lambda: ended.append("handshake"))
    port = listener.bind("--listen")
    listener.listen()
    with socket.create_connection(("127.0.0.1", port), 10) as caller:
        listener.close()  # which accepts those that wait
        listener.end_handshakes()
        assert len(begun) == 1
        assert await asyncio.to_thread(caller.recv, 1) == b""
    assert (listener.handshakes, ended) == ({}, ["handshake"])


async def test_refused_certificates_of_callers_are_logged_with_the_reason_once_a_second(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = Authority()
    authority.issue().write(tmp_path)
    authority.issue(days=(-2, -1)).write(tmp_path / "caller")
    replace(tmp_path / "ca.crt", authority.certificate)
    tls = ServerTls(TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt"))
    ended: list[str] = []

    def refuse() -> None:
        raise AssertionError

    settings = ProcessSettings()
    listener = Listener(
        "127.0.0.1:0", settings, [], asyncio.Protocol, refuse, lambda: ended.append("handshake"), tls=tls.context
    )
    port = listener.bind("--listen")
    listener.listen()

    def connect(folder: Path | None = None) -> None:
        context = ssl.create_default_context(cadata=authority.certificate.decode())
        if folder:
            context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
        with (
            suppress(OSError),
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as secured,
        ):
            secured.recv(1)

    for folder in [tmp_path / "caller"] * 3 + [None]:
        await asyncio.to_thread(connect, folder)
    await happens(lambda: len(ended) == 4)
    listener.close()
    assert [(record.getMessage(), vars(record)["fields"]) for record in caplog.records] == [
        ("a caller's TLS certificate is refused", {"reason": "certificate has expired"})
    ]


async def test_of_processes_that_start_at_one_path_together_one_has_it(socket_file: Path) -> None:
    """In threads, each of which has a lock of its own, as processes have."""
    starters = 4
    for _ in range(50):
        _leave_behind(socket_file)
        together, bound = threading.Barrier(starters), list[Listener]()

        def start(together: threading.Barrier = together, bound: list[Listener] = bound) -> None:
            listener = _listener(socket_file)
            together.wait()
            with suppress(SetupError):
                listener.bind("--listen")
                bound.append(listener)

        threads = [threading.Thread(target=start) for _ in range(starters)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(bound) == 1
        assert is_listened_on(str(socket_file))
        bound[0].close()
        assert not socket_file.exists()


async def test_a_socket_that_took_the_place_of_its_own_is_not_removed(socket_file: Path) -> None:
    first, second = _listener(socket_file), _listener(socket_file)
    first.bind("--listen")
    socket_file.unlink()
    second.bind("--listen")
    first.close()
    assert is_listened_on(str(socket_file))
    second.close()
    assert not socket_file.exists()


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_socket_whose_file_somebody_has_removed_is_closed(socket_file: Path, is_there: bool) -> None:
    listener = _listener(socket_file)
    listener.bind("--listen")
    socket_file.unlink()
    if is_there:
        socket_file.write_text("a diary")
    listener.close()
    assert socket_file.exists() == is_there
