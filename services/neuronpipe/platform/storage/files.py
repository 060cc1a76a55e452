"""Objects of S3 as files: listed, fetched and stored without being held in memory. See objects.py for credentials."""

from typing import BinaryIO

from neuronpipe.platform.storage.objects import bucket_failures, open_bucket
from neuronpipe.platform.storage.uris import ObjectUri

_CHUNK_BYTES = 8 << 20


def list_objects(folder: ObjectUri) -> list[ObjectUri]:
    """Every object whose key begins with that of the URI, in order. Raises StorageError."""
    prefix = folder.path.rpartition("/")[0]
    with bucket_failures():
        # Prefixes of obstore are whole folders.
        found = [one["path"] for chunk in open_bucket(folder.bucket).list(prefix or None) for one in chunk]
    return [ObjectUri(folder.scheme, folder.bucket, key) for key in sorted(found) if key.startswith(folder.path)]


def size_of(uri: ObjectUri) -> int | None:
    """The size of an object in bytes; None where there is none. Raises StorageError."""
    with bucket_failures():
        try:
            return int(open_bucket(uri.bucket).head(uri.path)["size"])
        except FileNotFoundError:
            return None


def fetch(uri: ObjectUri, file: BinaryIO) -> None:
    """Writes the content of an object to a file. Raises StorageError."""
    with bucket_failures():
        for chunk in open_bucket(uri.bucket).get(uri.path).stream(_CHUNK_BYTES):
            file.write(memoryview(chunk))


def store(file: BinaryIO, uri: ObjectUri) -> None:
    """Replaces an object by the content of a file, from its place on: others see all of it or nothing.
    Raises StorageError.
    """
    with bucket_failures():
        open_bucket(uri.bucket).put(uri.path, file)
