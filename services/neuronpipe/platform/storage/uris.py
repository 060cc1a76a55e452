"""URIs of objects, and where callers may point."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self
from urllib.parse import unquote, urlsplit

SCHEMES = ("s3", "file")


@dataclass(frozen=True, slots=True)
class ObjectUri:
    """An object. `bucket`: empty for a file. `path`: of a file absolute; in a bucket the key, without a slash before.

    A folder ends with a slash, or has an empty path.
    """

    scheme: str
    bucket: str
    path: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises ValueError, which says what is wrong."""
        parts = urlsplit(text)
        if parts.scheme not in SCHEMES:
            raise ValueError(f"must begin with {' or '.join(f'{scheme}://' for scheme in SCHEMES)}")
        if parts.query or parts.fragment:
            raise ValueError("must have no ? and no #")
        path = unquote(parts.path)
        if "\0" in path or any(step in (".", "..") for step in path.split("/")):
            raise ValueError("must have no steps . and .. in its path")
        if parts.scheme == "file":
            if parts.netloc or not path.startswith("/"):
                raise ValueError("must be an absolute path, as file:///data/inputs.jsonl")
            return cls("file", "", path)
        if not parts.netloc:
            raise ValueError("must name a bucket, as s3://BUCKET/KEY")
        return cls("s3", parts.netloc, path.removeprefix("/"))

    def is_below(self, folder: "ObjectUri") -> bool:
        """Whether it is in a folder, at any depth."""
        prefix = f"{folder.path.rstrip('/')}/" if folder.path.strip("/") else folder.path
        is_same_place = (self.scheme, self.bucket) == (folder.scheme, folder.bucket)
        return is_same_place and self.path.startswith(prefix) and self.path != prefix

    def __str__(self) -> str:
        return f"s3://{self.bucket}/{self.path}" if self.scheme == "s3" else f"file://{self.path}"


def parse_below(text: str, folders: Sequence[ObjectUri]) -> ObjectUri:
    """An object that must be in one of the folders. Raises ValueError, which says what is wrong."""
    uri = ObjectUri.parse(text)
    if not any(uri.is_below(folder) for folder in folders):
        raise ValueError(f"must be below {' or '.join(map(str, folders))}")
    return uri
