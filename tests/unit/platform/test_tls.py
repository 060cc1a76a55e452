"""platform/tls.py: files that would not work in a handshake are refused, by name and with the reason.

Python's own servers show the current certificate, and ask for one of current authorities.
"""

import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509

from neuronpipe.core.errors import SetupError
from neuronpipe.platform.tls import LoadedTls, ServerTls, TlsFiles, TlsSide, running_server_tls, watched_tls
from tests.servers.certificates import Authority, Issued, replace

_AUTHORITY = Authority()
_DAY_S = 86_400


def _files(folder: Path, issued: Issued) -> TlsFiles:
    issued.write(folder)
    replace(folder / "ca.crt", _AUTHORITY.certificate)
    return TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")


def _load(files: TlsFiles, side: TlsSide) -> LoadedTls:
    return watched_tls(files, side).value


@pytest.mark.parametrize("side", ["server", "client"])
@pytest.mark.parametrize("usages", ["both", "own", "none"])
def test_a_good_pair_is_read(tmp_path: Path, side: TlsSide, usages: str) -> None:
    issued = _AUTHORITY.issue(
        "gateway.example", days=(-1, 30), usages={"both": ("server", "client"), "own": (side,), "none": ()}[usages]
    )
    loaded = _load(_files(tmp_path, issued), side)
    assert (loaded.certificate, loaded.key, loaded.ca) == (issued.certificate, issued.key, _AUTHORITY.certificate)
    assert loaded.expires_s == pytest.approx(time.time() + 30 * _DAY_S, abs=60)


def test_the_certificates_of_intermediate_authorities_may_follow(tmp_path: Path) -> None:
    issued = _AUTHORITY.issue()
    chain = Issued(issued.certificate + _AUTHORITY.certificate, issued.key, issued.number)
    assert _load(_files(tmp_path, chain), "server").certificate == chain.certificate


@pytest.mark.parametrize("side", ["server", "client"])
@pytest.mark.parametrize(
    ("days", "reason"), [((-30, -1), "certificate has expired"), ((1, 30), "certificate is not yet valid")]
)
def test_a_certificate_out_of_its_time_is_refused(
    tmp_path: Path, side: TlsSide, days: tuple[float, float], reason: str
) -> None:
    """Also where its usage is for one side only, which OpenSSL looks at first."""
    files = _files(tmp_path, _AUTHORITY.issue(days=days, usages=(side,)))
    with pytest.raises(SetupError, match=f"^TLS certificate {files.certificate}: {reason}$"):
        _load(files, side)


def test_a_certificate_that_is_not_for_this_side_is_refused(tmp_path: Path) -> None:
    files = _files(tmp_path, _AUTHORITY.issue(usages=("client",)))
    with pytest.raises(SetupError, match=f"^TLS certificate {files.certificate}: .*purpose$"):
        _load(files, "server")
    _load(files, "client")


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    mixed = Issued(_AUTHORITY.issue().certificate, _AUTHORITY.issue().key, 0)
    files = _files(tmp_path, mixed)
    problem = f"^TLS key {files.key}: is not the key of the certificate in {files.certificate}$"
    with pytest.raises(SetupError, match=problem):
        _load(files, "server")


def test_a_key_that_peers_would_find_too_short_is_refused(tmp_path: Path) -> None:
    files = _files(tmp_path, _AUTHORITY.issue(rsa_bits=1024))
    with pytest.raises(SetupError, match=f"^TLS certificate {files.certificate}: is too weak for OpenSSL: EE_KEY_TOO"):
        _load(files, "server")


def test_keys_of_rsa_are_taken(tmp_path: Path) -> None:
    _load(_files(tmp_path, _AUTHORITY.issue(rsa_bits=2048)), "server")


@pytest.mark.parametrize("name", ["certificate", "key", "ca"])
@pytest.mark.parametrize("damage", ["half", "empty", "no PEM", "directory", "pipe", "missing"])
def test_a_file_that_holds_no_pem_is_refused_by_its_name(tmp_path: Path, name: str, damage: str) -> None:
    files = _files(tmp_path, _AUTHORITY.issue())
    damaged = Path(getattr(files, name))
    content = damaged.read_bytes()
    damaged.unlink()
    if damage == "directory":
        damaged.mkdir()
    elif damage == "pipe":
        os.mkfifo(damaged)
    elif damage != "missing":
        damaged.write_bytes({"half": content[: len(content) // 2], "empty": b"", "no PEM": b"\xff\x00 text"}[damage])
    reasons = {"directory": "Is a directory", "pipe": "is a pipe or a device", "missing": "No such file or directory"}
    with pytest.raises(SetupError) as caught:
        _load(files, "server")
    assert str(damaged) in str(caught.value)
    assert reasons.get(damage, "does not hold") in str(caught.value)


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(tmp_path: Path) -> None:
    files = _files(tmp_path, _AUTHORITY.issue(passphrase=b"secret"))
    with pytest.raises(SetupError, match=f"^TLS key {files.key}: does not hold a private key .* without a passphrase$"):
        _load(files, "server")


@pytest.mark.parametrize("given", [{"certificate": "a"}, {"key": "a"}])
def test_a_certificate_without_its_key_is_refused(given: dict[str, str]) -> None:
    with pytest.raises(SetupError, match="belong together"):
        TlsFiles(**given)


def test_a_client_may_have_authorities_only(tmp_path: Path) -> None:
    replace(tmp_path / "ca.crt", _AUTHORITY.certificate)
    loaded = _load(TlsFiles(ca=tmp_path / "ca.crt"), "client")
    assert (loaded.certificate, loaded.key, loaded.ca) == (None, None, _AUTHORITY.certificate)


def test_no_key_is_in_what_is_printed(tmp_path: Path) -> None:
    issued = _AUTHORITY.issue()
    secret = issued.key.splitlines()[1].decode()
    assert secret not in repr(_load(_files(tmp_path, issued), "server"))


@pytest.mark.parametrize("damage", ["half a key", "another key", "expired", "unreadable"])
def test_the_last_good_pair_stays(tmp_path: Path, damage: str) -> None:
    good = _AUTHORITY.issue()
    watched = watched_tls(_files(tmp_path, good), "server")
    if damage == "expired":
        _AUTHORITY.issue(days=(-2, -1)).write(tmp_path)
    elif damage == "unreadable":
        (tmp_path / "tls.key").unlink()
    else:
        new = good.key[:100] if damage == "half a key" else _AUTHORITY.issue().key
        (tmp_path / "tls.key").write_bytes(new)
    watched.look()
    assert watched.value.key == good.key
    assert str(tmp_path) in watched.problem
    better = _AUTHORITY.issue().write(tmp_path)
    watched.look()
    assert (watched.value.key, watched.problem) == (better.key, "")


def test_a_certificate_that_expires_in_use_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logged() -> list[object]:
        event = "the TLS certificate in use has expired"
        return [vars(record)["fields"] for record in caplog.records if record.getMessage() == event]

    files = _files(tmp_path, _AUTHORITY.issue(days=(-1, 1)))
    watched = watched_tls(files, "server")
    watched.look()
    assert not logged()
    with monkeypatch.context() as later:
        now_s = time.time()
        later.setattr(time, "time", lambda: now_s + 2 * _DAY_S)
        watched.look()
        watched.look()
    assert logged() == [{"side": "server", "file": str(files.certificate)}]
    _AUTHORITY.issue().write(tmp_path)
    watched.look()
    assert len(logged()) == 1


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
    own, foreign = _AUTHORITY.issue("a.example"), Authority("another").issue("a.example")
    with _echoing(tls) as port:
        assert _shown(port, "localhost", own, tmp_path / "caller")
        for refused in (None, foreign):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                _shown(port, "localhost", refused, tmp_path / "caller")
        new = Authority("the next one")
        replace(tmp_path / "ca.crt", new.certificate)
        tls.watched.look()
        assert _shown(port, "localhost", new.issue("a.example"), tmp_path / "caller")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            _shown(port, "localhost", own, tmp_path / "caller")


def test_a_revoked_certificate_is_refused_once_the_list_is_read(tmp_path: Path) -> None:
    _AUTHORITY.issue().write(tmp_path)
    replace(tmp_path / "ca.crt", _AUTHORITY.certificate)
    replace(tmp_path / "ca.crl", _AUTHORITY.revoke())
    files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt", tmp_path / "ca.crl")
    tls, good, leaked = ServerTls(files), _AUTHORITY.issue("a.example"), _AUTHORITY.issue("b.example")
    with _echoing(tls) as port:
        assert _shown(port, "localhost", leaked, tmp_path / "caller")
        replace(tmp_path / "ca.crl", _AUTHORITY.revoke(leaked))
        tls.watched.look()
        assert _shown(port, "localhost", good, tmp_path / "caller")
        with pytest.raises((ssl.SSLError, ConnectionError)):
            _shown(port, "localhost", leaked, tmp_path / "caller")


def test_a_file_that_is_no_revocation_list_is_refused(tmp_path: Path) -> None:
    files = _files(tmp_path, _AUTHORITY.issue())
    for content in (b"", _AUTHORITY.certificate, b"-----BEGIN X509 CRL-----\nnonsense"):
        replace(tmp_path / "ca.crl", content)
        with pytest.raises(SetupError, match="does not hold a certificate revocation list"):
            _load(TlsFiles(files.certificate, files.key, files.ca, tmp_path / "ca.crl"), "server")


def test_a_server_without_files_has_no_tls() -> None:
    with running_server_tls(None) as tls:
        assert tls is None
