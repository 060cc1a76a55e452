"""Files that are read anew when they change."""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log, log_fault, log_warning

ValueT = TypeVar("ValueT")

LOOK_EVERY_S = 1.0

# What tells one content of a file from another; None for a file that is not there.
_State: TypeAlias = tuple[tuple[int, ...] | None, ...]


class Watched(Generic[ValueT]):
    """What some files hold. `value` is the last content that could be read; later content that cannot be is reported as
    `problem`.

    A path may be a symbolic link that is pointed elsewhere, as Kubernetes does with the files of a volume.
    """

    def __init__(self, files: Collection[Path], read: Callable[[], ValueT]) -> None:
        """`read`: reads the files. Raises what it raises: SetupError where they cannot be used."""
        self._files = files
        self._read = read
        # Why the files as they are now are not used; empty while they are.
        self.problem = ""
        self._state = self._current_state()
        while (value := self._read_settled(self._state)) is None:
            self._state = self._current_state()
        self.value = value

    def look(self) -> None:
        """Reads the files where they have changed. For one thread at a time."""
        state = self._current_state()
        # A file that cannot be used may become usable without a change, such as a certificate that is not valid yet.
        if state == self._state and not self.problem:
            return
        try:
            value = self._read_settled(state)
        except SetupError as error:
            if str(error) != self.problem:
                log_warning("changed files cannot be used; what they held before stays", problem=str(error))
            self._state, self.problem = state, str(error)
            return
        if value is not None:
            self._state, self.value, self.problem = state, value, ""
            log("changed files are used", files=[str(file) for file in self._files])

    def _read_settled(self, state: _State) -> ValueT | None:
        """What the files hold. None where they are not as in `state` any more: what was read may be part old, part new.
        Raises what reading them raises.
        """
        try:
            value = self._read()
        except SetupError:
            if self._current_state() == state:
                raise
            return None
        return value if self._current_state() == state else None

    def _current_state(self) -> _State:
        return tuple(map(_state_of, self._files))


@contextmanager
def watching(*watched: Watched[Any], every_s: float = LOOK_EVERY_S) -> Iterator[None]:
    """Looks at files from a thread while the block runs."""
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(every_s):
            for files in watched:
                try:
                    files.look()
                except Exception as fault:
                    log_fault("watched files cannot be looked at", fault)

    thread = threading.Thread(target=look, name="watched files", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _state_of(file: Path) -> tuple[int, ...] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    # The time of the last change of its content, and of its rights and owner.
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
