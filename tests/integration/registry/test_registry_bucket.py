"""A repository in a bucket: versions swap as from a folder, and neither a broken fetch nor a bucket that is gone hurts.

The object store is moto's server, of .venv-frameworks (`make setup`), or tests/servers/s3.py where it must fail at a
moment.
"""

import asyncio
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from demo.processes import ServiceProcess, four_processes
from neuronpipe.bundles.registry import REGISTRY_FILE
from neuronpipe.client import AsyncClient
from tests.servers.ports import free_port
from tests.servers.s3 import s3_variables
from tests.servers.web import running_web_server
from tests.suite.commands import output
from tests.systems.versions import Load, serves_only, under_load

pytestmark = [pytest.mark.local_only, pytest.mark.sampled, pytest.mark.usefixtures("polls_often")]

_ROOT = Path(__file__).parents[3]
_URI = "s3://bucket/models"


@contextmanager
def _moto() -> Iterator[str]:
    """The URL of moto's server, with s3://bucket."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    python = str(_ROOT / ".venv-frameworks" / "bin" / "python")
    command = [python, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    asked = urllib.request.Request(f"{url}/bucket", method="PUT")
    with running_web_server(command, asked, limit_s=30):
        yield url


@pytest.fixture
def moto(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with _moto() as url:
        for name, value in s3_variables(url).items():
            monkeypatch.setenv(name, value)
        yield url


def _push(folder: Path, version: int, *options: str) -> str:
    (folder / REGISTRY_FILE).unlink(missing_ok=True)
    return output(
        "bundle", "push", str(folder / "classifier" / str(version)), "--repository", _URI, "--approve", *options
    )


def _make_stable(version: int, *options: str) -> str:
    return output("registry", "alias", "classifier", "stable", str(version), "--repository", _URI, *options)


def _options(cache: Path) -> tuple[str, ...]:
    return "--repository", _URI, "--repository-cache", str(cache)


@pytest.mark.parametrize("count", [1, 4])
async def test_versions_of_a_bucket_swap_under_load_from_an_empty_cache_on(
    versions: Path, moto: str, tmp_path_factory: pytest.TempPathFactory, count: int
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    said = _push(versions, 1, "--endpoint", moto)
    assert f"{_URI}/classifier/1" in said
    assert "requests without a version: version 1 100 %; aliases: stable 1" in said
    _push(versions, 2, "--endpoint", moto)
    with four_processes(_URI, *_options(cache)[2:]) if count == 4 else _one_process(cache) as processes:
        async with AsyncClient(processes["gateway"].target) as client, under_load(client) as load:
            for version in (2, 1, 2):
                await asyncio.to_thread(_make_stable, version, "--endpoint", moto)
                await serves_only(client, str(version))
                await load.wait_for_more(str(version))
    _check(load)
    rows = output("registry", "list", "--repository", _URI, "--endpoint", moto).splitlines()[1:]
    assert [row.split()[:3] for row in rows] == [["classifier", "1", "approved"], ["classifier", "2", "approved"]]
    _check_garbage(moto)


def _check_garbage(moto: str) -> None:
    """A file of no version is deleted, and those of versions stay."""
    left = ".blobs/sha256/" + "a" * 64
    headers = {"content-type": "application/octet-stream"}
    request = urllib.request.Request(f"{moto}/bucket/models/{left}", b"left", headers, method="PUT")
    urllib.request.urlopen(request, timeout=5).close()
    collect = ("bundle", "gc", "--repository", _URI, "--endpoint", moto)
    assert output(*collect) == "0 files, 0 bytes deleted\n"  # it is too young
    found = f"{left}: 4 bytes\n1 files, 4 bytes "
    assert output(*collect, "--grace-hours", "0", "--dry-run") == f"{found}to delete\n"
    assert output(*collect, "--grace-hours", "0") == f"{found}deleted\n"
    assert output(*collect, "--grace-hours", "0") == "0 files, 0 bytes deleted\n"


@contextmanager
def _one_process(cache: Path) -> Iterator[Mapping[str, ServiceProcess]]:
    with ServiceProcess("all", *_options(cache)) as process:
        yield {"gateway": process.wait_until_ready()}


def _check(load: Load) -> None:
    assert load.wrong == []
    assert load.answers.keys() == {"1", "2"}
