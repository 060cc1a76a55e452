"""Files of settings that are read again when they change."""

from collections.abc import Callable
from pathlib import Path

from neuronpipe.core.errors import SetupError
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.core.watched import ValueT, Watched

_MAX_BYTES = 64 << 20


class WatchedFile(Watched[ValueT]):
    """One file of an option, with the metric that says whether it can be used."""

    def __init__(self, option: str, path: Path, parse: Callable[[bytes], ValueT], meters: Meters) -> None:
        """`option`: the one that names the file. `parse` raises SetupError. Raises SetupError."""
        super().__init__([path], lambda: parse(_read(option, path)))
        meters.gauge(Metrics.FILE_LOADED, lambda: not self.problem, option)


def _read(option: str, path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise SetupError(f"{option} {path}: more than {_MAX_BYTES:,} bytes, the limit")
        return path.read_bytes()
    except OSError as error:
        raise SetupError(f"{option} {path}: {error.strerror}") from error
