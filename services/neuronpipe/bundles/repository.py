"""The model repository: a folder of bundles, `<model>/<version>/`. Verified on load, written atomically."""

import contextlib
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from neuronpipe.bundles.manifest import MANIFEST_FILE, Artifact, Manifest, file_sha256
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ModelSpec


@dataclass(frozen=True, slots=True)
class Bundle:
    """A compiled model on disk. Its manifest has been read; each other file is verified when it is first used."""

    folder: Path
    manifest: Manifest
    digest: str

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.manifest.model

    @property
    def key(self) -> tuple[str, int]:
        """The model's name and version."""
        return self.spec.name, self.spec.version

    def tokenizer_file(self) -> Path:
        """The verified tokenizer.json."""
        return self._verified(self.manifest.tokenizer_file)

    def decoding_spec(self) -> ModelSpec:
        """The model with its tokens as text, if its task decodes to tokens.

        Raises SetupError for a file that was changed.
        """
        if not self.manifest.tokens_file:
            return self.spec
        tokens = json.loads(self._verified(self.manifest.tokens_file).read_text(encoding="utf-8"))
        return self.spec.model_copy(update={"tokens": tuple(tokens)})

    def artifact(self, backend: str) -> Artifact:
        """The artefact for a back end ("" for the bundle's first). Raises SetupError, which names those that exist."""
        for artifact in self.manifest.artifacts:
            if backend in ("", artifact.backend):
                return artifact
        known = ", ".join(artifact.backend for artifact in self.manifest.artifacts)
        raise SetupError(
            f"{self.folder}: no artefact for the back end {backend!r}, only for: {known}; compile it with "
            f"--backend {backend}"
        )

    def artifact_files(self, artifact: Artifact) -> list[Path]:
        """The artefact's verified files."""
        return [self._verified(name) for name in artifact.files]

    def _verified(self, name: str) -> Path:
        path = self.folder / name
        if not path.is_file():
            raise SetupError(f"{path}: missing, though the manifest names it; compile the model again")
        if file_sha256(path) != self.manifest.files.get(name):
            raise SetupError(
                f"{path}: changed since it was compiled (its sha256 is not the manifest's); compile the model again"
            )
        return path


def read_repository(repository: Path) -> list[Bundle]:
    """Every bundle of the repository, or the one of a folder that is a bundle itself.

    Raises SetupError where there is none, or one that cannot be read.
    """
    if (repository / MANIFEST_FILE).is_file():
        return [_read(repository)]
    if not repository.is_dir():
        raise SetupError(
            f"{repository}: no such folder; make a repository with `neuronpipe compile SOURCE --repository "
            f"{repository}`"
        )
    folders = sorted(
        version
        for model in repository.iterdir()
        if _is_visible_folder(model)
        for version in model.iterdir()
        if _is_visible_folder(version)
    )
    if not folders:
        raise SetupError(
            f"{repository}: holds no bundle; make one with `neuronpipe compile SOURCE --repository {repository}`"
        )
    return [read_bundle(folder) for folder in folders]


def _is_visible_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def read_bundle(folder: Path) -> Bundle:
    """The bundle in a folder. Raises SetupError where there is none, or a half-written or misplaced one."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise SetupError(f"{folder}: half-written: it has no {MANIFEST_FILE}; delete it and compile the model again")
    bundle = _read(folder)
    if (folder.parent.name, folder.name) != (bundle.spec.name, str(bundle.spec.version)):
        raise SetupError(
            f"{folder}: its manifest is for {bundle.spec.name}/{bundle.spec.version}; the folder was moved or renamed"
        )
    return bundle


def _read(folder: Path) -> Bundle:
    path = folder / MANIFEST_FILE
    return Bundle(folder, Manifest.read(path), file_sha256(path))


def default_name(source: str) -> str:
    """The default name of a model: the last part of its folder or of its id on the Hub."""
    name = Path(source).name
    return name if name not in ("", "..") else Path(source).resolve().name


def check_writable(repository: Path, name: str) -> None:
    """Raises SetupError if no bundle of the model can be written, which is tested by creating and deleting a folder."""
    if not name.strip() or name.startswith(".") or "/" in name or not name.isprintable():
        raise SetupError(f"name {name!r} cannot be a folder's name; choose one with --name")
    if "," in name or " " in name:
        raise SetupError(
            f"name {name!r} has a comma or a space, which separate names in settings; choose another with --name"
        )
    try:
        existing = next(
            path for path in (repository / name, repository, *repository.absolute().parents) if path.exists()
        )
        with tempfile.TemporaryDirectory(prefix=".", dir=existing) as probe:
            (Path(probe) / name).mkdir()
    except OSError as error:
        raise _not_writable(repository / name, error) from error


def _not_writable(folder: Path, error: OSError) -> SetupError:
    return SetupError(
        f"{folder}: cannot be written to: {os.strerror(error.errno or errno.EIO)}; see --repository and --name"
    )


def choose_version(repository: Path, name: str, version: int | None) -> int:
    """The version that a new bundle gets: the one asked for, which must be free, or the next. Raises SetupError."""
    taken = _versions(repository, name)
    if version in taken:
        raise SetupError(f"{repository / name / str(version)}: exists; without --version the next free one is taken")
    return version or max(taken, default=0) + 1


def newest_bundle(repository: Path, name: str, backend: str) -> Bundle | None:
    """A model's newest bundle for a back end; None if there is none. Raises SetupError for one that cannot be read."""
    for version in sorted(_versions(repository, name), reverse=True):
        bundle = read_bundle(repository / name / str(version))
        if any(artifact.backend == backend for artifact in bundle.manifest.artifacts):
            return bundle
    return None


def _versions(repository: Path, name: str) -> list[int]:
    return [int(folder.name) for folder in (repository / name).glob("[0-9]*") if folder.name.isdigit()]


@contextlib.contextmanager
def new_bundle(repository: Path, name: str, version: int) -> Iterator[Path]:
    """A folder for a new bundle's files. It becomes the bundle when the block ends without an error.

    Otherwise it is deleted. Raises SetupError if no folder can be made, or if another process has written the version
    in the meantime.
    """
    model_folder = repository / name
    try:
        model_folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{version}.", dir=model_folder))
    except OSError as error:
        raise _not_writable(model_folder, error) from error
    try:
        yield folder
        folder.chmod(0o755)
        _sync(folder)
        _rename(folder, model_folder / str(version))
        _sync_path(model_folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder holds another version of the model
            model_folder.rmdir()
        raise


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Completes a new bundle: digests every file in the folder and writes the manifest."""
    files = {str(path.relative_to(folder)): file_sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    complete = manifest.model_copy(update={"files": files})
    (folder / MANIFEST_FILE).write_text(complete.model_dump_json(indent=2) + "\n")


def _rename(folder: Path, bundle: Path) -> None:
    try:
        folder.rename(bundle)
    except OSError as error:
        if bundle.exists():
            raise SetupError(
                f"{bundle}: exists now, written by another process in the meantime; compile the model again"
            ) from error
        raise


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync_path(path)


def _sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
