"""platform/tls/server.py: Python's own servers show the current certificate, and ask for one of current authorities."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509

from neuronpipe.platform.tls.files import TlsFiles
from neuronpipe.platform.tls.server import ServerTls, running_server_tls
from tests.certificates import Authority, Issued, replace

_AUTHORITY = Authority()


@contextmanager
def _echoing(tls: ServerTls) -> Iterator[int]:
    """A port that says what it hears, once, on each connection."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            try:
                with tls.context.wrap_socket(connection, server_side=True) as secured:
                    secured.sendall(secured.recv(100))
            except OSError:
                connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def _shown(port: int, name: str | None, client: Issued | None = None, folder: Path | None = None) -> int:
    """The number of the certificate that the server shows a caller, who is answered."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = name is not None
    context.load_verify_locations(cadata=_AUTHORITY.certificate.decode())
    if client and folder:
        client.write(folder)
        context.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    with (
        socket.create_connection(("127.0.0.1", port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname=name) as secured,
    ):
        secured.sendall(b"hello")
        if secured.recv(5) != b"hello":
            raise ConnectionError("the server has ended the connection")
        shown = secured.getpeercert(binary_form=True)
        assert shown
        return x509.load_der_x509_certificate(shown).serial_number


@pytest.mark.parametrize("name", ["localhost", None], ids=["by name", "without a name"])
def test_each_connection_gets_the_current_certificate(tmp_path: Path, name: str | None) -> None:
    first = _AUTHORITY.issue().write(tmp_path)
    tls = ServerTls(TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key"))
    with _echoing(tls) as port:
        assert _shown(port, name) == first.number
        second = _AUTHORITY.issue().write(tmp_path)
        tls.watched.look()
        assert _shown(port, name) == second.number
        (tmp_path / "tls.key").write_bytes(first.key)
        tls.watched.look()
        assert _shown(port, name) == second.number


def test_callers_show_a_certificate_of_the_current_authorities(tmp_path: Path) -> None:
    _AUTHORITY.issue().write(tmp_path)
    replace(tmp_path / "ca.crt", _AUTHORITY.certificate)
    tls = ServerTls(TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt"))
    own, other = _AUTHORITY.issue("a.example"), Authority("another").issue("a.example")
    with _echoing(tls) as port:
        assert _shown(port, "localhost", own, tmp_path / "caller")
        for refused in (None, other):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                _shown(port, "localhost", refused, tmp_path / "caller")
        new = Authority("the next one")
        replace(tmp_path / "ca.crt", new.certificate)
        tls.watched.look()
        assert _shown(port, "localhost", new.issue("a.example"), tmp_path / "caller")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            _shown(port, "localhost", own, tmp_path / "caller")


def test_a_server_without_files_has_no_tls() -> None:
    with running_server_tls(None) as tls:
        assert tls is None
