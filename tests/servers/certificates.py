"""Certificate authorities, certificates and keys for tests, and the ways in which files of them are spoilt."""

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from neuronpipe.platform.tls import ServerTls

_DAY = datetime.timedelta(days=1)
_USAGES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}
LOCAL = ("localhost", "127.0.0.1")


@dataclass(frozen=True)
class Issued:
    """A certificate and its key, in PEM form. `number`: the certificate's serial number."""

    certificate: bytes
    key: bytes
    number: int

    def write(self, folder: Path) -> "Issued":
        """Puts both into a folder, each file replaced at once; returns itself."""
        folder.mkdir(exist_ok=True, parents=True)
        replace(folder / "tls.crt", self.certificate)
        replace(folder / "tls.key", self.key)
        return self


def replace(path: Path, content: bytes) -> None:
    """Replaces a file at once, so that no reader sees it half-written."""
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


class Authority:
    """A certificate authority."""

    def __init__(self, name: str = "tests' authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateBuilder().subject_name(self._name).issuer_name(self._name)
        builder = builder.public_key(self._key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - _DAY).not_valid_after(now + 365 * _DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)

    def issue(
        self,
        *names: str,
        days: tuple[float, float] = (-1, 30),
        usages: Sequence[str] = ("server", "client"),
        passphrase: bytes = b"",
        rsa_bits: int = 0,
    ) -> Issued:
        """Issues a certificate for DNS names, IP addresses and URIs.

        `days`: begin and end of its validity, from now on. `rsa_bits`: for a key of RSA.
        """
        key = rsa.generate_private_key(65_537, rsa_bits) if rsa_bits else ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, (names or LOCAL)[0][:60])])
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(self._name)
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now + days[0] * _DAY).not_valid_after(now + days[1] * _DAY)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(
            x509.SubjectAlternativeName([_general_name(name) for name in names or LOCAL]), critical=False
        )
        if usages:
            builder = builder.add_extension(x509.ExtendedKeyUsage([_USAGES[usage] for usage in usages]), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        encryption = BestAvailableEncryption(passphrase) if passphrase else NoEncryption()
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)
        return Issued(certificate.public_bytes(Encoding.PEM), pem, certificate.serial_number)

    def revoke(self, *revoked: Issued, days: tuple[float, float] = (-1, 30)) -> bytes:
        """Lists the certificates that the authority has revoked, in PEM form."""
        now = datetime.datetime.now(datetime.UTC)
        builder = x509.CertificateRevocationListBuilder().issuer_name(self._name)
        builder = builder.last_update(now + days[0] * _DAY).next_update(now + days[1] * _DAY)
        for certificate in revoked:
            entry = x509.RevokedCertificateBuilder().serial_number(certificate.number).revocation_date(now - _DAY)
            builder = builder.add_revoked_certificate(entry.build())
        return builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM)


def _general_name(name: str) -> x509.GeneralName:
    if "://" in name:
        return x509.UniformResourceIdentifier(name)
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Makes the credentials of a grpcio server. Each handshake uses the current certificates."""

    def current() -> grpc.ServerCertificateConfiguration:
        loaded = tls.watched.value
        assert loaded.key
        assert loaded.certificate
        return grpc.ssl_server_certificate_configuration([(loaded.key, loaded.certificate)], loaded.ca)

    return grpc.dynamic_ssl_server_credentials(current(), current, bool(tls.watched.value.ca))


def peer_names(context: Any) -> list[str]:
    """Returns the subject alternative names of a caller's certificate at a grpcio server; empty without it."""
    return [name.decode() for name in context.auth_context().get("x509_subject_alternative_name", ())]
