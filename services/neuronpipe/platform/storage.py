"""Objects by URI, s3://BUCKET/KEY and file:///PATH. S3 by obstore, files by Python. No other file imports obstore.

A folder in a bucket of S3 also has conditional reads and writes. Credentials and endpoints of S3 come from AWS's
variables (AWS_ACCESS_KEY_ID, AWS_REGION, AWS_ENDPOINT_URL, …), or from the machine, the container or the pod.

An ObjectUri has no field for its scheme: without a bucket it is a file, and otherwise S3. A third scheme begins there.
"""

import errno
import os
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self, cast
from urllib.parse import unquote, urlsplit

from neuronpipe.core.files import replace_file

if TYPE_CHECKING:
    from obstore.store import S3Store

_S3, _FILE = "s3://", "file://"
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class ObjectUri:
    """The URI of an object in S3 or of a file. No field names the scheme: `bucket` is empty for a file.

    `path`: absolute for a file; in a bucket the key, without a leading slash. The path of a folder ends with a slash,
    or is empty.
    """

    bucket: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a URI. Raises ValueError, which names the problem."""
        parts = urlsplit(text)
        if f"{parts.scheme}://" not in (_S3, _FILE):
            raise ValueError(f"must begin with {_S3} or {_FILE}")
        if parts.query or parts.fragment:
            raise ValueError("must have no ? and no #")
        path = unquote(parts.path)
        if "\0" in path or any(step in (".", "..") for step in path.split("/")):
            raise ValueError("must have no steps . and .. in its path")
        if f"{parts.scheme}://" == _FILE:
            if parts.netloc or not path.startswith("/"):
                raise ValueError("must be an absolute path, as file:///data/inputs.jsonl")
            return cls("", path)
        if not parts.netloc:
            raise ValueError("must name a bucket, as s3://BUCKET/KEY")
        return cls(parts.netloc, path.removeprefix("/"))

    def is_below(self, folder: "ObjectUri") -> bool:
        """Returns whether the object is in a folder, at any depth."""
        prefix = f"{folder.path.rstrip('/')}/" if folder.path.strip("/") else folder.path
        return self.bucket == folder.bucket and self.path.startswith(prefix) and self.path != prefix

    def __str__(self) -> str:
        return f"{_S3}{self.bucket}/{self.path}" if self.bucket else _FILE + self.path


def is_in_bucket(place: str) -> bool:
    """Returns whether a place is the URI of an object or folder in S3, and not a path."""
    return place.startswith(_S3)


def parse_below(text: str, folders: Sequence[ObjectUri]) -> ObjectUri:
    """Parses the URI of an object that must be in one of the folders. Raises ValueError, which names the problem."""
    uri = ObjectUri.parse(text)
    if not any(uri.is_below(folder) for folder in folders):
        raise ValueError(f"must be below {' or '.join(map(str, folders))}")
    return uri


class StorageError(Exception):
    """An object cannot be read or written. `is_lasting`: whether trying again cannot help."""

    def __init__(self, problem: str, *, is_lasting: bool) -> None:
        super().__init__(problem)
        self.is_lasting = is_lasting


class Storage:
    """Objects of all schemes. Its methods block; any thread may call them."""

    def __init__(self) -> None:
        self._bucket = cache(open_bucket)

    def read(self, uri: ObjectUri, max_bytes: int) -> bytes:
        """Returns the content of an object. Raises StorageError, also for an object of more than `max_bytes`."""
        with self.open(uri, max_bytes) as file:
            return file.read()

    def open(self, uri: ObjectUri, max_bytes: int) -> BinaryIO:
        """Opens the content of an object as a file, which its reader closes. Raises StorageError, also for an object of
        more than `max_bytes`.
        """
        file = self._fetched(uri, max_bytes) if uri.bucket else _open_file(uri.path)
        if file.seek(0, os.SEEK_END) > max_bytes:
            file.close()
            raise _too_large(max_bytes)
        file.seek(0)
        return file

    def _fetched(self, uri: ObjectUri, max_bytes: int) -> BinaryIO:
        with bucket_failures():
            reply = self._bucket(uri.bucket).get(uri.path)
            if reply.meta["size"] > max_bytes:
                raise _too_large(max_bytes)
            file = tempfile.SpooledTemporaryFile(_CHUNK_BYTES)  # noqa: SIM115 (its reader closes it)
            for chunk in reply.stream(_CHUNK_BYTES):
                file.write(memoryview(chunk))
        return cast(BinaryIO, file)

    def write(self, uri: ObjectUri, content: bytes | BinaryIO) -> None:
        """Replaces an object: others see the old content or the whole new content. A file is written from its start.
        Raises StorageError.
        """
        if not isinstance(content, bytes):
            content.seek(0)
        if not uri.bucket:
            _write_file(Path(uri.path), content)
            return
        with bucket_failures():
            self._bucket(uri.bucket).put(uri.path, content)


def open_bucket(name: str, endpoint: str = "", retries: int = 10) -> "S3Store":
    """Opens a bucket of S3. `endpoint`: URL of the object store; empty: by AWS's variables. `retries`: per request."""
    from obstore.store import S3Store

    return S3Store.from_url(
        _S3 + name,
        config={"endpoint": endpoint} if endpoint else {},
        # Given options replace AWS's variables, so none is given where none is needed.
        client_options={"allow_http": True} if endpoint.startswith("http://") else None,
        retry_config={"max_retries": retries, "retry_timeout": timedelta(minutes=3)},
    )


@contextmanager
def bucket_failures() -> Iterator[None]:
    """Turns obstore's errors in the block into StorageError."""
    from obstore.exceptions import BaseError

    try:
        yield
    except (BaseError, OSError) as error:
        raise _failed(error) from error


def _open_file(path: str) -> BinaryIO:
    try:
        # Opened without waiting: a pipe may never have a writer, and a device may have no end.
        file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115 (its reader closes it)
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            file.close()
            raise IsADirectoryError
    except OSError as error:
        raise _failed(error) from error
    return file


def _write_file(path: Path, content: bytes | BinaryIO) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, content)
    except OSError as error:
        raise _failed(error) from error


def _failed(error: Exception) -> StorageError:
    """Returns the error without the texts of other libraries, which may hold more than callers should see."""
    if isinstance(error, FileNotFoundError):
        return StorageError("is not there", is_lasting=True)
    # FileExistsError: a file stands in the place of the folder.
    is_lasting = isinstance(error, PermissionError | IsADirectoryError | NotADirectoryError | FileExistsError)
    if is_lasting or (isinstance(error, OSError) and error.errno in (errno.ENAMETOOLONG, errno.ELOOP, errno.EROFS)):
        return StorageError("cannot be used: it is no file, or access is denied", is_lasting=True)
    if isinstance(error, OSError) and error.strerror:
        return StorageError(f"cannot be used: {error.strerror}", is_lasting=False)
    kind = type(error).__name__
    if kind in ("PermissionDeniedError", "UnauthenticatedError"):
        return StorageError("access is denied", is_lasting=True)
    return StorageError(f"the object store does not answer as it should ({kind})", is_lasting=False)


def _too_large(max_bytes: int) -> StorageError:
    return StorageError(f"is larger than {max_bytes} bytes, the limit", is_lasting=True)


def list_objects(folder: ObjectUri) -> list[ObjectUri]:
    """Returns the objects whose keys begin with the URI's key, in order. Raises StorageError."""
    prefix = folder.path.rpartition("/")[0]
    with bucket_failures():
        # obstore's prefixes are whole folders.
        keys = [listed["path"] for chunk in open_bucket(folder.bucket).list(prefix or None) for listed in chunk]
    return [ObjectUri(folder.bucket, key) for key in sorted(keys) if key.startswith(folder.path)]


def etag_of(uri: ObjectUri) -> str:
    """Returns the ETag of an object, which changes with its content. Raises StorageError."""
    with bucket_failures():
        return open_bucket(uri.bucket).head(uri.path)["e_tag"] or ""


def fetch(uri: ObjectUri, file: BinaryIO) -> None:
    """Writes the content of an object to a file. Raises StorageError."""
    with bucket_failures():
        for chunk in open_bucket(uri.bucket).get(uri.path).stream(_CHUNK_BYTES):
            file.write(memoryview(chunk))


@dataclass(frozen=True, slots=True)
class Content:
    """The content of an object. `etag`: changes with the content."""

    data: bytes
    etag: str


@dataclass(frozen=True, slots=True)
class Listed:
    """An object in a listing. `modified`: by the clock of the object store."""

    name: str
    size: int
    modified: datetime


class BucketFolder:
    """The objects below a URI, by their names relative to it. Its methods block, and raise StorageError."""

    def __init__(self, uri: ObjectUri, endpoint: str = "", retries: int = 5) -> None:
        """`endpoint`: URL of the object store; empty: by AWS's variables. `retries`: per request."""
        self._uri = uri
        self._prefix = uri.path.strip("/")
        with bucket_failures():
            self._store = open_bucket(uri.bucket, endpoint, retries)

    def uri(self, name: str) -> str:
        """Returns the URI of an object, for messages."""
        return str(ObjectUri(self._uri.bucket, self._key(name)))

    def read(self, name: str) -> Content | None:
        """Returns the content of an object; None if it does not exist."""
        try:
            return self.read_if_changed(name, "")
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise

    def read_if_changed(self, name: str, etag: str) -> Content | None:
        """Returns the content of an object; None if the object still has this ETag. Without an ETag, the object is
        always read.
        """
        from obstore.exceptions import NotModifiedError

        try:
            with bucket_failures():
                reply = self._store.get(self._key(name), options={"if_none_match": etag} if etag else {})
                return Content(bytes(reply.bytes()), reply.meta["e_tag"] or "")
        except StorageError as error:
            if isinstance(error.__cause__, NotModifiedError):
                return None
            raise

    def has(self, name: str) -> bool:
        return self.size(name) is not None

    def size(self, name: str) -> int | None:
        """Returns the size of an object in bytes; None if it does not exist."""
        with bucket_failures():
            try:
                return int(self._store.head(self._key(name))["size"])
            except FileNotFoundError:
                return None

    def read_range(self, name: str, start: int, length: int) -> bytes:
        with bucket_failures():
            return bytes(self._store.get_range(self._key(name), start=start, length=length))

    def replace(self, name: str, data: bytes, etag: str) -> bool:
        """Writes an object if it still has the ETag; "": if it does not exist. Returns whether it was written."""
        from obstore.exceptions import AlreadyExistsError, NotFoundError, PreconditionError

        try:
            with bucket_failures():
                self._store.put(self._key(name), data, mode={"e_tag": etag} if etag else "create")
        except StorageError as error:
            if isinstance(error.__cause__, AlreadyExistsError | NotFoundError | PreconditionError):
                return False
            raise
        return True

    def store(self, name: str, file: BinaryIO) -> None:
        """Writes an object from a file. Others see all of it or nothing."""
        with bucket_failures():
            self._store.put(self._key(name), file)

    def folders(self, name: str = "") -> list[str]:
        """Returns the names of the folders in the folder `name` of this folder, or in this folder itself."""
        prefix = self._key(name)
        with bucket_failures():
            listing = self._store.list_with_delimiter(f"{prefix}/" if prefix else None)
        return sorted(path.rstrip("/").rpartition("/")[2] for path in listing["common_prefixes"])

    def list_all(self) -> list[Listed]:
        cut = len(self._prefix) + 1 if self._prefix else 0
        with bucket_failures():
            return [
                Listed(listed["path"][cut:], listed["size"], listed["last_modified"])
                for page in self._store.list(self._prefix or None)
                for listed in page
            ]

    def delete(self, names: Sequence[str]) -> None:
        """Deletes objects. Missing objects are no error."""
        with bucket_failures():
            self._store.delete([self._key(name) for name in names])

    def _key(self, name: str) -> str:
        return "/".join(filter(None, (self._prefix, name)))
