"""Unix sockets that processes listen on."""

import socket


def is_listened_on(path: str) -> bool:
    """Whether a process listens on a unix socket. Else its file was left behind by one that was killed, or is none."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        except OSError:  # it has no room for another connection, or none for us
            return True
        return True
