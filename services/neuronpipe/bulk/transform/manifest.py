"""What a run has done: a file for the run, and one for each shard that is complete.

A shard's file appears after its results. So what is listed is there, whoever wrote it, on this machine or another one,
and no file is ever added to.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from neuronpipe.bulk.transform.folders import Folder, write_file
from neuronpipe.core.errors import SetupError

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

    def __init__(self, folder: Folder) -> None:
        self._folder = folder

    def begin(self, fingerprint: str, description: dict[str, object]) -> None:
        """Begins a run, or goes on with it. Raises SetupError for a folder of another run, naming what differs."""
        new = {"fingerprint": fingerprint, **description}
        if (content := self._folder.read(RUN_FILE)) is None:
            write_file(self._folder, RUN_FILE, (json.dumps(new, indent=2) + "\n").encode())
            return
        old = json.loads(content)
        if old.get("fingerprint") != fingerprint:
            changed = [name for name in new if name != "fingerprint" and new[name] != old.get(name)]
            raise SetupError(
                f"holds a run that differs in {', '.join(changed) or 'its input'}; choose another folder, or delete it"
            )

    def add(self, shard: DoneShard) -> None:
        """Lists a shard whose file of results is there. Raises SetupError."""
        write_file(self._folder, f"{_SHARDS}/{shard.number:05d}.json", _line(shard))

    def done(self) -> list[DoneShard]:
        """The shards that are listed, and whose results are there, in order. Raises SetupError."""
        listed = [
            DoneShard(**json.loads(self._folder.read(name) or b""))
            for name in self._folder.names(_SHARDS)
            if name.endswith(".json")
        ]
        sizes = self._folder.sizes([shard.file for shard in listed])
        found = [shard for shard in listed if sizes.get(shard.file) == shard.size_bytes]
        return sorted(found, key=lambda shard: shard.number)

    def complete(self, shards: Sequence[DoneShard]) -> None:
        """Writes the list of all shards into one file. Raises SetupError."""
        write_file(self._folder, MANIFEST_FILE, b"".join(map(_line, shards)))


def _line(shard: DoneShard) -> bytes:
    return json.dumps(asdict(shard)).encode() + b"\n"
