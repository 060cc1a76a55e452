"""Writes bundles: a new bundle appears as a whole in its repository. Only the compiler and commands need this file."""

import contextlib
import filecmp
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuronpipe.bundles.manifest import MANIFEST_FILE, Manifest, file_sha256
from neuronpipe.bundles.repository import Bundle, read_bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import reporting_os_errors

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import SigningKey


def sign_bundle(folder: Path, key: "SigningKey") -> Bundle:
    """Signs the bundle in a folder again or for the first time. Raises SetupError and RefusedBundle."""
    from neuronpipe.bundles.signing import write_signature

    bundle = read_bundle(folder)
    bundle.files.check()
    write_signature(folder, key, bundle.digest)
    return read_bundle(folder, key.trusted())


def default_name(source: str) -> str:
    name = Path(source).name
    return name if name not in ("", "..") else Path(source).resolve().name


def check_is_there(source: str) -> None:
    """Raises SetupError if the source is empty, or is the path of a folder that does not exist."""
    if not source:
        raise SetupError("SOURCE: is empty; . is the folder in which you are")
    if (source.startswith((".", "/", "~")) or source.count("/") > 1) and not Path(source).is_dir():
        raise SetupError(f"{source}: no such folder")


def check_writable(repository: Path, name: str) -> None:
    """Creates and deletes a folder for a bundle of the model. Raises SetupError if that fails."""
    if not name.strip() or name.startswith(".") or "/" in name or not name.isprintable():
        raise SetupError(f"name {name!r} cannot be a folder's name; choose one with --name")
    if "," in name or " " in name:
        raise SetupError(
            f"name {name!r} has a comma or a space, which separate names in settings; choose another with --name"
        )
    with _writing_to(repository / name):
        folders = (repository / name, repository, *repository.absolute().parents)
        existing = next(path for path in folders if path.exists())
        with tempfile.TemporaryDirectory(prefix=".", dir=existing) as probe:
            (Path(probe) / name).mkdir()


def _writing_to(folder: Path) -> contextlib.AbstractContextManager[None]:
    return reporting_os_errors(f"{folder}: cannot be written to", "; see --repository and --name")


def choose_version(repository: Path, name: str, version: int | None) -> int:
    """Returns the version of a new bundle: the requested version, if it is free, or the next. Raises SetupError."""
    taken = _versions(repository, name)
    if version in taken:
        raise SetupError(f"{repository / name / str(version)}: exists; without --version the next free one is taken")
    return version or max(taken, default=0) + 1


def newest_bundle(repository: Path, name: str, backend: str) -> Bundle | None:
    """Returns a model's newest bundle for a back end, or None. Raises SetupError if a bundle cannot be read."""
    for version in sorted(_versions(repository, name), reverse=True):
        bundle = read_bundle(repository / name / str(version))
        if any(artifact.backend == backend for artifact in bundle.manifest.artifacts):
            return bundle
    return None


def _versions(repository: Path, name: str) -> list[int]:
    return [int(folder.name) for folder in (repository / name).glob("[0-9]*") if folder.name.isdigit()]


@contextlib.contextmanager
def new_bundle(repository: Path, name: str, version: int) -> Iterator[Path]:
    """Gives a folder for a new bundle's files. When the block ends without an error, the folder becomes the bundle.

    After an error the folder is deleted. Raises SetupError if no folder can be created, or if another process has
    written the same version in the meantime.
    """
    model_folder = repository / name
    with _writing_to(model_folder):
        model_folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{version}.", dir=model_folder))
    try:
        yield folder
        folder.chmod(0o755)
        _share_files(folder, repository)
        _sync(*folder.rglob("*"), folder)
        _rename(folder, model_folder / str(version))
        _sync(model_folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder contains another version of the model
            model_folder.rmdir()
        raise


def _share_files(folder: Path, repository: Path) -> None:
    """Links files of a new bundle to equal files of others, where the file system has hard links."""
    if not (folder / MANIFEST_FILE).is_file():
        return
    held: dict[str, Path] = {}
    for path in repository.glob(f"[!.]*/[0-9]*/{MANIFEST_FILE}"):
        with contextlib.suppress(SetupError, OSError):
            held |= {digest: path.parent / name for name, digest in Manifest.read(path).files.items()}
    for name, digest in Manifest.read(folder / MANIFEST_FILE).files.items():
        other, spare = held.get(digest), folder / f".{digest}"
        with contextlib.suppress(OSError):
            # The other file may have been damaged since it was written.
            if other and filecmp.cmp(other, folder / name, shallow=False):
                os.link(other, spare)
                spare.replace(folder / name)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    files = {str(path.relative_to(folder)): file_sha256(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    complete = manifest.model_copy(update={"files": files})
    (folder / MANIFEST_FILE).write_text(complete.model_dump_json(indent=2) + "\n")


def _rename(folder: Path, bundle: Path) -> None:
    try:
        folder.rename(bundle)
    except OSError as error:
        if bundle.exists():
            problem = "exists now, written by another process in the meantime; compile the model again"
            raise SetupError(f"{bundle}: {problem}") from error
        raise


def _sync(*paths: Path) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


_MAX_SHOWN = 60


def differences(before: Bundle, after: Bundle) -> list[str]:
    """Returns a line for each setting and each file that differs, and a last line with the number of equal bytes."""
    old_settings, new_settings = _settings(before), _settings(after)
    lines = [
        f"{name}: {_shown(old_settings.get(name, 'none'))} -> {_shown(new_settings.get(name, 'none'))}"
        for name in sorted(old_settings.keys() | new_settings.keys())
        if old_settings.get(name) != new_settings.get(name)
    ]
    old, new = before.files.digests, after.files.digests
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            lines.append(f"{name}: only in {before.folder}, {_size(before, name):,} bytes")
        elif name not in old:
            lines.append(f"{name}: only in {after.folder}, {_size(after, name):,} bytes")
        elif old[name] != new[name]:
            lines.append(f"{name}: differs, {_size(before, name):,} -> {_size(after, name):,} bytes")
    held = set(old.values())
    shared = sum(_size(after, name) for name, digest in new.items() if digest in held)
    return [*lines, f"{shared:,} of {sum(_size(after, name) for name in new):,} bytes are the same in both"]


def _settings(bundle: Bundle) -> dict[str, str]:
    """Returns the settings of a manifest without its files: each value as JSON, by its path."""
    return dict(_flat("", bundle.manifest.model_dump(mode="json", exclude={"files"})))


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flat(f"{path}.{name}" if path else name, item)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for place, item in enumerate(value):
            yield from _flat(f"{path}[{place}]", item)
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _shown(written: str) -> str:
    return written if len(written) <= _MAX_SHOWN else f"{written[:_MAX_SHOWN]}…"


def _size(bundle: Bundle, name: str) -> int:
    return (bundle.folder / name).stat().st_size
