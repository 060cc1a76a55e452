"""JSON Web Tokens (RFC 7519), checked with the keys of a local JWKS file. The only file that imports PyJWT."""

import json
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from neuronpipe.core.callers import is_tenant_name
from neuronpipe.core.errors import SetupError
from neuronpipe.gateway.callers.keys import CredentialsRefused

_MIN_RSA_BITS = 2048
# The number of verified tokens that are kept. A client sends the same token for minutes or hours, and verifying a
# signature takes up to 100 µs.
_MAX_VERIFIED = 4096
_REASONS: dict[type[Exception], str] = {
    jwt.ExpiredSignatureError: "expired",
    jwt.ImmatureSignatureError: "not_yet_valid",
    jwt.InvalidIssuedAtError: "not_yet_valid",
    jwt.InvalidAudienceError: "wrong_audience",
    jwt.InvalidIssuerError: "wrong_issuer",
    jwt.InvalidSignatureError: "wrong_signature",
    jwt.InvalidAlgorithmError: "wrong_algorithm",
    jwt.MissingRequiredClaimError: "missing_claim",
}


@dataclass(frozen=True, slots=True)
class TokenRules:
    """The claims that a token needs in addition to a valid signature. `tenant_claim`: the claim that names the tenant.
    `clock_skew_s`: the largest difference between the clocks of issuers and this clock.
    """

    issuer: str
    audience: str
    tenant_claim: str
    clock_skew_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Identity:
    """The subject and the tenant that a token names. `expires_s`: by time.time()."""

    subject: str
    tenant: str
    expires_s: float


class TokenVerifier:
    """Verifies tokens signed with RS256 or ES256. A changed file of keys has a new verifier."""

    def __init__(self, content: bytes, rules: TokenRules) -> None:
        """`content`: a JWKS (RFC 7517). Raises SetupError, which names the key that cannot be used."""
        self._rules = rules
        self._keys = dict(_read_keys(content))
        self._verified: OrderedDict[bytes, Identity] = OrderedDict()

    def identify(self, token: str) -> Identity:
        """Returns the identity that a valid token names. Raises CredentialsRefused."""
        digest = sha256(token.encode()).digest()
        identity = self._verified.get(digest)
        if identity is None:
            identity = self._verify(token)
            self._verified[digest] = identity
            if len(self._verified) > _MAX_VERIFIED:
                self._verified.popitem(last=False)
        elif time.time() >= identity.expires_s + self._rules.clock_skew_s:
            raise CredentialsRefused("expired")
        return identity

    def _verify(self, token: str) -> Identity:
        rules = self._rules
        try:
            key_id = jwt.get_unverified_header(token).get("kid", "")
            algorithm, key = self._keys.get(str(key_id)) or ("", None)
            if key is None:
                raise CredentialsRefused("unknown_signing_key")
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[algorithm],  # the key's own, never the token's choice
                audience=rules.audience,
                issuer=rules.issuer,
                leeway=rules.clock_skew_s,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
            expires_s = float(claims["exp"])
        # JSON in it may be nested without end, and may have a number that no float holds.
        except (jwt.InvalidTokenError, RecursionError, OverflowError) as error:
            raise CredentialsRefused(_REASONS.get(type(error), "malformed")) from None
        tenant = claims.get(rules.tenant_claim)
        if not isinstance(tenant, str) or not tenant:
            raise CredentialsRefused("no_tenant")
        if not is_tenant_name(tenant):
            raise CredentialsRefused("tenant_name")
        return Identity(str(claims["sub"]), tenant, expires_s)


def _read_keys(content: bytes) -> Mapping[str, tuple[str, Any]]:
    """Reads the algorithm and the key of each key id. A single key needs no key id, and neither do its tokens."""
    try:
        entries = json.loads(content)["keys"]
        entries = [entry for entry in entries if entry.get("use", "sig") == "sig"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SetupError("--jwks: is no JWKS, a JSON object with a list of `keys`") from error
    keys: dict[str, tuple[str, Any]] = {}
    for number, entry in enumerate(entries, 1):
        try:
            key = jwt.PyJWK(entry).key
        except (jwt.PyJWTError, ValueError, TypeError) as error:
            raise SetupError(f"--jwks: key {number} cannot be read") from error
        if isinstance(key, RSAPublicKey) and key.key_size >= _MIN_RSA_BITS:
            algorithm = "RS256"
        elif isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1):
            algorithm = "ES256"
        else:
            raise SetupError(
                f"--jwks: key {number} is neither an RSA public key of {_MIN_RSA_BITS} bits nor one of P-256"
            )
        if entry.get("alg", algorithm) != algorithm:
            raise SetupError(f"--jwks: key {number} is for {entry['alg']!r}; RS256 and ES256 are taken")
        key_id = str(entry.get("kid", ""))
        if key_id in keys or (not key_id and len(entries) > 1):
            raise SetupError(f"--jwks: key {number} has no `kid` of its own")
        keys[key_id] = algorithm, key
    if not keys:
        raise SetupError("--jwks: has no key for signatures")
    return keys
