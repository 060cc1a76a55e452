"""TLS of a process's ports: the same certificate for all of them."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from neuronpipe.core.watched import watching
from neuronpipe.platform.tls.files import TlsFiles, WatchedTls, watched_tls


class ServerTls:
    """What a server shows its callers, and asks of them, from the files as they are now.

    `context`: for servers of Python's own; each new connection gets the current certificate.
    `asks_for_certificates`: whether callers must show one.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises SetupError, which names the file and the reason."""
        self.asks_for_certificates = bool(files.ca)
        self.watched: WatchedTls = watched_tls(files, "server")
        context = self.watched.value.context
        assert context  # noqa: S101 (every server side has one)
        self.context: ssl.SSLContext = context
        self.context.sni_callback = self._take_current

    def _take_current(self, connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        """OpenSSL asks at the begin of each handshake, also where the caller names no server."""
        connection.context = self.watched.value.context  # type: ignore[assignment]


@contextmanager
def running_server_tls(files: TlsFiles | None) -> Iterator[ServerTls | None]:
    """A server's TLS, whose files are looked at while the block runs; None without files. Raises SetupError."""
    if not files:
        yield None
        return
    tls = ServerTls(files)
    with watching(tls.watched):
        yield tls
