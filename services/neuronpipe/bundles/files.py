"""The files of a bundle, verified by the digests of its manifest."""

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import file_digest, sha256
from io import BufferedReader
from pathlib import Path

from neuronpipe.bundles.manifest import MANIFEST_FILE, SIGNATURE_FILE
from neuronpipe.core.errors import RefusedBundle, SetupError

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class BundleFiles:
    """The files in a folder. `digests`: the sha256 of each by its name, as the manifest has them.

    Every method raises RefusedBundle for a file that is missing or was changed.
    """

    folder: Path
    digests: Mapping[str, str]

    def read(self, name: str) -> bytes:
        """A file's verified content."""
        with self._open(name) as file:
            content = file.read()
        self._compare(name, sha256(content).hexdigest())
        return content

    def verify(self, name: str) -> Path:
        """The path of a file, which is as the manifest says now."""
        with self._open(name) as file:
            self._compare(name, file_digest(file, "sha256").hexdigest())
        return self.folder / name

    def copy(self, name: str, private: Path) -> Path:
        """A verified copy of a file, by the same name in another folder. Raises SetupError where it has no room."""
        digest, target = sha256(), private / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise RefusedBundle(f"{self.folder}: its manifest names {name!r}, which is outside of the bundle")
        source = self._open(name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with source, target.open("xb") as copied:
                while chunk := source.read(_CHUNK_BYTES):
                    digest.update(chunk)
                    copied.write(chunk)
        except OSError as error:
            raise SetupError(
                f"{self.folder / name}: cannot be copied to {private.parent}, from where files of signed bundles are "
                f"loaded: {os.strerror(error.errno or errno.EIO)}; TMPDIR may name another folder"
            ) from error
        self._compare(name, digest.hexdigest())
        return target

    def check_names(self, *, is_whole: bool = True) -> None:
        """Raises RefusedBundle also for a file that the manifest does not name. `is_whole`: all must be there."""
        names = {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if not _is_folder(path)}
        if added := sorted(names - {MANIFEST_FILE, SIGNATURE_FILE, *self.digests}):
            raise RefusedBundle(f"{self.folder}: {added[0]!r} was added: the manifest does not name it; delete it")
        if is_whole and (missing := sorted(self.digests.keys() - names)):
            raise self._missing(missing[0])

    def check(self) -> None:
        """Verifies every file. Raises RefusedBundle also for one that the manifest does not name."""
        self.check_names()
        for name in self.digests:
            self.verify(name)

    def _open(self, name: str) -> BufferedReader:
        path = self.folder / name
        if not path.is_file():  # a device or a pipe would have no end
            raise self._missing(name)
        try:
            return path.open("rb")
        except OSError as error:
            raise SetupError(f"{path}: cannot be read: {os.strerror(error.errno or errno.EIO)}") from error

    def _compare(self, name: str, digest: str) -> None:
        if digest != self.digests.get(name):
            raise RefusedBundle(
                f"{self.folder / name}: changed since it was compiled (its sha256 is not the manifest's); compile the "
                "model again"
            )

    def _missing(self, name: str) -> RefusedBundle:
        return RefusedBundle(f"{self.folder / name}: missing, though the manifest names it; compile the model again")


def _is_folder(path: Path) -> bool:
    # A link to a folder would hide what is in it.
    return path.is_dir() and not path.is_symlink()
