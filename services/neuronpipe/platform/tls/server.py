"""TLS of a process's ports: the same certificate for all of them."""

import ssl
from collections.abc import Iterator
from contextlib import contextmanager

from neuronpipe.core.watched import watching
from neuronpipe.platform.tls.files import TlsFiles, WatchedTls, watched_tls


class ServerTls:
    """What a server shows its callers, and asks of them, from the files as they are now.

    `context`, for HTTP/1.1, and `h2_context`, for HTTP/2: each new connection gets the current certificate.
    `asks_for_certificates`: whether callers must show one.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Raises SetupError, which names the file and the reason."""
        self.asks_for_certificates = bool(files.ca)
        self.watched: WatchedTls = watched_tls(files, "server")
        loaded = self.watched.value
        assert loaded.context  # noqa: S101 (every server side has one)
        self.context, self.h2_context = loaded.context, loaded.h2_context
        # OpenSSL asks at the begin of each handshake, also where the caller names no server.
        self.context.sni_callback = lambda connection, *_: self._take_current(connection, self.watched.value.context)
        self.h2_context.sni_callback = lambda connection, *_: self._take_current(
            connection, self.watched.value.h2_context
        )

    def _take_current(self, connection: ssl.SSLObject, current: ssl.SSLContext | None) -> None:
        connection.context = current  # type: ignore[assignment]


@contextmanager
def running_server_tls(files: TlsFiles | None) -> Iterator[ServerTls | None]:
    """A server's TLS, whose files are looked at while the block runs; None without files. Raises SetupError."""
    if not files:
        yield None
        return
    tls = ServerTls(files)
    with watching(tls.watched):
        yield tls
