"""gateway/callers/tokens.py: which tokens are valid."""

import base64
import json
import time
from collections.abc import Callable
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from jwt.algorithms import RSAAlgorithm

from neuronpipe.core.errors import SetupError
from neuronpipe.gateway.callers.keys import CredentialsRefused
from neuronpipe.gateway.callers.tokens import TokenRules, TokenVerifier
from tests.servers.token_issuer import AUDIENCE, ISSUER, Issuer

_RULES = TokenRules(ISSUER, AUDIENCE, clock_skew_s=30, tenant_claim="tenant")


@pytest.fixture(scope="module")
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def verifier(issuer: Issuer) -> TokenVerifier:
    return TokenVerifier(issuer.jwks(), _RULES)


def _reason(verifier: TokenVerifier, token: str) -> str:
    with pytest.raises(CredentialsRefused) as raised:
        verifier.identify(token)
    return str(raised.value)


@pytest.mark.parametrize("key", ["rsa", "ec"])
def test_a_valid_token_names_its_subject_and_tenant(issuer: Issuer, verifier: TokenVerifier, key: str) -> None:
    for _ in range(2):  # the second time it is known
        identity = verifier.identify(issuer.sign(key))
        assert (identity.subject, identity.tenant) == ("ann", "search")


def test_one_of_several_audiences_is_enough(issuer: Issuer, verifier: TokenVerifier) -> None:
    assert verifier.identify(issuer.sign(aud=["other", AUDIENCE])).tenant == "search"


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"exp": 1}, "expired"),
        ({"exp": time.time() - 60}, "expired"),
        ({"nbf": time.time() + 3600}, "not_yet_valid"),
        ({"iat": time.time() + 3600}, "not_yet_valid"),
        ({"aud": "other"}, "wrong_audience"),
        ({"iss": "https://other.test"}, "wrong_issuer"),
        ({"exp": None}, "missing_claim"),
        ({"aud": None}, "missing_claim"),
        ({"iss": None}, "missing_claim"),
        ({"sub": None}, "missing_claim"),
        ({"tenant": None}, "no_tenant"),
        ({"tenant": ""}, "no_tenant"),
        ({"tenant": ["search"]}, "no_tenant"),
        ({"exp": "soon"}, "malformed"),
        ({"exp": int("9" * 400)}, "malformed"),
    ],
)
def test_a_token_is_refused_for_its_claims(
    issuer: Issuer, verifier: TokenVerifier, claims: dict[str, Any], reason: str
) -> None:
    assert _reason(verifier, issuer.sign(**claims)) == reason


def test_clocks_may_differ_by_the_skew(issuer: Issuer, verifier: TokenVerifier) -> None:
    assert verifier.identify(issuer.sign(exp=time.time() - 10)).tenant == "search"
    assert verifier.identify(issuer.sign(nbf=time.time() + 10)).tenant == "search"


def test_a_known_token_expires(issuer: Issuer, verifier: TokenVerifier, monkeypatch: pytest.MonkeyPatch) -> None:
    token = issuer.sign()
    verifier.identify(token)
    later_s = time.time() + 3600 + 31
    monkeypatch.setattr(time, "time", lambda: later_s)
    assert _reason(verifier, token) == "expired"


def test_a_signature_of_another_key_is_refused(issuer: Issuer, verifier: TokenVerifier) -> None:
    assert _reason(verifier, Issuer().sign("ec")) == "wrong_signature"
    assert _reason(verifier, Issuer().sign("rsa")) == "wrong_signature"


def test_a_changed_token_is_refused(issuer: Issuer, verifier: TokenVerifier) -> None:
    head, claims, signature = issuer.sign().split(".")
    changed = json.loads(base64.urlsafe_b64decode(claims + "=="))
    changed["tenant"] = "another"
    claims = base64.urlsafe_b64encode(json.dumps(changed).encode()).decode().rstrip("=")
    assert _reason(verifier, f"{head}.{claims}.{signature}") == "wrong_signature"


def test_a_token_without_signature_is_refused(issuer: Issuer, verifier: TokenVerifier) -> None:
    claims = jwt.decode(issuer.sign(), options={"verify_signature": False})
    for kid in ("ec", "rsa"):
        assert _reason(verifier, jwt.encode(claims, "", "none", {"kid": kid})) == "wrong_algorithm"


def test_the_public_key_is_no_shared_secret(issuer: Issuer, verifier: TokenVerifier) -> None:
    claims = jwt.decode(issuer.sign(), options={"verify_signature": False})
    # PyJWT itself refuses a key in PEM form as a secret; an attacker's library does not.
    modulus = issuer.public("rsa")["n"]
    assert _reason(verifier, jwt.encode(claims, modulus, "HS256", {"kid": "rsa"})) == "wrong_algorithm"


def test_the_algorithm_is_the_keys_not_the_tokens(issuer: Issuer, verifier: TokenVerifier) -> None:
    claims = jwt.decode(issuer.sign(), options={"verify_signature": False})
    for algorithm in ("RS384", "PS256"):
        token = jwt.encode(claims, issuer.keys["rsa"], algorithm, {"kid": "rsa"})
        assert _reason(verifier, token) == "wrong_algorithm"


# A header of JSON that is nested more than Python's functions may be.
_NESTED = base64.urlsafe_b64encode(b'{"a":' * 2000 + b"0" + b"}" * 2000).decode().rstrip("=") + ".e30.e30"


@pytest.mark.parametrize("token", ["", "a.b.c", "abc", "é.é.é", "." * 50, _NESTED])
def test_what_is_no_token_is_refused(verifier: TokenVerifier, token: str) -> None:
    assert _reason(verifier, token) == "malformed"


def test_a_key_that_is_not_in_the_file_is_refused(issuer: Issuer) -> None:
    only_rsa = TokenVerifier(issuer.jwks("rsa"), _RULES)
    assert _reason(only_rsa, issuer.sign("ec")) == "unknown_signing_key"


def test_the_only_key_needs_no_id(issuer: Issuer) -> None:
    key = issuer.public("ec")
    del key["kid"]
    verifier = TokenVerifier(json.dumps({"keys": [key]}).encode(), _RULES)
    assert verifier.identify(issuer.sign("ec", head={})).tenant == "search"


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'{"keys": 1}', b'{"keys": [1]}', b"\xff", b"[" * 10_000]
)
def test_what_is_no_jwks_is_told(content: bytes) -> None:
    with pytest.raises(SetupError, match="is no JWKS"):
        TokenVerifier(content, _RULES)


def test_keys_that_are_too_weak_or_secret_are_told(issuer: Issuer) -> None:
    weak = RSAAlgorithm.to_jwk(
        rsa.generate_private_key(public_exponent=65537, key_size=1024).public_key(), as_dict=True
    )
    shared = {"kty": "oct", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"}
    private = RSAAlgorithm.to_jwk(issuer.keys["rsa"], as_dict=True)
    for key in (weak, shared, private):
        with pytest.raises(SetupError, match="key 2 is neither an RSA public key of 2048 bits nor one of P-256"):
            TokenVerifier(json.dumps({"keys": [issuer.public("ec"), {**key, "kid": "x"}]}).encode(), _RULES)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (lambda rsa, ec: [{**rsa, "use": "enc"}], "has no key for signatures"),
        (lambda rsa, ec: [{**rsa, "alg": "RS512"}], "key 1 is for 'RS512'"),
        (lambda rsa, ec: [ec, {"kty": "EC", "crv": "P-256", "kid": "x"}], "key 2 cannot be read"),
        (lambda rsa, ec: [ec, {**rsa, "kid": "ec"}], "key 2 has no `kid` of its own"),
    ],
    ids=["of none for signatures", "for another algorithm", "that cannot be read", "of one id"],
)
def test_keys_are_told(issuer: Issuer, keys: Callable[..., list[dict[str, Any]]], problem: str) -> None:
    content = json.dumps({"keys": keys(issuer.public("rsa"), issuer.public("ec"))}).encode()
    with pytest.raises(SetupError, match=problem):
        TokenVerifier(content, _RULES)
