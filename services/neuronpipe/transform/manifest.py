"""What a run has done: a file for the run, and one for each shard that is complete.

A shard's file appears after its results. So what is listed is there, whoever wrote it, on this machine or another one,
and no file is ever added to.
"""

import fcntl
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from neuronpipe.core.errors import SetupError
from neuronpipe.transform.files import delete_unfinished, read_file, unwritable, write_file

RUN_FILE = "_run.json"
MANIFEST_FILE = "_manifest.jsonl"
_SHARDS = "_shards"


@dataclass(frozen=True, slots=True)
class DoneShard:
    """A shard whose results are complete. `first_row`: in its file, from 0 on. Tokens: of rows that succeeded."""

    number: int
    file: str
    size_bytes: int
    input: str
    first_row: int
    rows: int
    errors: int
    tokens: int
    truncated_tokens: int
    padded_tokens: int


class Manifest:
    """The list of a run's shards, in its output folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextmanager
    def locked(self) -> Iterator[None]:
        """No other run writes here during the block. Raises SetupError where one does."""
        with unwritable(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("w")
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise SetupError(f"--output {self.folder}: another run writes there") from error
            self._delete_unfinished()
            yield
            self._delete_unfinished()

    def _delete_unfinished(self) -> None:
        for folder in (self.folder, self.folder / _SHARDS):
            delete_unfinished(folder)

    def begin(self, fingerprint: str, description: dict[str, object]) -> None:
        """Begins a run, or goes on with it. Raises SetupError for a folder of another run, naming what differs."""
        path = self.folder / RUN_FILE
        new = {"fingerprint": fingerprint, **description}
        if (content := read_file(path)) is None:
            write_file(path, (json.dumps(new, indent=2) + "\n").encode())
            return
        old = json.loads(content)
        if old.get("fingerprint") != fingerprint:
            changed = [name for name in new if name != "fingerprint" and new[name] != old.get(name)]
            raise SetupError(
                f"--output {self.folder}: holds a run that differs in {', '.join(changed) or 'its input'}; choose "
                "another folder, or delete it"
            )

    def add(self, shard: DoneShard) -> None:
        """Lists a shard whose file of results is there. Raises SetupError."""
        write_file(self.folder / _SHARDS / f"{shard.number:05d}.json", _line(shard))

    def done(self) -> list[DoneShard]:
        """The shards that are listed, and whose results are there, in order. Raises SetupError."""
        found = []
        for path in sorted((self.folder / _SHARDS).glob("*.json")):
            shard = DoneShard(**json.loads(read_file(path) or b""))
            results = self.folder / shard.file
            if results.exists() and results.stat().st_size == shard.size_bytes:
                found.append(shard)
        return sorted(found, key=lambda shard: shard.number)

    def complete(self, shards: Sequence[DoneShard]) -> None:
        """Writes the list of all shards into one file. Raises SetupError."""
        write_file(self.folder / MANIFEST_FILE, b"".join(map(_line, shards)))


def _line(shard: DoneShard) -> bytes:
    return json.dumps(asdict(shard)).encode() + b"\n"
