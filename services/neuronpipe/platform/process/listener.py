"""Where a server listens: the sockets of an address, and the connections that come, up to their TLS handshakes."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from neuronpipe.core.addresses import is_listened_on, unix_path
from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log_warning
from neuronpipe.platform.process.settings import CallerLimits

_BACKLOG = 1024
# What is accepted in a turn of the event loop: a new connection costs a third of a millisecond.
_ACCEPTED_AT_ONCE = 8
# Between two attempts to accept, where no file is free.
_PAUSE_S = 1.0
# For a peer that reads slowly, over TLS: from the first try to say that nothing follows.
CLOSE_LIMIT_S = 30.0


class Listener:
    """Accepts connections at one address. By hand, as asyncio's servers begin any number of TLS handshakes.

    `connections`: those that were made. `begin`: the protocol of one that has come. `refused`: called for one beyond
    `max_connections`. `ended`: called after a handshake. `tls`: not for Unix sockets. `handshakes`: connections that
    were not made yet, with their tasks. A protocol takes itself out when it is made.
    """

    def __init__(
        self,
        address: str,
        limits: CallerLimits,
        connections: Sized,
        begin: Callable[[], asyncio.Protocol],
        refused: Callable[[], None],
        ended: Callable[[], None] = lambda: None,
        *,
        tls: ssl.SSLContext | None = None,
        shares_port: bool = False,
    ) -> None:
        self.handshakes: dict[asyncio.Protocol, asyncio.Task[None]] = {}
        self._address = address
        self._path = unix_path(address)
        self._shares_port = shares_port
        self._max_connections = limits.max_connections
        self._connections = connections
        self._begin = begin
        self._refused = refused
        self._ended = ended
        self._sockets: list[socket.socket] = []
        self._is_listening = False
        self._option = ""
        # Of connect_accepted_socket.
        self._tls: dict[str, Any] = {}
        if tls and not self._path:
            self._tls = {
                "ssl": tls,
                "ssl_handshake_timeout": limits.max_handshake_s,
                "ssl_shutdown_timeout": CLOSE_LIMIT_S,
            }

    def bind(self, option: str) -> int:
        """Takes the address; connections to a port are refused. Returns the port, 0 for a Unix socket.

        Raises SetupError, which names the option that set the address.
        """
        self._option = option
        with self._telling_problems():
            self._sockets = [_bind_path(self._path)] if self._path else _bind_port(self._address, self._shares_port)
        return 0 if self._path else int(self._sockets[0].getsockname()[1])

    def listen(self) -> None:
        """Accepts connections from now on. Raises SetupError where another process has begun to listen here."""
        with self._telling_problems():
            for bound in self._sockets:
                bound.listen(_BACKLOG)
        self._is_listening = True
        self._accept_from(self._sockets)

    @contextmanager
    def _telling_problems(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            problem = error.strerror if error.errno and not isinstance(error, socket.gaierror) else "no such address"
            raise SetupError(f"{self._option}: cannot listen on {self._address}: {problem}") from error

    def close(self) -> None:
        """Accepts those that wait, and no more. Handshakes go on. May be called again."""
        sockets, self._sockets = self._sockets, []
        for listening in sockets:
            if self._is_listening:
                self._accept(listening, _BACKLOG)
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        if self._path and sockets:
            Path(self._path).unlink(missing_ok=True)

    def end_handshakes(self) -> None:
        """Ends the connections that were not made yet."""
        for task in self.handshakes.values():
            task.cancel()

    def _accept_from(self, sockets: Iterable[socket.socket]) -> None:
        for listening in sockets:
            if listening.fileno() >= 0:
                asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket, most: int = _ACCEPTED_AT_ONCE) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(most):
            try:
                accepted, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log_warning("no connection can be accepted", problem=error.strerror)
                loop.remove_reader(listening)
                loop.call_later(_PAUSE_S, self._accept_from, [listening])
                return
            if len(self._connections) + len(self.handshakes) < self._max_connections:
                protocol = self._begin()
                self.handshakes[protocol] = task = loop.create_task(self._shake_hands(protocol, accepted))
                # A task that is cancelled before it begins does not run at all.
                task.add_done_callback(partial(self._end_handshake, protocol, accepted))
            else:
                self._refused()
                accepted.close()

    async def _shake_hands(self, protocol: asyncio.Protocol, accepted: socket.socket) -> None:
        try:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, accepted, **self._tls)
        except OSError:  # ssl.SSLError is one
            return

    def _end_handshake(self, protocol: asyncio.Protocol, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            accepted.close()
        self.handshakes.pop(protocol, None)
        self._ended()


def _bind_port(address: str, shares_port: bool) -> list[socket.socket]:
    """Sockets of all addresses of a host's name, on one port. Raises OSError."""
    host, _, port = address.rpartition(":")
    found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, where in dict.fromkeys(found):
            sockets.append(one := socket.socket(family, kind, protocol))
            one.setblocking(False)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6 and len(found) == 1:  # [::] takes callers of both families
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            number = int(port) or (sockets[0].getsockname()[1] if len(sockets) > 1 else 0)
            one.bind((where[0], number, *where[2:]))
    except BaseException:
        for one in sockets:
            one.close()
        raise
    return sockets


def _bind_path(path: str) -> socket.socket:
    """A socket at a path, in place of one that a killed process has left behind. Raises OSError.

    It listens, or else another process would take it for left behind: connections wait until they are accepted.
    """
    one = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    one.setblocking(False)
    try:
        if Path(path).is_socket() and not is_listened_on(path):
            Path(path).unlink()
        one.bind(path)
        one.listen(_BACKLOG)
    except BaseException:
        one.close()
        raise
    return one
