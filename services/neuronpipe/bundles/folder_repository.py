"""A repository in a folder: commands and gateways change it, processes load from it."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.bundles.registry import REGISTRY_FILE, Operation, Registry, Signed
from neuronpipe.bundles.repository import Bundle, read_bundle, read_repository
from neuronpipe.core.errors import RefusedBundle, SetupError
from neuronpipe.core.files import locked_folder, read_file, replace_file, reporting_os_errors
from neuronpipe.core.items import ModelKey
from neuronpipe.platform.watched import Watched

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import TrustedKeys


class FolderRepository:
    """A repository in a folder. Every method may raise SetupError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read_registry(self) -> Registry:
        """Returns the registry, or a registry of revision 0 if the folder contains none."""
        path = self._folder / REGISTRY_FILE
        with reporting_os_errors(f"{path}: cannot be read"):
            try:
                path.stat()
            except FileNotFoundError:
                return Registry()
        return Registry.parse(read_file(path, str(path)), path)

    def change_registry(self, operation: Operation, signed: Signed, new: tuple[str, int] | None = None) -> Registry:
        """Applies an operation to the present registry, writes the result and returns it.

        In a repository without a registry, the first operation starts from a registry of all versions that were served
        until then. `new`: a version that has just been made and is left out of that registry. Writers wait for each
        other, and readers see either the old or the new file. Raises also the errors of the operation.
        """
        if (self._folder / MANIFEST_FILE).is_file():
            raise SetupError(
                f"{self._folder}: is a bundle; a registry is in a repository, the folder of its model's folder"
            )
        path = self._folder / REGISTRY_FILE
        with reporting_os_errors(f"{path}: cannot be written"), locked_folder(self._folder):
            present = self.read_registry()
            if not present.revision:
                present = Registry.of_bundles([bundle for bundle in self.bundles() if bundle.key != new], signed)
            changed = operation(present)
            replace_file(path, changed.model_dump_json(indent=2).encode() + b"\n", mode=0o644)
        return changed

    def bundles(self) -> list[Bundle]:
        return read_repository(self._folder)

    def bundle(self, key: ModelKey) -> Bundle:
        folder = self._folder / key.name / str(key.version)
        # A name is one folder: a client that asks over the network must not leave the repository.
        is_name = Path(key.name).name == key.name and key.name != ".." and "\0" not in key.name
        with reporting_os_errors(f"{folder}: cannot be read"):
            if not is_name or not folder.is_dir():
                raise SetupError(f"{folder}: no such bundle; `neuronpipe registry list` lists those that are there")
        return read_bundle(folder)

    def check(self, bundle: Bundle, trusted: "TrustedKeys | None" = None) -> None:
        """Raises RefusedBundle also for missing or damaged files, or without the signature of a `trusted` key."""
        read_bundle(bundle.folder, trusted).files.check()


class LiveRepository(ABC):
    """A repository from which a process loads, with the last registry that could be read.

    - `registry`: revision 0 if there is none.
    - `problem`: the reason why the present registry is not used, or empty.
    - `fixed`: the versions to serve without a registry.
    - `fetched`: the share of the bytes that have arrived, from 0 to 1, for each version that is being fetched.
    """

    registry: Registry
    problem: str
    fixed: Mapping[ModelKey, Bundle]
    fetched: dict[ModelKey, float]
    look_every_s = 1.0

    @property
    def desired(self) -> frozenset[ModelKey]:
        return frozenset(self.registry.desired if self.registry.revision else self.fixed)

    def bundles(self) -> list[Bundle]:
        """Returns the versions to load, by their manifests, without versions whose manifests cannot be read."""
        bundles = []
        for key in sorted(self.desired):
            with contextlib.suppress(SetupError):
                bundles.append(self._approved(key, self.describe))
        return bundles

    def take(self, key: ModelKey) -> Bundle:
        """Returns an approved version, whose files stay until it is released. Raises SetupError and RefusedBundle."""
        return self._approved(key, self.hold)

    def _approved(self, key: ModelKey, read: Callable[[ModelKey, str], Bundle]) -> Bundle:
        if key in self.fixed and not self.registry.revision:
            return self.fixed[key]
        approved = self.registry.models[key.name].versions[key.version]
        bundle = read(key, approved.digest)
        if bundle.digest != approved.digest:
            raise RefusedBundle(
                f"{bundle.folder}: its digest is {bundle.digest[:16]}, the registry has {approved.digest[:16]}: it is "
                "not the bundle that was approved"
            )
        return bundle

    @abstractmethod
    def look(self) -> None:
        """Reads the registry if it has changed."""

    @abstractmethod
    def describe(self, key: ModelKey, digest: str) -> Bundle:
        """Reads the manifest of a version. Raises SetupError and RefusedBundle."""

    def hold(self, key: ModelKey, digest: str) -> Bundle:
        """Returns a version, whose files stay until it is released. Raises SetupError and RefusedBundle."""
        return self.describe(key, digest)

    def release(self, key: ModelKey) -> None:  # noqa: B027 (a folder holds no versions)
        """Ends the use of a version's files."""

    def end(self) -> None:  # noqa: B027 (no thread waits for a folder)
        """Makes calls of other threads that fetch or wait end soon."""


class FolderSource(LiveRepository):
    """A repository in a folder, which contains all files."""

    def __init__(self, folder: Path, trusted: "TrustedKeys | None" = None) -> None:
        """Raises SetupError if the registry or a bundle cannot be read."""
        self._folder = folder
        self._trusted = trusted
        self._has_registry = False
        self._watched = Watched([folder / REGISTRY_FILE], self._read)
        self.registry, self.problem = self._watched.value, ""
        # The bundles that were read at the start.
        bundles = () if self.registry.revision else read_repository(folder, trusted)
        self.fixed = {ModelKey(*bundle.key): bundle for bundle in bundles}
        self.fetched = {}

    def look(self) -> None:
        self._watched.look()
        self.registry, self.problem = self._watched.value, self._watched.problem

    def describe(self, key: ModelKey, digest: str) -> Bundle:
        return read_bundle(self._folder / key.name / str(key.version), self._trusted)

    def _read(self) -> Registry:
        registry = FolderRepository(self._folder).read_registry()
        if self._has_registry and not registry.revision:
            raise SetupError(f"{self._folder / REGISTRY_FILE}: was there, and has vanished")
        self._has_registry = bool(registry.revision)
        return registry
