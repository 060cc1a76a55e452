"""The end of a connection's transport, which still sends the bytes that it has."""

import asyncio
import contextlib
import fcntl
import termios
from collections.abc import Callable

from neuronpipe.platform.process.listener import CLOSE_LIMIT_S

# After our last byte, the peer gets this time to read it and to end its side. Without this time, bytes that the peer
# still sends would make the operating system reset the connection, and the peer would lose its unread bytes.
_LINGER_S = 1.0
# The time that a peer gets for its close_notify.
TLS_CLOSE_S = 0.5


class Closing:
    """Ends our side of a transport, and calls `abort` once the peer's system has all bytes, or after CLOSE_LIMIT_S."""

    def __init__(self, transport: asyncio.Transport, abort: Callable[[], None]) -> None:
        """Raises OSError if the peer has gone."""
        self._transport, self._abort, self._loop = transport, abort, asyncio.get_running_loop()
        if has_eof := transport.can_write_eof():
            transport.write_eof()
        else:
            transport.close()
        self._until_s, self._pause_s = self._loop.time() + CLOSE_LIMIT_S, _LINGER_S if has_eof else TLS_CLOSE_S
        self._timer = self._loop.call_later(self._pause_s, self._look)

    def _look(self) -> None:
        if self._loop.time() >= self._until_s or _is_sent(self._transport):
            self._abort()
        else:
            self._timer = self._loop.call_later(self._pause_s, self._look)

    def cancel(self) -> None:
        self._timer.cancel()


def _is_sent(transport: asyncio.Transport) -> bool:
    """Returns whether the peer's system has all bytes.

    A transport does not count the bytes that wait below TLS. But while such bytes wait, the operating system also has
    unsent bytes.
    """
    if transport.get_write_buffer_size():
        return False
    with contextlib.suppress(OSError):  # another system than Linux, or the socket has ended
        unsent = fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, bytes(4))
        return not any(unsent)
    return True
