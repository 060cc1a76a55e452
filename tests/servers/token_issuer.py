"""An issuer of tokens: its keys, as a JWKS shows them, and what it signs."""

import json
import time
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

ISSUER, AUDIENCE = "https://issuer.test", "neuronpipe"


class Issuer:
    """Signs with RS256 as `rsa` and with ES256 as `ec`."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {
            "rsa": rsa.generate_private_key(public_exponent=65537, key_size=2048),
            "ec": ec.generate_private_key(ec.SECP256R1()),
        }

    def jwks(self, *names: str) -> bytes:
        """Returns the public keys, or some of them."""
        return json.dumps({"keys": [self.public(name) for name in names or self.keys]}).encode()

    def public(self, name: str) -> dict[str, Any]:
        """Returns a public key."""
        kind: Any = RSAAlgorithm if name == "rsa" else ECAlgorithm
        return {**kind.to_jwk(self.keys[name].public_key(), as_dict=True), "kid": name, "use": "sig"}

    def sign(self, name: str = "ec", *, head: dict[str, Any] | None = None, **claims: Any) -> str:
        """Signs a token that is valid for an hour, with these claims. A claim of None is left out."""
        now_s = int(time.time())
        told = {"iss": ISSUER, "aud": AUDIENCE, "sub": "ann", "tenant": "search", "exp": now_s + 3600, **claims}
        told = {claim: value for claim, value in told.items() if value is not None}
        algorithm = "RS256" if name == "rsa" else "ES256"
        return jwt.encode(told, self.keys[name], algorithm, {"kid": name} if head is None else head)
