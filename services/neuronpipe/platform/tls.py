"""TLS: files of certificates and keys, which are checked before they are used, and the contexts of a server.

Changed files are reloaded. All ports of a process have the same certificate.
"""

import math
import os
import ssl
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import read_file
from neuronpipe.core.logs import log_warning
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.platform.watched import Watched, watching

TlsSide: TypeAlias = Literal["server", "client"]

# The limit of a handshake in memory, which takes fewer turns.
_HANDSHAKE_TURNS = 10


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of files in PEM form. Raises SetupError if only one of certificate and key is given.

    - `certificate`: shown to peers; the certificates of intermediate authorities follow it in the file.
    - `key`: the certificate's private key, without a passphrase.
    - `ca`: the authorities of peers' certificates.
    - `crl`: for a server, the certificates that these authorities have revoked.
    """

    certificate: Path | str = ""
    key: Path | str = ""
    ca: Path | str = ""
    crl: Path | str = ""

    def __post_init__(self) -> None:
        if bool(self.certificate) != bool(self.key):
            raise SetupError("a TLS certificate and its key belong together: give both files, or neither")

    @property
    def paths(self) -> list[Path]:
        return [Path(file) for file in (self.certificate, self.key, self.ca, self.crl) if file]


@dataclass(frozen=True, slots=True)
class LoadedTls:
    """The content of the files, in PEM form; None for a file that is not set.

    - `expires_s`: the certificate's end of validity, in seconds since 1970; infinite without a certificate.
    - `context`: for HTTP/1.1.
    - `h2_context`: for HTTP/2, which TLS negotiates (ALPN).
    """

    certificate: bytes | None
    key: bytes | None = field(repr=False)
    ca: bytes | None
    expires_s: float
    context: ssl.SSLContext
    h2_context: ssl.SSLContext


WatchedTls: TypeAlias = Watched[LoadedTls]


class _WatchedCertificate(Watched[LoadedTls]):
    """The files of a side. Warns once when the certificate in use has expired."""

    def __init__(self, files: TlsFiles, side: TlsSide) -> None:
        super().__init__(files.paths, lambda: _load(files, side))
        self._file, self._side = str(files.certificate), side
        self._expired: LoadedTls | None = None

    def look(self) -> None:
        super().look()
        loaded = self.value
        if time.time() > loaded.expires_s and loaded is not self._expired:
            self._expired = loaded
            log_warning("the TLS certificate in use has expired", side=self._side, file=self._file)


def watched_tls(files: TlsFiles, side: TlsSide) -> WatchedTls:
    """Returns the watched files of a side. At each load a peer verifies their certificate. Raises SetupError, which
    names the file and the reason.
    """
    return _WatchedCertificate(files, side)


def _load(files: TlsFiles, side: TlsSide) -> LoadedTls:
    certificate, key, ca = (_read(file) if file else None for file in (files.certificate, files.key, files.ca))
    expires_s = math.inf
    if certificate is not None:
        _check_certificates(files.certificate, certificate)
        expires_s = _try_handshake(files, certificate, side)
    if ca is not None:
        _check_certificates(files.ca, ca)
    make_context = _server_context if side == "server" else _client_context
    context, h2_context = make_context(files, ca), make_context(files, ca)
    h2_context.set_alpn_protocols(["h2"])
    return LoadedTls(certificate, key, ca, expires_s, context, h2_context)


def _server_context(files: TlsFiles, ca: bytes | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # A resumed session would not show the caller's certificate again, even if the authorities have changed by then.
    context.options |= ssl.OP_NO_TICKET
    context.num_tickets = 0
    _load_pair(context, files)
    if ca:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cadata=_text(ca))
    if files.crl:
        _load_crl(context, files.crl)
    return context


def _load_crl(context: ssl.SSLContext, file: Path | str) -> None:
    if b"BEGIN X509 CRL" not in _read(file):
        raise SetupError(f"TLS file {file}: does not hold a certificate revocation list in PEM form")
    try:
        context.load_verify_locations(cafile=file)
    except (ssl.SSLError, OSError) as error:
        raise SetupError(f"TLS file {file}: does not hold a certificate revocation list in PEM form") from error
    context.verify_flags |= ssl.VERIFY_CRL_CHECK_LEAF


def _client_context(files: TlsFiles, ca: bytes | None) -> ssl.SSLContext:
    context = ssl.create_default_context(cadata=_text(ca) if ca else None)
    if files.certificate:
        _load_pair(context, files)
    return context


def _read(file: Path | str) -> bytes:
    return read_file(file, f"TLS file {file}")


def _check_certificates(file: Path | str, content: bytes) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=_text(content))
    except (ssl.SSLError, ValueError) as error:  # ValueError: the file is empty
        raise SetupError(f"TLS file {file}: does not hold certificates in PEM form") from error


def _load_pair(context: ssl.SSLContext, files: TlsFiles) -> None:
    try:
        context.load_cert_chain(files.certificate, files.key, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            problem = f"TLS key {files.key}: is not the key of the certificate in {files.certificate}"
        elif "TOO_" in (error.reason or ""):  # EE_KEY_TOO_SMALL, CA_MD_TOO_WEAK
            problem = f"TLS certificate {files.certificate}: is too weak for OpenSSL: {error.reason}"
        else:
            problem = f"TLS key {files.key}: does not hold a private key in PEM form without a passphrase"
        raise SetupError(problem) from error
    except OSError as error:
        raise SetupError(f"TLS key {files.key}: cannot be read: {os.strerror(error.errno or 0)}") from error


def _try_handshake(files: TlsFiles, certificate: bytes, side: TlsSide) -> float:
    """Lets a peer in memory verify the certificate, which it trusts. Returns the time when the certificate expires."""
    client, server = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    for context in (client, server):
        _load_pair(context, files)
    verifying = client if side == "server" else server
    verifying.verify_mode = ssl.CERT_REQUIRED
    verifying.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    verifying.load_verify_locations(cadata=_text(certificate))
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True))
    try:
        _shake_hands(ends)
    except ssl.SSLCertVerificationError as error:
        raise SetupError(f"TLS certificate {files.certificate}: {error.verify_message}") from error
    except ssl.SSLError as error:
        raise SetupError(f"TLS certificate {files.certificate}: a handshake fails: {error.reason}") from error
    shown = ends[0 if side == "server" else 1].getpeercert()
    return float(ssl.cert_time_to_seconds(str(shown["notAfter"]))) if shown else math.inf


def _shake_hands(ends: Sequence[ssl.SSLObject]) -> None:
    unfinished = list(ends)
    for _ in range(_HANDSHAKE_TURNS):
        for end in list(unfinished):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            unfinished.remove(end)


def _text(content: bytes) -> str:
    return content.decode("ascii", "ignore")


class ServerTls:
    """A server's certificate and its demands on callers, from the current files.

    `context`, for HTTP/1.1, and `h2_context`, for HTTP/2: each new connection gets the current certificate.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises SetupError, which names the file and the reason."""
        self.watched: WatchedTls = watched_tls(files, "server")
        loaded = self.watched.value
        self.context, self.h2_context = loaded.context, loaded.h2_context
        # OpenSSL calls it at the start of each handshake, also if the caller names no server.
        self.context.sni_callback = lambda connection, *_: self._take_current(connection, self.watched.value.context)
        self.h2_context.sni_callback = lambda connection, *_: self._take_current(
            connection, self.watched.value.h2_context
        )

    def _take_current(self, connection: ssl.SSLObject, current: ssl.SSLContext) -> None:
        connection.context = current


@contextmanager
def running_server_tls(files: TlsFiles | None) -> Iterator[ServerTls | None]:
    """Yields a server's TLS, whose files are watched while the block runs; None without files. Raises SetupError."""
    if not files:
        yield None
        return
    tls = ServerTls(files)
    with watching(tls.watched):
        yield tls


def show_tls(meters: Meters, side: TlsSide, watched: WatchedTls) -> None:
    meters.gauge(Metrics.TLS_REJECTED, lambda: float(bool(watched.problem)), side)
    if watched.value.certificate:
        meters.gauge(Metrics.TLS_EXPIRY, lambda: watched.value.expires_s * 1e9, side)
