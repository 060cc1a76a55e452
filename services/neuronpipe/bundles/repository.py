"""The model repository: a folder of bundles, `<model>/<version>/`. Verified on load, written atomically.

Where keys are trusted, the signature of a manifest is verified before the manifest is parsed, and what is loaded is a
copy that nobody else can change after it was verified.
"""

import contextlib
import filecmp
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from neuronpipe.bundles.manifest import MANIFEST_FILE, Artifact, BundleFiles, Manifest, ParsedT, file_sha256
from neuronpipe.core.errors import RefusedBundle, SetupError
from neuronpipe.core.files import files_told
from neuronpipe.core.logs import log
from neuronpipe.core.model import ModelSpec

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import SigningKey, TrustedKeys


@dataclass(frozen=True, slots=True)
class Bundle:
    """A compiled model on disk. Its manifest has been read; each other file is verified when it is first used.

    `signer`: the id of the trusted key that signed it; empty where no keys are trusted.
    """

    folder: Path
    manifest: Manifest
    digest: str
    signer: str = ""

    @property
    def spec(self) -> ModelSpec:
        """The model."""
        return self.manifest.model

    @property
    def key(self) -> tuple[str, int]:
        """The model's name and version."""
        return self.spec.name, self.spec.version

    def tokenizer_json(self) -> bytes:
        """The verified content of tokenizer.json. Raises RefusedBundle."""
        return self.files.read(self.manifest.tokenizer_file)

    def read_tokenizer(self, parse: Callable[[bytes], ParsedT]) -> ParsedT:
        """What a function makes of tokenizer.json. Raises RefusedBundle, also where the function raises anything."""
        return self.files.parse(self.manifest.tokenizer_file, parse)

    def decoding_spec(self) -> ModelSpec:
        """The model with its tokens as text, if its task decodes to tokens.

        Raises RefusedBundle for a file that was changed, or is no list of texts.
        """
        if not self.manifest.tokens_file:
            return self.spec
        tokens = self.files.parse(self.manifest.tokens_file, TypeAdapter(tuple[str, ...]).validate_json)
        return self.spec.model_copy(update={"tokens": tokens})

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

    @contextlib.contextmanager
    def artifact_files(self, artifact: Artifact) -> Iterator[list[Path]]:
        """The artefact's verified files, for a back end to load while the block runs.

        Those of a signed bundle are copies in a folder that only this user can write to: nobody else can change them
        between the check and the use. Raises RefusedBundle, and SetupError where there is no room for the copies.
        """
        if not self.signer:
            yield [self.files.verify(name) for name in artifact.files]
            return
        with tempfile.TemporaryDirectory(prefix="neuronpipe-") as private:
            yield [self.files.copy(name, Path(private)) for name in artifact.files]

    @property
    def files(self) -> BundleFiles:
        """Its files, but for the manifest and the signature."""
        return BundleFiles(self.folder, self.manifest.files)


def read_trusted_repository(repository: Path, trusted_keys: Path | None) -> list[Bundle]:
    """As read_repository. `trusted_keys`: the file or folder of the keys; None takes every bundle.

    Raises SetupError also for keys that cannot be read.
    """
    return read_repository(repository, read_trusted_keys(trusted_keys))


def read_trusted_keys(path: Path | None) -> "TrustedKeys | None":
    """The keys of a file or folder; None takes every bundle. Raises SetupError."""
    if path is None:
        return None
    from neuronpipe.bundles.signing import TrustedKeys  # cryptography takes long to import

    return TrustedKeys.read(path)


def read_repository(repository: Path, trusted: "TrustedKeys | None" = None) -> list[Bundle]:
    """Every bundle of the repository, or the one of a folder that is a bundle itself.

    Raises SetupError where there is none, or one that cannot be read, and RefusedBundle for one that none of the
    `trusted` keys signed.
    """
    if (repository / MANIFEST_FILE).is_file():
        return [_read(repository, trusted)]
    return [read_bundle(folder, trusted) for folder in bundle_folders(repository)]


def bundle_folders(repository: Path) -> list[Path]:
    """The folder of each bundle. Raises SetupError where there is none."""
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
    return folders


def _is_visible_folder(path: Path) -> bool:
    return path.is_dir() and not path.name.startswith(".")


def read_bundle(folder: Path, trusted: "TrustedKeys | None" = None, *, is_whole: bool = True) -> Bundle:
    """The bundle in a folder. `is_whole`: whether all its files must be there.

    Raises SetupError where there is none, or a half-written or misplaced one, and RefusedBundle for one that none of
    the `trusted` keys signed.
    """
    path = folder / MANIFEST_FILE
    if not path.is_file():
        raise SetupError(f"{folder}: half-written: it has no {MANIFEST_FILE}; delete it and compile the model again")
    bundle = _read(folder, trusted, is_whole)
    if (folder.parent.name, folder.name) != (bundle.spec.name, str(bundle.spec.version)):
        raise RefusedBundle(
            f"{folder}: its manifest is for {bundle.spec.name}/{bundle.spec.version}; the folder was moved or renamed"
        )
    return bundle


def sign_bundle(folder: Path, key: "SigningKey") -> Bundle:
    """Signs the bundle in a folder, in place of the signature that it may have.

    Raises SetupError and RefusedBundle as read_bundle, RefusedBundle for files that are not as the manifest says, and
    SetupError where the signature cannot be written.
    """
    from neuronpipe.bundles.signing import write_signature

    bundle = read_bundle(folder)
    bundle.files.check()
    write_signature(folder, key, bundle.digest)
    return read_bundle(folder, key.trusted())


def _read(folder: Path, trusted: "TrustedKeys | None", is_whole: bool = True) -> Bundle:
    path = folder / MANIFEST_FILE
    written = path.read_bytes()  # once: what is verified is what is parsed
    signer = trusted.verify(folder, written) if trusted else ""
    bundle = Bundle(folder, Manifest.parse(written, path), sha256(written).hexdigest(), signer)
    if trusted:
        bundle.files.check_names(is_whole=is_whole)
        log("bundle signature verified", model=bundle.spec.name, version=bundle.spec.version, key=signer)
    return bundle


def default_name(source: str) -> str:
    """The default name of a model: the last part of its folder or of its id on the Hub."""
    name = Path(source).name
    return name if name not in ("", "..") else Path(source).resolve().name


def check_is_there(source: str) -> None:
    """Raises SetupError if a model's source can only be a folder and is none, or is empty."""
    if not source:
        raise SetupError("SOURCE: is empty; . is the folder in which you are")
    if (source.startswith((".", "/", "~")) or source.count("/") > 1) and not Path(source).is_dir():
        raise SetupError(f"{source}: no such folder")


def check_writable(repository: Path, name: str) -> None:
    """Raises SetupError if no bundle of the model can be written, which is tested by creating and deleting a folder."""
    if not name.strip() or name.startswith(".") or "/" in name or not name.isprintable():
        raise SetupError(f"name {name!r} cannot be a folder's name; choose one with --name")
    if "," in name or " " in name:
        raise SetupError(
            f"name {name!r} has a comma or a space, which separate names in settings; choose another with --name"
        )
    with _writing_to(repository / name):
        existing = next(
            path for path in (repository / name, repository, *repository.absolute().parents) if path.exists()
        )
        with tempfile.TemporaryDirectory(prefix=".", dir=existing) as probe:
            (Path(probe) / name).mkdir()


def _writing_to(folder: Path) -> contextlib.AbstractContextManager[None]:
    return files_told(f"{folder}: cannot be written to", "; see --repository and --name")


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
    with _writing_to(model_folder):
        model_folder.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f".{version}.", dir=model_folder))
    try:
        yield folder
        folder.chmod(0o755)
        _share_files(folder, repository)
        _sync(folder)
        _rename(folder, model_folder / str(version))
        _sync_path(model_folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # the folder holds another version of the model
            model_folder.rmdir()
        raise


def _share_files(folder: Path, repository: Path) -> None:
    """Replaces files of a new bundle by links to those of other bundles that hold the same: they are on disk once.

    Where the file system has no hard links, files stay as they are.
    """
    if not (folder / MANIFEST_FILE).is_file():
        return
    held: dict[str, Path] = {}
    for path in repository.glob(f"[!.]*/[0-9]*/{MANIFEST_FILE}"):
        with contextlib.suppress(SetupError, OSError):
            held |= {digest: path.parent / name for name, digest in Manifest.read(path).files.items()}
    for name, digest in Manifest.read(folder / MANIFEST_FILE).files.items():
        other, spare = held.get(digest), folder / f".{digest}"
        with contextlib.suppress(OSError):
            # The other may have been damaged since.
            if other and filecmp.cmp(other, folder / name, shallow=False):
                os.link(other, spare)
                spare.replace(folder / name)


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


_MAX_SHOWN = 60


def differences(before: Bundle, after: Bundle) -> list[str]:
    """A line for each setting and each file that differs, and one that says how many bytes are the same in both."""
    told, said = _settings(before), _settings(after)
    lines = [
        f"{name}: {_shown(told.get(name, 'none'))} -> {_shown(said.get(name, 'none'))}"
        for name in sorted(told.keys() | said.keys())
        if told.get(name) != said.get(name)
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
    """The manifest without its files, each value by its path, as JSON."""
    return dict(_flat("", bundle.manifest.model_dump(mode="json", exclude={"files"})))


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for name, one in value.items():
            yield from _flat(f"{path}.{name}" if path else name, one)
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        for place, one in enumerate(value):
            yield from _flat(f"{path}[{place}]", one)
    else:
        yield path, json.dumps(value, ensure_ascii=False)


def _shown(written: str) -> str:
    return written if len(written) <= _MAX_SHOWN else f"{written[:_MAX_SHOWN]}…"


def _size(bundle: Bundle, name: str) -> int:
    return (bundle.folder / name).stat().st_size
