"""gateway/callers/authenticator.py: who is let in, and what the others learn."""

import logging
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.core.callers import Caller
from neuronpipe.core.errors import SetupError, Unauthenticated
from neuronpipe.core.metrics import Counter, Meters
from neuronpipe.core.names import Metrics
from neuronpipe.gateway.callers.authenticator import Authenticator
from neuronpipe.gateway.callers.keys import KeyRecord, create_key, revoke_keys
from neuronpipe.gateway.callers.settings import CallerSettings, check_exposure
from neuronpipe.platform.process.door import Credentials
from tests.servers.token_issuer import AUDIENCE, ISSUER, Issuer


class _Guarded:
    """An authenticator that accepts a key, tokens of an issuer, and a certificate."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.issuer = Issuer()
        self.meters = Meters()
        (folder / "jwks").write_bytes(self.issuer.jwks())
        self.key = create_key(folder / "keys", "search", "ci")
        given = CallerSettings(
            api_keys=folder / "keys", jwks=folder / "jwks", jwt_issuer=ISSUER, jwt_audience=AUDIENCE, **settings
        )
        self._authenticator = Authenticator(
            given, lambda name: "search" if name == "spiffe://test/search" else "", self.meters
        )
        self.keys = folder / "keys"

    def rewrite_keys(self, content: bytes) -> str:
        """Changes the file of keys, and returns the problem of the new content."""
        self.keys.write_bytes(content)
        file = self._authenticator.files[0]
        file.look()
        return file.problem

    def identify(self, authorization: str = "", *names: str) -> Caller:
        return self._authenticator.identify(Credentials(authorization, names))

    def act_for(self, tenant: str) -> Caller:
        self._authenticator._acts_for_others = lambda name: True
        return self._authenticator.identify(Credentials(f"Bearer {self.key}", on_behalf=tenant))

    def count(self, outcome: str) -> float:
        counter = self.meters.counter(Metrics.AUTHENTICATIONS, outcome)
        assert isinstance(counter, Counter)
        return counter.value


@pytest.fixture
def guarded(tmp_path: Path) -> _Guarded:
    return _Guarded(tmp_path)


def test_a_key_names_its_tenant(guarded: _Guarded) -> None:
    assert guarded.identify(f"Bearer {guarded.key}") == Caller("ci", "search", "search")
    assert guarded.count("accepted") == 1


@pytest.mark.parametrize("content", [b"", b"\n", b"{", bytes(200)], ids=["empty", "blank", "half", "zeros"])
def test_a_file_of_keys_cut_short_refuses_no_caller(guarded: _Guarded, content: bytes) -> None:
    assert guarded.rewrite_keys(content)
    assert guarded.identify(f"Bearer {guarded.key}")
    assert guarded.rewrite_keys(content + b"\n")
    assert guarded.identify(f"Bearer {guarded.key}"), "also at the second look"


def test_a_comment_alone_locks_all_callers_out(guarded: _Guarded) -> None:
    assert not guarded.rewrite_keys(b"# closed\n")
    with pytest.raises(Unauthenticated):
        guarded.identify(f"Bearer {guarded.key}")
    assert not guarded.rewrite_keys(b""), "without keys before, an empty file says nothing new"


def test_a_revoked_last_key_is_refused(guarded: _Guarded) -> None:
    revoke_keys(guarded.keys, lambda key: True)
    assert not guarded.rewrite_keys(guarded.keys.read_bytes())
    with pytest.raises(Unauthenticated):
        guarded.identify(f"Bearer {guarded.key}")


def test_a_token_names_its_tenant(guarded: _Guarded) -> None:
    assert guarded.identify(f"Bearer {guarded.issuer.sign()}") == Caller("ann", "search", "search")


def test_a_certificate_names_its_tenant(guarded: _Guarded) -> None:
    found = guarded.identify("", "unknown.test", "spiffe://test/search")
    assert found == Caller("spiffe://test/search", "search", "search")


def test_the_scheme_is_read_in_any_case(guarded: _Guarded) -> None:
    assert guarded.identify(f"bearer {guarded.key}").tenant == "search"


def test_a_key_that_has_expired_is_refused(guarded: _Guarded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KeyRecord, "has_expired", True)
    with pytest.raises(Unauthenticated):
        guarded.identify(f"Bearer {guarded.key}")
    assert guarded.count("expired") == 1


@pytest.mark.parametrize("tenant", [".", "..", "a\nb", "x" * 257])
def test_a_tenant_comes_in_under_a_valid_name_only(guarded: _Guarded, tenant: str) -> None:
    with pytest.raises(Unauthenticated):
        guarded.identify(f"Bearer {guarded.issuer.sign(tenant=tenant)}")
    assert guarded.count("tenant_name") == 1


@pytest.mark.parametrize("tenant", ["..", "a\nb", "x" * 257])
def test_a_worker_acts_for_tenants_with_valid_names_only(guarded: _Guarded, tenant: str) -> None:
    with pytest.raises(Unauthenticated):
        guarded.act_for(tenant)
    assert guarded.act_for("mallory/eu").tenant == "mallory/eu"


def test_callers_share_one_cache_where_the_setting_says_so(tmp_path: Path) -> None:
    guarded = _Guarded(tmp_path, shared_cache=True)
    assert guarded.identify(f"Bearer {guarded.key}").cache_scope == ""


@pytest.mark.parametrize(
    ("authorization", "reason"),
    [
        ("", "missing"),
        ("Bearer ", "malformed"),
        ("Bearer", "malformed"),
        ("Basic YTpi", "malformed"),
        ("Bearer np_0123456789abcdef_x", "unknown_key"),
        ("Bearer np_", "unknown_key"),
        ("Bearer abc", "malformed"),
        ("Bearer é", "malformed"),
    ],
)
def test_all_others_learn_the_same_and_the_metric_has_the_reason(
    guarded: _Guarded, authorization: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(Unauthenticated) as raised:
        guarded.identify(authorization)
    assert raised.value.message == "no valid API key, token or client certificate came with the call"
    assert guarded.count(reason) == 1
    assert caplog.records[-1].fields == {"reason": reason}  # type: ignore[attr-defined]


def test_an_expired_token_is_told_apart_in_the_metric_only(guarded: _Guarded) -> None:
    with pytest.raises(Unauthenticated) as expired:
        guarded.identify(f"Bearer {guarded.issuer.sign(exp=1)}")
    with pytest.raises(Unauthenticated) as missing:
        guarded.identify()
    assert expired.value.message == missing.value.message
    assert guarded.count("expired") == 1


def test_a_certificate_that_no_tenant_has_is_refused(guarded: _Guarded) -> None:
    with pytest.raises(Unauthenticated):
        guarded.identify("", "unknown.test")
    assert guarded.count("unknown_certificate") == 1


def test_a_bad_key_is_not_made_good_by_a_certificate(guarded: _Guarded) -> None:
    with pytest.raises(Unauthenticated):
        guarded.identify("Bearer np_x_y", "spiffe://test/search")


def test_a_flood_of_refusals_is_logged_once_a_second(guarded: _Guarded, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            with pytest.raises(Unauthenticated):
                guarded.identify()
    assert len(caplog.records) < 50
    assert guarded.count("missing") == 100


def test_without_a_jwks_no_token_is_accepted(tmp_path: Path) -> None:
    create_key(tmp_path / "keys", "a", "a")
    guard = Authenticator(CallerSettings(api_keys=tmp_path / "keys"), lambda name: "", Meters())
    with pytest.raises(Unauthenticated):
        guard.identify(Credentials(f"Bearer {Issuer().sign()}"))


@pytest.mark.parametrize("missing", ["jwt_issuer", "jwt_audience"])
def test_tokens_need_an_issuer_and_an_audience(tmp_path: Path, missing: str) -> None:
    (tmp_path / "jwks").write_bytes(Issuer().jwks())
    given: dict[str, Any] = {"jwt_issuer": ISSUER, "jwt_audience": AUDIENCE, missing: ""}
    with pytest.raises(SetupError, match="needs jwt_issuer and jwt_audience"):
        Authenticator(CallerSettings(jwks=tmp_path / "jwks", **given), lambda name: "", Meters())


@pytest.mark.parametrize(
    "address", ["0.0.0.0:1", "[::]:1", ":::1", "10.0.0.1:1", "gateway:1", "[fe80::1]:1", "127.0.0.1.example:1"]
)
def test_an_address_that_others_reach_needs_authentication(address: str) -> None:
    with pytest.raises(SetupError, match="can be reached from other machines"):
        check_exposure(CallerSettings(), "127.0.0.1:1", address)
    check_exposure(CallerSettings(insecure_public=True), address)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.0.1:1", "[::1]:1", "::1:1", "localhost:1", ""])
def test_an_address_of_this_machine_needs_none(address: str) -> None:
    check_exposure(CallerSettings(), address)
