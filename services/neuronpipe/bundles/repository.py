"""The model repository: a folder of bundles, `<model>/<version>/`. Bundles are verified on load.

If keys are trusted, the signature of a manifest is verified before the manifest is parsed. Back ends then load a
private copy, which no other user can change after its verification.
"""

import contextlib
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from neuronpipe.bundles.manifest import MANIFEST_FILE, Artifact, BundleFiles, Manifest, ParsedT
from neuronpipe.core.errors import RefusedBundle, SetupError
from neuronpipe.core.files import reporting_os_errors
from neuronpipe.core.logs import log
from neuronpipe.core.model import ModelSpec

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import TrustedKeys


_LAYOUT = (
    f"a repository holds bundles alone, each with MODEL/VERSION/{MANIFEST_FILE}, as `neuronpipe compile` writes them"
)
# Maximum number of files and folders that a message lists.
_MAX_LISTED = 3
# Names of unfinished bundles, as `new_bundle` gives them.
_UNFINISHED = re.compile(r"\.\d+\.[a-z0-9_]{8}")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A compiled model on disk. Its manifest has been read. Each other file is verified when it is first used.

    `signer`: the id of the trusted key that signed the bundle; empty if no keys are trusted.
    """

    folder: Path
    manifest: Manifest
    digest: str
    signer: str = ""

    @property
    def spec(self) -> ModelSpec:
        return self.manifest.model

    @property
    def key(self) -> tuple[str, int]:
        return self.spec.name, self.spec.version

    def tokenizer_json(self) -> bytes:
        return self.files.read(self.manifest.tokenizer_file)

    def read_tokenizer(self, parse: Callable[[bytes], ParsedT]) -> ParsedT:
        """Returns the result of `parse` for tokenizer.json. Raises RefusedBundle, also for any error of `parse`."""
        return self.files.parse(self.manifest.tokenizer_file, parse)

    def decoding_spec(self) -> ModelSpec:
        """Returns the facts about the model, with the text and weight of each token if its task needs them.

        Raises RefusedBundle.
        """
        facts: dict[str, Any] = {}
        if file := self.manifest.tokens_file:
            facts["tokens"] = self.files.parse(file, TypeAdapter(tuple[str, ...]).validate_json)
        if file := self.manifest.query_weights_file:
            facts["query_weights"] = self.files.parse(file, TypeAdapter(tuple[float, ...]).validate_json)
        return self.spec.model_copy(update=facts)

    def artifact(self, backend: str) -> Artifact:
        """Returns the artefact for a back end; "": the bundle's first. Raises SetupError, which names the artefacts."""
        for artifact in self.manifest.artifacts:
            if backend in ("", artifact.backend):
                return artifact
        backends = ", ".join(artifact.backend for artifact in self.manifest.artifacts)
        advice = f"compile it with --backend {backend}"
        raise SetupError(f"{self.folder}: no artefact for the back end {backend!r}, only for: {backends}; {advice}")

    @contextlib.contextmanager
    def artifact_files(self, artifact: Artifact) -> Iterator[list[Path]]:
        """Verifies the artefact's files, which a back end loads before the block ends.

        The files of a signed bundle are copied to a folder that only this user can write to: no other user can change
        them between verification and use. Raises RefusedBundle, and SetupError if there is no room for the copies.
        """
        if not self.signer:
            yield [self.files.verify(name) for name in artifact.files]
            return
        with tempfile.TemporaryDirectory(prefix="neuronpipe-") as private:
            yield [self.files.copy(name, Path(private)) for name in artifact.files]

    def adapted(self, number: int) -> "Bundle":
        """Returns the same bundle for requests that name its adapter of this number, from 1 on."""
        return replace(self, manifest=self.manifest.model_copy(update={"model": self.spec.adapted(number)}))

    @property
    def files(self) -> BundleFiles:
        return BundleFiles(self.folder, self.manifest.files)


def read_trusted_repository(repository: Path, trusted_keys: Path | None) -> list[Bundle]:
    """Reads every bundle of a repository. `trusted_keys`: their file or folder; None: every bundle is accepted.

    Raises SetupError and RefusedBundle.
    """
    return read_repository(repository, read_trusted_keys(trusted_keys))


def read_trusted_keys(path: Path | None) -> "TrustedKeys | None":
    """Reads the trusted keys from a file or folder. Without a path it returns None, and every bundle is accepted.

    Raises SetupError.
    """
    if path is None:
        return None
    from neuronpipe.bundles.signing import TrustedKeys  # importing cryptography takes long

    return TrustedKeys.read(path)


def read_repository(repository: Path, trusted: "TrustedKeys | None" = None) -> list[Bundle]:
    """Reads every bundle of a repository, or a folder that is a bundle itself. Raises SetupError and RefusedBundle."""
    if (repository / MANIFEST_FILE).is_file():
        return [_read(repository, trusted)]
    return [read_bundle(folder, trusted) for folder in bundle_folders(repository)]


def bundle_folders(repository: Path) -> list[Path]:
    """Finds the folder of each bundle. Raises SetupError, with the contents, if no folder has a manifest."""
    make = f"`neuronpipe compile SOURCE --repository {repository}`"
    if repository.is_file():
        raise SetupError(f"{repository}: is a file; {_LAYOUT}")
    if not repository.is_dir():
        raise SetupError(f"{repository}: no such folder; make a repository with {make}")
    models = _folders(repository)
    folders = [version for model in models for version in _folders(model)]
    if any((version / MANIFEST_FILE).is_file() for version in folders):
        return folders
    if unfinished := [path for model in models for path in model.iterdir() if _UNFINISHED.fullmatch(path.name)]:
        raise SetupError(
            f"{repository}: holds no bundle: {unfinished[0]} is half-written, by a compile that was killed or still "
            f"runs; make one with {make}"
        )
    if models == _visible(repository) and not any(map(_visible, models)):
        raise SetupError(f"{repository}: holds no bundle; make one with {make}")
    raise SetupError(f"{repository}: holds no bundle: {_found_instead(repository, folders)}; {_LAYOUT}")


def _visible(folder: Path) -> list[Path]:
    """Returns the visible files and folders in a folder, sorted. Raises SetupError if the folder cannot be read."""
    with reporting_os_errors(f"{folder}: cannot be read"):
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _folders(folder: Path) -> list[Path]:
    return [path for path in _visible(folder) if path.is_dir()]


def _found_instead(repository: Path, below: Sequence[Path]) -> str:
    """Describes a folder that is no repository: its contents, the repository around it, or repositories in it."""
    path = repository.absolute()
    if bundle := next((parent for parent in path.parents[:3] if (parent / MANIFEST_FILE).is_file()), None):
        return f"it is a part of {bundle}, a bundle of the repository {bundle.parent.parent}"
    if list(path.glob(f"[0-9]*/{MANIFEST_FILE}")):
        return f"it is a model of the repository {path.parent}"
    if inner := sorted({entry.parent for entry in below if list(entry.glob(f"[0-9]*/{MANIFEST_FILE}"))}):
        return f"it holds repositories: {_listed(inner)}"
    if (path / "config.json").is_file():
        return f"it looks like a model of Hugging Face; `neuronpipe compile {repository} --repository DIR` compiles it"
    return f"it holds {_listed([entry.name for entry in _visible(repository)])}"


def _listed(names: Sequence[object]) -> str:
    return ", ".join(map(str, names[:_MAX_LISTED])) + (", …" if len(names) > _MAX_LISTED else "")


def read_bundle(folder: Path, trusted: "TrustedKeys | None" = None, *, is_whole: bool = True) -> Bundle:
    """Reads a bundle. `is_whole`: no file of the bundle may be missing. Raises SetupError and RefusedBundle."""
    if not (folder / MANIFEST_FILE).is_file():
        raise SetupError(f"{folder}: is not a bundle: it has no {MANIFEST_FILE}; {_LAYOUT}")
    bundle = _read(folder, trusted, is_whole)
    if (folder.parent.name, folder.name) != (bundle.spec.name, str(bundle.spec.version)):
        raise RefusedBundle(
            f"{folder}: its manifest is for {bundle.spec.name}/{bundle.spec.version}; the folder was moved or renamed"
        )
    return bundle


def _read(folder: Path, trusted: "TrustedKeys | None", is_whole: bool = True) -> Bundle:
    path = folder / MANIFEST_FILE
    written = path.read_bytes()  # read once, so that the verified bytes are the parsed bytes
    signer = trusted.verify(folder, written) if trusted else ""
    bundle = Bundle(folder, Manifest.parse(written, path), sha256(written).hexdigest(), signer)
    if trusted:
        bundle.files.check_names(is_whole=is_whole)
        log("bundle signature verified", model=bundle.spec.name, version=bundle.spec.version, key=signer)
    return bundle
