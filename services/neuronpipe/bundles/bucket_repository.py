"""A repository in a bucket of S3: manifests by model and version, their files by digest, and registry.json.

The content of a file is stored once, as `.blobs/sha256/<digest>`, for all versions and models that contain it. A bundle
that was copied into the bucket by other means, with its files beside its manifest, is read as well.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.bundles.manifest import MANIFEST_FILE, SIGNATURE_FILE, Manifest
from neuronpipe.bundles.registry import REGISTRY_FILE, Operation, Registry, Signed
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.core.items import ModelKey
from neuronpipe.platform.storage import BucketFolder, Listed, ObjectUri, StorageError

if TYPE_CHECKING:
    from neuronpipe.bundles.signing import TrustedKeys

_BLOBS = ".blobs/sha256"
# The bucket contains this object while `collect_garbage` lists and deletes files.
_COLLECTING = ".blobs/collecting"
_COLLECTING_LOOK_S, _COLLECTING_LIMIT_S = 1.0, 600.0
# A writer of registry.json that was overtaken tries again after a random pause, which is at most this long.
_WRITES, _LONGEST_PAUSE_S = 20, 0.2

_KILLED = "if that one was killed, delete the object and try again"


class BucketRepository:
    """Reads and writes a repository in a bucket. Every method blocks, and raises SetupError."""

    def __init__(self, uri: str, endpoint: str = "", *, retries: int = 5) -> None:
        """`uri`: s3://BUCKET/PREFIX. `endpoint`, `retries`: see BucketFolder."""
        try:
            parsed = ObjectUri.parse(uri)
        except ValueError as error:
            raise SetupError(f"--repository {uri}: {error}") from error
        self.uri = uri
        self.endpoint = endpoint
        with _setup_errors(uri):
            try:
                self._folder = BucketFolder(parsed, endpoint, retries)
            except ImportError as error:
                raise SetupError(f"--repository {uri}: needs obstore: pip install 'neuronpipe[s3]'") from error

    def read_registry(self) -> Registry:
        """Returns the registry, or a registry of revision 0 if the bucket contains none."""
        return self._read_registry()[0]

    def read_registry_if_changed(self, etag: str) -> tuple[Registry, str] | None:
        """Returns the registry and its ETag; None if the registry still has this ETag. Raises SetupError also without a
        registry.
        """
        with _setup_errors(self._name(REGISTRY_FILE)):
            changed = self._folder.read_if_changed(REGISTRY_FILE, etag)
        return (Registry.parse(changed.data, self._name(REGISTRY_FILE)), changed.etag) if changed else None

    def change_registry(self, operation: Operation, signed: Signed, new: tuple[str, int] | None = None) -> Registry:
        """See FolderRepository. A writer that was overtaken applies its operation to the registry as it is then."""
        for _ in range(_WRITES):
            present, etag = self._read_registry()
            if not present.revision:
                present = Registry.of_bundles([bundle for bundle in self.bundles() if bundle.key != new], signed)
            changed = operation(present)
            with _setup_errors(self._name(REGISTRY_FILE)):
                written = changed.model_dump_json(indent=2).encode() + b"\n"
                if self._folder.replace(REGISTRY_FILE, written, etag):
                    return changed
            time.sleep(random.uniform(0, _LONGEST_PAUSE_S))  # noqa: S311
        raise SetupError(f"{self._name(REGISTRY_FILE)}: others changed it {_WRITES} times at once; try again")

    def bundles(self) -> list[Bundle]:
        """Returns every version by its manifest. The other files stay in the bucket."""
        with _setup_errors(self.uri):
            keys = [
                ModelKey(model, int(version))
                for model in self._folder.folders()
                if not model.startswith(".")
                for version in self._folder.folders(model)
                if version.isdecimal()
            ]
        return [self.bundle(key) for key in sorted(keys)]

    def bundle(self, key: ModelKey) -> Bundle:
        """Returns a version, as its manifest describes it. The other files stay in the bucket."""
        written = self.manifest(key)
        place = self._name(f"{key.name}/{key.version}")
        return Bundle(Path(place), Manifest.parse(written, f"{place}/{MANIFEST_FILE}"), sha256(written).hexdigest())

    def check(self, bundle: Bundle, trusted: "TrustedKeys | None" = None) -> None:
        """Raises SetupError if a file is missing, and RefusedBundle if no `trusted` key signed the bundle."""
        key = ModelKey(*bundle.key)
        if trusted:
            base = f"{key.name}/{key.version}"
            trusted.verify_signature(self._name(base), self.manifest(key), self.signature(key))
        for name, digest in bundle.manifest.files.items():
            self.find(key, name, digest)

    def manifest(self, key: ModelKey) -> bytes:
        if (written := self._read(name := f"{key.name}/{key.version}/{MANIFEST_FILE}")) is None:
            raise SetupError(f"{self._name(name)}: is not there; upload the version with `neuronpipe bundle push`")
        return written

    def signature(self, key: ModelKey) -> bytes | None:
        """Returns the bytes of a version's signature, or None if the version is not signed."""
        return self._read(f"{key.name}/{key.version}/{SIGNATURE_FILE}")

    def _read(self, name: str) -> bytes | None:
        with _setup_errors(self._name(name)):
            stored = self._folder.read(name)
        return stored.data if stored else None

    def find(self, key: ModelKey, name: str, digest: str) -> tuple[str, int]:
        """Returns the name of the object that contains a version's file, and its size in bytes."""
        beside = f"{key.name}/{key.version}/{name}"
        for place in f"{_BLOBS}/{digest}", beside:
            with _setup_errors(self._name(place)):
                if (size := self._folder.size(place)) is not None:
                    return place, size
        raise SetupError(f"{self._name(beside)}: is not there, though the manifest names it; push the bundle again")

    def read_range(self, place: str, start: int, length: int) -> bytes:
        """Reads `length` bytes of an object, from the byte `start`."""
        with _setup_errors(self._name(place)):
            return self._folder.read_range(place, start, length)

    def push(self, bundle: Bundle, tell: Callable[[str], None]) -> None:
        """Uploads the bundle of a folder, with its manifest last: other processes see the whole bundle or none of it.
        Files that the bucket contains already are not sent again. `tell` is called with a line for each file.

        Raises SetupError if the version exists with another content, and RefusedBundle for a damaged bundle.
        """
        bundle.files.check()
        self._push_files(bundle, tell)
        self._push_manifest(bundle)
        # A collection that starts from now on sees the manifest. A collection that started before may have deleted
        # files of this bundle, which are pushed again.
        self._wait_for_collector(tell)
        self._push_files(bundle, lambda line: None)

    def collect_garbage(self, grace_s: float, *, deletes: bool) -> list[Listed]:
        """Deletes the files that no version's manifest names, or only lists them if `deletes` is False. Files younger
        than `grace_s` seconds stay, because they may belong to a version that is being pushed.

        Raises SetupError also if another process is collecting garbage, and for a manifest that cannot be read.
        """
        if not deletes:
            return self._garbage(grace_s)
        with _setup_errors(self._name(_COLLECTING)):
            if not self._folder.replace(_COLLECTING, b"", ""):
                raise SetupError(f"{self._name(_COLLECTING)}: is there, so another process collects garbage; {_KILLED}")
            try:
                garbage = self._garbage(grace_s)
                self._folder.delete([listed.name for listed in garbage])
            finally:
                self._folder.delete([_COLLECTING])
        return garbage

    def _garbage(self, grace_s: float) -> list[Listed]:
        with _setup_errors(self.uri):
            objects = self._folder.list_all()
        used = set()
        for listed in objects:
            model, _, rest = listed.name.partition("/")
            version, _, file = rest.partition("/")
            if file == MANIFEST_FILE and version.isdecimal():
                bundle = self.bundle(ModelKey(model, int(version)))
                used |= {f"{_BLOBS}/{digest}" for digest in bundle.manifest.files.values()}
        before = datetime.now(UTC) - timedelta(seconds=grace_s)
        unused = (listed for listed in objects if listed.name.startswith(f"{_BLOBS}/") and listed.name not in used)
        return [listed for listed in unused if listed.modified <= before]

    def _wait_for_collector(self, tell: Callable[[str], None]) -> None:
        waited_until_s = time.monotonic() + _COLLECTING_LIMIT_S
        with _setup_errors(self._name(_COLLECTING)):
            while self._folder.has(_COLLECTING):
                if time.monotonic() > waited_until_s:
                    raise SetupError(f"{self._name(_COLLECTING)}: is there for {_COLLECTING_LIMIT_S:g} s; {_KILLED}")
                tell("waits until `neuronpipe bundle gc` is done")
                time.sleep(_COLLECTING_LOOK_S)

    def _push_files(self, bundle: Bundle, tell: Callable[[str], None]) -> None:
        for name, digest in bundle.manifest.files.items():
            path, place = bundle.folder / name, f"{_BLOBS}/{digest}"
            with _setup_errors(self._name(place)), path.open("rb") as file:
                if self._folder.size(place) == (size := path.stat().st_size):
                    tell(f"{name}: {size:,} bytes, there already")
                    continue
                self._folder.store(place, file)
            tell(f"{name}: {size:,} bytes")

    def _push_manifest(self, bundle: Bundle) -> None:
        key, written = ModelKey(*bundle.key), (bundle.folder / MANIFEST_FILE).read_bytes()
        base = f"{key.name}/{key.version}"
        with _setup_errors(self._name(base)):
            if (signature := bundle.folder / SIGNATURE_FILE).is_file():
                with signature.open("rb") as file:
                    self._folder.store(f"{base}/{SIGNATURE_FILE}", file)
            if not self._folder.replace(f"{base}/{MANIFEST_FILE}", written, "") and self.manifest(key) != written:
                raise SetupError(
                    f"{self._name(base)}: is there with another content; versions do not change: compile another one"
                )

    def _read_registry(self) -> tuple[Registry, str]:
        with _setup_errors(self._name(REGISTRY_FILE)):
            stored = self._folder.read(REGISTRY_FILE)
        return (Registry.parse(stored.data, self._name(REGISTRY_FILE)), stored.etag) if stored else (Registry(), "")

    def _name(self, name: str) -> str:
        return self._folder.uri(name)


@contextmanager
def _setup_errors(place: str) -> Iterator[None]:
    """Turns an error of the object store into a SetupError that names the place."""
    try:
        yield
    except StorageError as error:
        raise SetupError(f"{place}: {error}") from error
