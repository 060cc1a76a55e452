"""API keys: the file of their hashes, one key a line, and the functions of `neuronpipe key`.

WatchedFile reloads this file, and other files of settings, when they change.
"""

import codecs
import hmac
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationError

from neuronpipe.core.callers import check_tenant_name
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import locked_folder, read_file, replace_file, reporting_os_errors
from neuronpipe.core.logs import log_warning
from neuronpipe.core.metrics import Meters
from neuronpipe.core.model import Frozen
from neuronpipe.core.names import Metrics
from neuronpipe.platform.watched import ValueT, Watched


class WatchedFile(Watched[ValueT]):
    """The file of an option, with the metric that says whether it can be used."""

    def __init__(self, option: str, path: Path, parse: Callable[[bytes], ValueT], meters: Meters) -> None:
        """`option`: the option that names the file. `parse` raises SetupError. Raises SetupError."""
        super().__init__([path], lambda: parse(_read(path, option)))
        meters.gauge(Metrics.FILE_LOADED, lambda: not self.problem, option)


def _read(path: Path, option: str = "--api-keys") -> bytes:
    return read_file(path, f"{option} {path}").removeprefix(codecs.BOM_UTF8)


# np_ID_SECRET: the id finds the record, the secret proves the key. Scanners for leaked secrets find the prefix.
PREFIX = "np_"
_ID_BYTES, _SECRET_BYTES, _SALT_BYTES = 8, 32, 16
_SHOWN = 20
_NO_KEYS = b"# All keys are revoked: all callers are refused.\n"
_TIME = "%Y-%m-%dT%H:%M:%SZ"


class CredentialsRefused(Exception):
    """Credentials are not accepted. The message is one word, for the log and the metrics; callers never see it."""


class KeyRecord(Frozen):
    """A key in the file: a line of JSON. `sha256`: the hash of the salt with the secret."""

    id: str = Field(pattern=r"^[0-9a-f]{16}$")
    name: Annotated[str, AfterValidator(check_tenant_name)]
    tenant: Annotated[str, AfterValidator(check_tenant_name)]
    created: str
    expires: str = Field("", pattern=r"^(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)?$")
    salt: str = Field(pattern=r"^[0-9a-f]{32}$")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @property
    def has_expired(self) -> bool:
        """Whether the key has expired; a key without `expires` never does."""
        return bool(self.expires) and self.expires <= datetime.now(UTC).strftime(_TIME)

    def fits(self, secret: str) -> bool:
        return hmac.compare_digest(_hash(self.salt, secret), self.sha256)


def find_key(records: Mapping[str, KeyRecord], key: str) -> KeyRecord | None:
    """Finds the record of a caller's key; None for an unknown key."""
    key_id, _, secret = key.removeprefix(PREFIX).partition("_")
    record = records.get(key_id)
    return record if record and record.fits(secret) else None


def parse_keys(content: bytes, *, must_tell: bool = False) -> Mapping[str, KeyRecord]:
    """Returns the readable keys of a file, by id. Logs the numbers of the first lines that cannot be read.

    `must_tell`: a file without keys needs a comment, because writing may have cut an empty file short. Raises
    SetupError if no line with a key can be read.
    """
    records, broken = {}, []
    for number, line in _lines(content):
        if record := _record(line):
            records[record.id] = record
        else:
            broken.append(number)
    if broken and not records:
        raise SetupError(f"--api-keys: no key can be read; line {broken[0]} is the first that cannot")
    if must_tell and not content.strip():
        raise SetupError("--api-keys: the file is empty; to refuse all callers, write a line that begins with #")
    if broken:
        log_warning(
            "lines of the file of keys cannot be read; the other keys are valid",
            option="--api-keys",
            lines=broken[:_SHOWN],
        )
    return records


def create_key(path: Path, tenant: str, name: str, days: float | None = None) -> str:
    """Adds a key to a file, and makes a missing file. Returns the key itself, which is stored nowhere. `days`: days
    until the key expires; None: it never expires. Raises SetupError.
    """
    key_id, salt = secrets.token_hex(_ID_BYTES), secrets.token_hex(_SALT_BYTES)
    secret, now = secrets.token_urlsafe(_SECRET_BYTES), datetime.now(UTC)
    created, expires = now.strftime(_TIME), "" if days is None else (now + timedelta(days=days)).strftime(_TIME)
    hashed = _hash(salt, secret)
    try:
        record = KeyRecord(
            id=key_id, name=name, tenant=tenant, created=created, expires=expires, salt=salt, sha256=hashed
        )
    except ValidationError as error:
        raise SetupError(
            "--tenant and --name: must have from 1 to 256 characters that can be printed, and be neither . nor .."
        ) from error
    with _changing(path) as (content, write):
        separator = b"\n" if content and not content.endswith(b"\n") else b""
        write(content + separator + record.model_dump_json(exclude_defaults=True).encode() + b"\n")
    return f"{PREFIX}{key_id}_{secret}"


def list_keys(path: Path) -> list[KeyRecord]:
    """Returns the keys of a file. Raises SetupError where it cannot be read."""
    return list(parse_keys(_read(path)).values())


def revoke_keys(path: Path, is_revoked: Callable[[KeyRecord], bool]) -> list[KeyRecord]:
    """Removes keys from a file, and returns them. Raises SetupError.

    Every other line stays as it is. If no key remains, lines without a key become comments: otherwise the file would be
    unreadable, and servers would keep its old keys.
    """
    list_keys(path)
    with _changing(path) as (content, write):
        records = parse_keys(content)
        revoked = {key.id: key for key in records.values() if is_revoked(key)}
        gone = {number for number, line in _lines(content) if (key := _record(line)) and key.id in revoked}
        if gone:
            lines = [line for number, line in enumerate(content.splitlines(keepends=True), 1) if number not in gone]
            if len(revoked) == len(records):
                lines = [_NO_KEYS, *(line if line.startswith(b"#") else b"# " + line for line in lines if line.strip())]
            write(b"".join(lines))
    return list(revoked.values())


def _record(line: bytes) -> KeyRecord | None:
    try:
        return KeyRecord.model_validate_json(line)
    except ValidationError:  # the error's message contains the line
        return None


def _lines(content: bytes) -> Iterator[tuple[int, bytes]]:
    for number, line in enumerate(content.splitlines(), 1):
        if line.strip() and not line.startswith(b"#"):
            yield number, line


def _hash(salt: str, secret: str) -> str:
    return sha256(f"{salt}{secret}".encode()).hexdigest()


@contextmanager
def _changing(path: Path) -> Iterator[tuple[bytes, Callable[[bytes], None]]]:
    """Locks a file. Yields its content, and the function that replaces the whole content. Raises SetupError."""

    def write(content: bytes) -> None:
        replace_file(file, content, mode=file.stat().st_mode & 0o777 if file.exists() else 0o600)

    with reporting_os_errors(f"--api-keys {path}"):
        file = path.resolve()  # a link stays a link, and writers by other names also wait
        with locked_folder(file.parent):
            yield _read(path) if path.exists() else b"", write
