"""platform/tls/files.py: files that would not work in a handshake are refused, by name and with the reason."""

import time
from pathlib import Path

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.platform.tls.files import LoadedTls, Side, TlsFiles, watched_tls
from tests.certificates import Authority, Issued, replace

_AUTHORITY = Authority()
_DAY_S = 86_400


def _files(folder: Path, issued: Issued, ca: bytes = _AUTHORITY.certificate) -> TlsFiles:
    issued.write(folder)
    replace(folder / "ca.crt", ca)
    return TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")


def _load(files: TlsFiles, side: Side) -> LoadedTls:
    return watched_tls(files, side).value


@pytest.mark.parametrize("side", ["server", "client"])
@pytest.mark.parametrize("usages", ["both", "own", "none"])
def test_a_good_pair_is_read(tmp_path: Path, side: Side, usages: str) -> None:
    issued = _AUTHORITY.issue(
        "gateway.example", days=(-1, 30), usages={"both": ("server", "client"), "own": (side,), "none": ()}[usages]
    )
    loaded = _load(_files(tmp_path, issued), side)
    assert (loaded.certificate, loaded.key, loaded.ca) == (issued.certificate, issued.key, _AUTHORITY.certificate)
    assert loaded.expires_s == pytest.approx(time.time() + 30 * _DAY_S, abs=60)
    assert (loaded.context is not None) is (side == "server")


def test_the_certificates_of_intermediate_authorities_may_follow(tmp_path: Path) -> None:
    issued = _AUTHORITY.issue()
    chain = Issued(issued.certificate + _AUTHORITY.certificate, issued.key, issued.number)
    assert _load(_files(tmp_path, chain), "server").certificate == chain.certificate


@pytest.mark.parametrize("side", ["server", "client"])
@pytest.mark.parametrize(
    ("days", "reason"), [((-30, -1), "certificate has expired"), ((1, 30), "certificate is not yet valid")]
)
def test_a_certificate_out_of_its_time_is_refused(
    tmp_path: Path, side: Side, days: tuple[float, float], reason: str
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
    with pytest.raises(
        SetupError, match=f"^TLS key {files.key}: is not the key of the certificate in {files.certificate}$"
    ):
        _load(files, "server")


def test_a_key_that_peers_would_find_too_short_is_refused(tmp_path: Path) -> None:
    files = _files(tmp_path, _AUTHORITY.issue(rsa_bits=1024))
    with pytest.raises(SetupError, match=f"^TLS certificate {files.certificate}: is too weak for OpenSSL: EE_KEY_TOO"):
        _load(files, "server")


def test_keys_of_rsa_are_taken(tmp_path: Path) -> None:
    _load(_files(tmp_path, _AUTHORITY.issue(rsa_bits=2048)), "server")


@pytest.mark.parametrize("name", ["certificate", "key", "ca"])
@pytest.mark.parametrize("damage", ["half", "empty", "no PEM", "directory", "missing"])
def test_a_file_that_holds_no_pem_is_refused_by_its_name(tmp_path: Path, name: str, damage: str) -> None:
    files = _files(tmp_path, _AUTHORITY.issue())
    damaged = Path(getattr(files, name))
    content = damaged.read_bytes()
    damaged.unlink()
    if damage == "directory":
        damaged.mkdir()
    elif damage != "missing":
        damaged.write_bytes({"half": content[: len(content) // 2], "empty": b"", "no PEM": b"\xff\x00 text"}[damage])
    reasons = {"directory": "Is a directory", "missing": "No such file or directory"}
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
