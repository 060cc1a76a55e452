"""Sends OTLP over HTTP to a collector that is not trusted: a request ends in time, and its answer takes little memory.

OpenTelemetry's exporters give requests a time limit between two bytes, and read answers whole.
"""

import io
import socket
import threading
from contextlib import suppress
from typing import Any

from requests import PreparedRequest, Response, Session
from requests.adapters import HTTPAdapter
from requests.exceptions import ChunkedEncodingError, ReadTimeout, RequestException
from urllib3 import HTTPConnectionPool, HTTPSConnectionPool, PoolManager
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import HTTPError

# A collector's answer is a message with a count and a text.
_MAX_ANSWER_BYTES = 64 << 10


def bounded_session() -> Session:
    """Returns a session for one exporter, which makes one request at a time."""
    session = Session()
    for scheme in ("http://", "https://"):
        session.mount(scheme, _BoundedAdapter())
    return session


class _Deadline:
    """Cuts the connection of a request when its time is over, even if bytes still come."""

    def __init__(self, limit_s: float) -> None:
        self.has_passed = threading.Event()
        self._socket: socket.socket | None = None
        self._timer = threading.Timer(limit_s, self._pass)
        self._timer.daemon = True
        self._timer.start()

    def watch(self, connection: socket.socket | None) -> None:
        self._socket = connection
        if self.has_passed.is_set():
            self._cut()

    def end(self) -> None:
        self._timer.cancel()

    def _pass(self) -> None:
        self.has_passed.set()
        self._cut()

    def _cut(self) -> None:
        if self._socket:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class _BoundedAdapter(HTTPAdapter):
    """Gives each request one deadline, its `timeout`, up to the last byte of the answer, and cuts long answers."""

    _deadline: _Deadline | None = None

    def send(
        self, request: PreparedRequest, stream: bool = False, timeout: Any = None, *arguments: Any, **options: Any
    ) -> Response:
        """Sends a request and reads its answer. Raises RequestException, also for an answer that is late or long."""
        deadline = self._deadline = _Deadline(timeout)
        try:
            response = super().send(request, True, timeout, *arguments, **options)
            body = _body(response)
        except RequestException as error:
            if deadline.has_passed.is_set():
                raise _too_late(timeout) from error
            raise
        finally:
            deadline.end()
        if deadline.has_passed.is_set():  # an answer without a length seems to end where it was cut
            raise _too_late(timeout)
        response.raw = io.BytesIO(body)
        return response

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        self._watch_connections(self.poolmanager)

    def proxy_manager_for(self, *arguments: Any, **options: Any) -> Any:
        manager = super().proxy_manager_for(*arguments, **options)
        self._watch_connections(manager)
        return manager

    def _watch_connections(self, manager: PoolManager) -> None:
        def watch(connection: HTTPConnection) -> None:
            if self._deadline:
                # Kept here: the connection itself forgets its socket where an answer ends with the connection.
                self._deadline.watch(connection.sock)

        class Plain(HTTPConnection):
            def request(self, *arguments: Any, **options: Any) -> None:
                super().request(*arguments, **options)
                watch(self)

        class Encrypted(HTTPSConnection):
            def request(self, *arguments: Any, **options: Any) -> None:
                super().request(*arguments, **options)
                watch(self)

        manager.pool_classes_by_scheme = {
            "http": type("PlainPool", (HTTPConnectionPool,), {"ConnectionCls": Plain}),
            "https": type("EncryptedPool", (HTTPSConnectionPool,), {"ConnectionCls": Encrypted}),
        }


def _body(response: Response) -> bytes:
    """Reads an answer as it was sent, without decoding it. Raises RequestException."""
    try:
        body: bytes = response.raw.read(_MAX_ANSWER_BYTES + 1, decode_content=False)
    except HTTPError as error:
        raise ChunkedEncodingError(error) from error
    finally:
        response.close()  # after a whole answer, its connection is in the pool already
    if len(body) > _MAX_ANSWER_BYTES:
        raise RequestException(f"the collector's answer is longer than {_MAX_ANSWER_BYTES} bytes")
    return body


def _too_late(limit_s: float) -> ReadTimeout:
    return ReadTimeout(f"the collector's answer was not complete within {limit_s:.3g} s")
