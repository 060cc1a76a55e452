"""Files that are reloaded when they change."""

import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log, log_fault, log_warning

ValueT = TypeVar("ValueT")

LOOK_EVERY_S = 1.0

# The state of each file, which differs between two contents; None for a file that does not exist.
_State: TypeAlias = tuple[tuple[int, ...] | None, ...]


class Watched(Generic[ValueT]):
    """The content of some files. `value`: the last valid content; `problem`: the fault of later content, which is not
    used.

    A path may be a symbolic link whose target changes, as Kubernetes does with the files of a volume.
    """

    def __init__(self, files: Collection[Path], read: Callable[[], ValueT]) -> None:
        """`read`: reads the files. Raises its errors: SetupError if the files cannot be used."""
        self._files = files
        self._read = read
        # The reason why the current files are not used; empty while they are used.
        self.problem = ""
        self._state = self._looked_at = self._current_state()
        while (value := self._read_settled(self._state)) is None:
            self._state = self._current_state()
        self.value = value

    def have_settled(self) -> bool:
        """Returns whether the files are as they were at the last call: no writer is in the middle of a file."""
        before, self._looked_at = self._looked_at, self._current_state()
        return before == self._looked_at

    def look(self) -> None:
        """Reloads the files if they have changed. For one thread at a time."""
        state = self._current_state()
        # An unusable file may become usable without a change, such as a certificate that is not valid yet.
        if state == self._state and not self.problem:
            return
        try:
            value = self._read_settled(state)
        except SetupError as error:
            if str(error) != self.problem:
                log_warning("changed files cannot be used; their last good content stays in use", problem=str(error))
            self._state, self.problem = state, str(error)
            return
        if value is not None:
            self._state, self.value, self.problem = state, value, ""
            log("changed files are used", files=[str(file) for file in self._files])

    def _read_settled(self, state: _State) -> ValueT | None:
        """Returns the files' content; None if they have changed since `state`: the content may be part old, part new.

        Raises the errors of reading the files.
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
    """Checks files for changes in a thread while the block runs.

    A change counts when the files have stayed the same for `every_s`: half a file of keys is valid, and lacks keys.
    """
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(every_s):
            for files in watched:
                try:
                    if files.have_settled():
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
        status = file.stat()
    except OSError:
        return None
    # The last two are the time of the last change of the content, and of rights or owner.
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
