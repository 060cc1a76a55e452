"""The listening side of a server: the sockets of an address, and new connections, up to their TLS handshakes."""

import asyncio
import os
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from neuronpipe.core.addresses import is_listened_on, telling_wrong_labels, unix_path
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import locked_folder
from neuronpipe.core.logs import SeldomWarnings, log_warning
from neuronpipe.platform.process.settings import CallerLimits

_BACKLOG = 1024
# Connections that are accepted in a turn of the event loop: each costs a third of a millisecond.
_ACCEPTED_AT_ONCE = 8
# The pause between two attempts to accept when no file descriptor is free.
_PAUSE_S = 1.0
# Time limit for a slow peer to read the rest; for a TLS peer, from the first attempt to send close_notify.
CLOSE_LIMIT_S = 30.0


class Listener:
    """Accepts connections at one address. Not by asyncio's servers, because they begin any number of TLS handshakes.

    - `connections`: the established connections.
    - `begin`: makes the protocol of a new connection.
    - `refused`: called for each connection beyond `max_connections`.
    - `ended`: called after each handshake.
    - `tls`: not used for Unix sockets.
    - `handshakes`: connections that are not established yet, with their tasks. A protocol removes itself when it is
      established.
    """

    # The status of its Unix socket's file.
    _file: os.stat_result

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
        self._warnings = SeldomWarnings()
        self._option = ""
        # Arguments of connect_accepted_socket.
        self._tls: dict[str, Any] = {}
        if tls and not self._path:
            self._tls = {"ssl": tls, "ssl_handshake_timeout": limits.max_handshake_s}
            self._tls["ssl_shutdown_timeout"] = CLOSE_LIMIT_S

    def bind(self, option: str) -> int:
        """Takes the address; connections to a port are refused. Returns the port, 0 for a Unix socket.

        Raises SetupError, which names the option that set the address.
        """
        self._option = option
        with telling_bind_problems(self._option, self._address):
            if self._path:
                bound, self._file = _bind_path(Path(self._path))
                self._sockets = [bound]
            else:
                self._sockets = bind_port(self._address, shares_port=self._shares_port)
        return 0 if self._path else int(self._sockets[0].getsockname()[1])

    def listen(self) -> None:
        """Accepts connections from now on. Raises SetupError if another process has begun to listen at the address."""
        with telling_bind_problems(self._option, self._address):
            for bound in self._sockets:
                bound.listen(_BACKLOG)
        self._is_listening = True
        self._accept_from(self._sockets)

    def close(self) -> None:
        """Accepts the connections that wait, and no more. Handshakes continue. May be called again."""
        sockets, self._sockets = self._sockets, []
        for listening in sockets:
            if self._is_listening:
                self._accept(listening, _BACKLOG)
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        if self._path and sockets:
            path = Path(self._path)
            with _alone(path), suppress(FileNotFoundError):
                if os.path.samestat(path.lstat(), self._file):  # not the file of another process, which took its place
                    path.unlink()

    def end_handshakes(self) -> None:
        """Ends the connections that are not established yet."""
        for task in self.handshakes.values():
            task.cancel()

    def _accept_from(self, sockets: Iterable[socket.socket]) -> None:
        for listening in sockets:
            if listening.fileno() >= 0:
                asyncio.get_running_loop().add_reader(listening, self._accept, listening)

    def _accept(self, listening: socket.socket, max_accepted: int = _ACCEPTED_AT_ONCE) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(max_accepted):
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
        except ssl.SSLCertVerificationError as error:
            reason = error.verify_message
            self._warnings.log("a caller's TLS certificate is refused", reason, reason=reason)
        except OSError:  # ssl.SSLError is an OSError
            return

    def _end_handshake(self, protocol: asyncio.Protocol, accepted: socket.socket, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            accepted.close()
        self.handshakes.pop(protocol, None)
        self._ended()


@contextmanager
def telling_bind_problems(option: str, address: str) -> Iterator[None]:
    """Turns an OSError in the block into a SetupError, which names the option that set the address."""
    try:
        yield
    except OSError as error:
        problem = error.strerror if error.errno and not isinstance(error, socket.gaierror) else "no such address"
        raise SetupError(f"{option}: cannot listen on {address}: {problem}") from error


def bind_port(address: str, *, shares_port: bool) -> list[socket.socket]:
    """Returns sockets of all addresses of a host's name, on one port. Raises OSError."""
    host, _, port = address.rpartition(":")
    with telling_wrong_labels():
        addresses = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, where in dict.fromkeys(addresses):
            sockets.append(bound := socket.socket(family, kind, protocol))
            bound.setblocking(False)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if shares_port:
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6 and len(addresses) == 1:  # [::] takes callers of both families
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            number = int(port) or (sockets[0].getsockname()[1] if len(sockets) > 1 else 0)
            bound.bind((where[0], number, *where[2:]))
    except BaseException:
        for bound in sockets:
            bound.close()
        raise
    return sockets


def _bind_path(path: Path) -> tuple[socket.socket, os.stat_result]:
    """Returns a socket at a path, which replaces a socket that a killed process left behind, and its file. Raises
    OSError.

    The socket listens at once, because another process would take it for left behind: connections wait until they are
    accepted.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    bound.setblocking(False)
    try:
        with _alone(path):
            if path.is_socket() and not is_listened_on(str(path)):
                path.unlink()
            bound.bind(str(path))
            bound.listen(_BACKLOG)
            return bound, path.lstat()
    except BaseException:
        bound.close()
        raise


def _alone(path: Path) -> AbstractContextManager[None]:
    """Keeps other processes from replacing a socket: between bind and listen, it looks as if left behind."""
    return locked_folder(path.parent) if os.access(path.parent, os.R_OK) else nullcontext()
