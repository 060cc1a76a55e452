"""A folder in a bucket of S3, with reads and writes that depend on what is there. See objects.py for credentials."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import BinaryIO

from neuronpipe.platform.storage.objects import (
    ObjectUri,
    StorageError,
    bucket_failures,
    is_not_modified,
    is_other_writer,
    open_bucket,
)


@dataclass(frozen=True, slots=True)
class Content:
    """What an object holds. `etag`: changes with it."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Listed:
    """An object as a list has it. `modified`: by the clock of the object store."""

    name: str
    size: int
    modified: datetime


class BucketFolder:
    """The objects below a URI, by their names in it. Its methods block, and raise StorageError."""

    def __init__(self, uri: ObjectUri, endpoint: str = "", retries: int = 5) -> None:
        """`endpoint`: URL of the object store; empty: as AWS's variables say. `retries`: of a request."""
        self._uri = uri
        self._prefix = uri.path.strip("/")
        with bucket_failures():
            self._store = open_bucket(uri.bucket, endpoint, retries)

    def uri(self, name: str) -> str:
        """The URI of an object, for messages."""
        return str(ObjectUri(self._uri.scheme, self._uri.bucket, self._key(name)))

    def read(self, name: str) -> Content | None:
        """The content of an object; None where there is none."""
        try:
            return self.read_if_changed(name, "")
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def read_if_changed(self, name: str, etag: str) -> Content | None:
        """The content of an object; None while it has the ETag. An empty one: in any case."""
        try:
            with bucket_failures():
                found = self._store.get(self._key(name), options={"if_none_match": etag} if etag else {})
                return Content(bytes(found.bytes()), found.meta["e_tag"] or "")
        except StorageError as error:
            if is_not_modified(error):
                return None
            raise

    def has(self, name: str) -> bool:
        """Whether there is an object."""
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        """The size of an object in bytes; None where there is none."""
        with bucket_failures():
            try:
                return int(self._store.head(self._key(name))["size"])
            except FileNotFoundError:
                return None

    def read_range(self, name: str, start: int, length: int) -> bytes:
        """Some bytes of an object."""
        with bucket_failures():
            return bytes(self._store.get_range(self._key(name), start=start, length=length))

    def replace(self, name: str, data: bytes, etag: str) -> bool:
        """Writes an object if it still has the ETag; an empty one: if there is no such object. Says whether it did."""
        try:
            with bucket_failures():
                self._store.put(self._key(name), data, mode={"e_tag": etag} if etag else "create")
        except StorageError as error:
            if is_other_writer(error):
                return False
            raise
        return True

    def store(self, name: str, file: BinaryIO) -> None:
        """Writes an object from a file. Others see all of it or nothing."""
        with bucket_failures():
            self._store.put(self._key(name), file)

    def folders(self, name: str = "") -> list[str]:
        """The names of the folders directly in this one, or in one of its folders."""
        prefix = self._key(name)
        with bucket_failures():
            found = self._store.list_with_delimiter(f"{prefix}/" if prefix else None)
        return sorted(path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])

    def list_all(self) -> list[Listed]:
        """Every object of this folder and those in it."""
        cut = len(self._prefix) + 1 if self._prefix else 0
        with bucket_failures():
            return [
                Listed(one["path"][cut:], one["size"], one["last_modified"])
                for page in self._store.list(self._prefix or None)
                for one in page
            ]

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects; those that are not there need not be."""
        with bucket_failures():
            self._store.delete([self._key(name) for name in names])

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self._prefix, name)))
