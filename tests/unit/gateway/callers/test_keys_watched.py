"""gateway/callers/keys.py: a file's last good content."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Metrics
from neuronpipe.gateway.callers.keys import WatchedFile
from neuronpipe.platform.watched import watching
from tests.suite.waiting import happens


def _parse(content: bytes) -> int:
    try:
        return int(content)
    except ValueError as error:
        raise SetupError("--number: is no number") from error


class _Numbers:
    def __init__(self, path: Path) -> None:
        self.meters = Meters()
        self.file = WatchedFile("--number", path, _parse, self.meters)

    @property
    def is_good(self) -> bool:
        (family,) = [family for family in self.meters.families() if family.instrument is Metrics.FILE_LOADED]
        (gauge,) = family.series.values()
        return bool(family.number(gauge))

    async def until(self, number: int, *, is_good: bool) -> None:
        await happens(lambda: (self.file.value, self.is_good) == (number, is_good))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "number"
    path.write_text("1")
    return path


@asynccontextmanager
async def _watching(path: Path) -> AsyncIterator[_Numbers]:
    numbers = _Numbers(path)
    with watching(numbers.file, every_s=0.01):
        yield numbers


async def test_a_changed_file_is_read_again(path: Path) -> None:
    async with _watching(path) as numbers:
        path.write_text("22")
        await numbers.until(22, is_good=True)


async def test_a_replaced_file_of_the_same_size_and_time_is_read_again(path: Path) -> None:
    async with _watching(path) as numbers:
        times = path.stat().st_atime_ns, path.stat().st_mtime_ns
        new = path.with_name("new")
        new.write_text("2")
        os.utime(new, ns=times)
        new.replace(path)
        await numbers.until(2, is_good=True)


async def test_a_link_that_points_elsewhere_is_read_again(path: Path) -> None:
    """As Kubernetes replaces the files of a secret."""
    link = path.with_name("link")
    link.symlink_to(path)
    async with _watching(link) as numbers:
        path.with_name("other").write_text("2")
        fresh = path.with_name("fresh")
        fresh.symlink_to(path.with_name("other"))
        fresh.replace(link)
        await numbers.until(2, is_good=True)


@pytest.mark.parametrize("spoil", [lambda path: path.write_text("nonsense"), Path.unlink], ids=["broken", "missing"])
async def test_a_broken_or_missing_file_leaves_the_last_good_content(path: Path, spoil: Callable[[Path], Any]) -> None:
    async with _watching(path) as numbers:
        spoil(path)
        await numbers.until(1, is_good=False)
        path.write_text("3")
        await numbers.until(3, is_good=True)


async def test_a_pipe_in_place_of_the_file_stops_nothing(path: Path) -> None:
    async with _watching(path) as numbers:
        path.unlink()
        os.mkfifo(path)
        await numbers.until(1, is_good=False)
        assert numbers.file.problem == f"--number {path}: is a pipe or a device; must be a file"
        path.unlink()
        path.write_text("2")
        await numbers.until(2, is_good=True)


def test_what_has_no_end_is_refused_at_first() -> None:
    with pytest.raises(SetupError, match=r"^--number /dev/zero: is a pipe or a device; must be a file$"):
        _Numbers(Path("/dev/zero"))


def test_a_file_beyond_the_limit_is_refused_by_the_limit(path: Path) -> None:
    os.truncate(path, (64 << 20) + 1)
    with pytest.raises(SetupError, match=f"^--number {path}: more than 67,108,864 bytes, the limit of such a file$"):
        _Numbers(path)


def test_a_mark_of_the_byte_order_is_no_content(path: Path) -> None:
    path.write_bytes(b"\xef\xbb\xbf7")
    assert _Numbers(path).file.value == 7


def test_a_broken_file_is_refused_at_first(path: Path) -> None:
    path.write_text("nonsense")
    with pytest.raises(SetupError, match="is no number"):
        _Numbers(path)


def test_a_missing_file_is_refused_at_first(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"--number .*missing: cannot be read: No such file"):
        _Numbers(tmp_path / "missing")
