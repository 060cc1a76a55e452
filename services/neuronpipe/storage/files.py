"""Objects of S3 as files: listed, fetched and stored without being held in memory. See objects.py for credentials."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

from neuronpipe.storage.objects import StorageError
from neuronpipe.storage.uris import ObjectUri

if TYPE_CHECKING:
    from obstore.store import S3Store

_CHUNK_BYTES = 8 << 20


def list_objects(folder: ObjectUri) -> list[ObjectUri]:
    """Every object whose key begins with that of the URI, in order. Raises StorageError."""
    prefix = folder.path.rpartition("/")[0]
    with _failures():
        # Prefixes of obstore are whole folders.
        found = [one["path"] for chunk in _bucket(folder).list(prefix or None) for one in chunk]
    return [ObjectUri(folder.scheme, folder.bucket, key) for key in sorted(found) if key.startswith(folder.path)]


def size_of(uri: ObjectUri) -> int | None:
    """The size of an object in bytes; None where there is none. Raises StorageError."""
    with _failures():
        try:
            return int(_bucket(uri).head(uri.path)["size"])
        except FileNotFoundError:
            return None


def fetch(uri: ObjectUri, file: BinaryIO) -> None:
    """Writes the content of an object to a file. Raises StorageError."""
    with _failures():
        for chunk in _bucket(uri).get(uri.path).stream(_CHUNK_BYTES):
            file.write(memoryview(chunk))


def store(file: BinaryIO, uri: ObjectUri) -> None:
    """Replaces an object by the content of a file, from its place on: others see all of it or nothing.
    Raises StorageError.
    """
    with _failures():
        _bucket(uri).put(uri.path, file)


def _bucket(uri: ObjectUri) -> "S3Store":
    from obstore.store import S3Store

    return S3Store.from_url(f"s3://{uri.bucket}")


@contextmanager
def _failures() -> Iterator[None]:
    from obstore.exceptions import BaseError

    try:
        yield
    except FileNotFoundError as error:
        raise StorageError("is not there", is_lasting=True) from error
    except (BaseError, OSError) as error:
        raise StorageError(
            f"the object store does not answer as it should ({type(error).__name__})", is_lasting=False
        ) from error
