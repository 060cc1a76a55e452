"""Signatures of bundles: ed25519 (RFC 8032) over the manifest, which contains the digest of every other file.

A signature is a file of the bundle, beside the manifest. Only this file of `bundles` imports cryptography.
"""

import os
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import Base64Bytes, Field, ValidationError

from neuronpipe.bundles.manifest import MANIFEST_FILE, SIGNATURE_FILE
from neuronpipe.core.errors import RefusedBundle, SetupError
from neuronpipe.core.files import read_file, replace_file, reporting_os_errors
from neuronpipe.core.model import Frozen

# Signed before the manifest's bytes, so that a signature of other data is never the signature of a bundle.
_CONTEXT = b"neuronpipe bundle signature 1\n"
_BEGIN, _END = "-----BEGIN ", "-----END PUBLIC KEY-----"
# Number of digits of a key's id in messages.
_SHOWN = 16


class _Signature(Frozen):
    """The content of a signature file. `key`: the id of the key that made the signature, with which it is verified."""

    key: str = Field(pattern=r"^[0-9a-f]{64}$")
    signature: Base64Bytes


class TrustedKeys:
    """Public keys by their ids. An id is the SHA-256 of the key's DER form, in hexadecimal."""

    def __init__(self, keys: Mapping[str, Ed25519PublicKey], source: str) -> None:
        self._keys = keys
        self._source = source

    @classmethod
    def read(cls, path: Path) -> "TrustedKeys":
        """Reads the keys of a PEM file, or of the visible files in a folder. Raises SetupError with the line."""
        source = f"--trusted-keys {path}"
        with reporting_os_errors(f"{source}: cannot be read"):
            files = sorted(file for file in path.iterdir() if _is_visible_file(file)) if path.is_dir() else [path]
            keys = {_id(key): key for file in files for key in _public_keys(file)}
        if not keys:
            raise SetupError(f"{source}: holds no public key")
        return cls(keys, source)

    def verify(self, folder: Path, manifest: bytes) -> str:
        """Verifies the signature of a bundle's manifest. Returns the id of the key. Raises RefusedBundle."""
        path = folder / SIGNATURE_FILE
        with reporting_os_errors(f"{path}: cannot be read", kind=RefusedBundle):
            signature = read_file(path, str(path), RefusedBundle) if path.exists() else None
        return self.verify_signature(str(folder), manifest, signature)

    def verify_signature(self, folder: str, manifest: bytes, signature: bytes | None) -> str:
        """Verifies a signature's bytes as `verify` does; None: the bundle is not signed. `folder`: for messages."""
        if signature is None:
            raise RefusedBundle(
                f"{folder}: is not signed (it has no {SIGNATURE_FILE}), and {self._source} takes signed bundles only; "
                "sign it where it was compiled, with `neuronpipe bundle sign`"
            )
        try:
            parsed = _Signature.model_validate_json(signature)
        except ValidationError:
            raise RefusedBundle(
                f"{folder}/{SIGNATURE_FILE}: does not hold a signature; sign the bundle again"
            ) from None
        key = self._keys.get(parsed.key)
        if key is None:
            raise RefusedBundle(
                f"{folder}: is signed with the key {parsed.key[:_SHOWN]}, which {self._source} does not have"
            )
        try:
            key.verify(parsed.signature, _CONTEXT + manifest)
        except InvalidSignature:
            raise RefusedBundle(
                f"{folder}: its manifest or its signature was changed after it was signed with the key "
                f"{parsed.key[:_SHOWN]}"
            ) from None
        return parsed.key


class SigningKey:
    """A private key. `id`: the id of its public key."""

    def __init__(self, key: Ed25519PrivateKey, source: str) -> None:
        self._key = key
        self._source = source
        self.id = _id(key.public_key())

    @classmethod
    def read(cls, path: Path, option: str) -> "SigningKey":
        """Reads the key of a file in PEM form. Raises SetupError, which names the option, and never the content."""
        written = read_file(path, f"{option} {path}")
        try:
            key = serialization.load_pem_private_key(written, None)
        except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: the key has a passphrase
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise SetupError(
                f"{option} {path}: is not an ed25519 private key in PEM form without a passphrase; make one with "
                "`neuronpipe bundle keygen`"
            )
        return cls(key, f"{option} {path}")

    def sign(self, manifest: bytes) -> bytes:
        signature = _Signature.model_construct(key=self.id, signature=self._key.sign(_CONTEXT + manifest))
        return signature.model_dump_json(indent=2).encode() + b"\n"

    def trusted(self) -> TrustedKeys:
        """Returns the public key of this key, as the only trusted key."""
        return TrustedKeys({self.id: self._key.public_key()}, self._source)


def create_key(key: Path, public_key: Path) -> str:
    """Writes a new private key for its owner only, and its public key, in PEM form. Returns the id."""
    generated = Ed25519PrivateKey.generate()
    private = generated.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = generated.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    for path, content, mode in ((key, private, 0o600), (public_key, public, 0o644)):
        with (
            reporting_os_errors(f"{path}: cannot be written"),
            os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file,
        ):
            file.write(content)
    return _id(generated.public_key())


def write_signature(folder: Path, key: SigningKey, digest: str = "") -> None:
    """Signs the manifest in a folder. Raises RefusedBundle if the digest is not `digest`, and SetupError."""
    manifest = (folder / MANIFEST_FILE).read_bytes()
    if digest and sha256(manifest).hexdigest() != digest:
        raise RefusedBundle(f"{folder / MANIFEST_FILE}: changed while it was signed")
    with reporting_os_errors(f"{folder / SIGNATURE_FILE}: cannot be written"):
        # Written beside the folder first: a process that starts now finds only files that its manifest names.
        replace_file(folder / SIGNATURE_FILE, key.sign(manifest), mode=0o644, unfinished_in=folder.parent)


def _id(key: Ed25519PublicKey) -> str:
    der = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    return sha256(der).hexdigest()


def _is_visible_file(path: Path) -> bool:
    # Kubernetes puts hidden folders and links beside the files of a volume.
    return path.is_file() and not path.name.startswith(".")


def _public_keys(file: Path) -> Iterator[Ed25519PublicKey]:
    """Yields the keys of one file. Lines that begin with # are comments. Raises SetupError and OSError."""
    block: list[str] = []
    begin = 0
    for number, line in enumerate(read_file(file, f"--trusted-keys {file}").decode("utf-8", "replace").splitlines(), 1):
        text = line.strip()
        if not block:
            if not text or text.startswith("#"):
                continue
            if not text.startswith(_BEGIN):
                raise SetupError(f"--trusted-keys {file}: line {number}: is neither a key in PEM form nor a # comment")
            if "PRIVATE" in text:
                raise SetupError(f"--trusted-keys {file}: line {number}: a private key; only public keys belong here")
            begin = number
        block.append(text)
        if text == _END:
            yield _public_key(file, begin, "\n".join(block))
            block = []
    if block:
        raise SetupError(f"--trusted-keys {file}: line {begin}: the key that begins here has no end")


def _public_key(file: Path, line: int, block: str) -> Ed25519PublicKey:
    try:
        key = serialization.load_pem_public_key(block.encode())
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, Ed25519PublicKey):
        raise SetupError(
            f"--trusted-keys {file}: line {line}: the key that begins here is not an ed25519 public key in PEM form"
        )
    return key
