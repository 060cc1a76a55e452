"""neuronpipe transform --ray: the bytes of one actor, of two, and of two of which one is killed.

Ray is in an environment of its own, .venv-ray, of 600 MB: `make ray` makes it and runs this.
"""

import re
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from neuronpipe.bulk.transform.near_engine import TransformSettings, find_bundle, running_near_engine
from tests.servers.ports import free_port
from tests.systems.transform_runs import MODEL, Run, command, make_rows, parts, request_of, transform, write_rows

_ROOT = Path(__file__).parents[3]
_PYTHON = _ROOT / ".venv-ray" / "bin" / "python"

_ATTEMPTS = 6
_Cluster: TypeAlias = tuple[psutil.Process, str]

pytestmark = [
    pytest.mark.local_only,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not _PYTHON.exists(), reason="needs Ray: `make ray` installs it into .venv-ray and runs this"),
]


@pytest.fixture(scope="module")
async def unbroken(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run in this process writes."""
    folder = tmp_path_factory.mktemp("unbroken")
    async with running_near_engine(find_bundle(repository, MODEL, ""), TransformSettings.of()) as engine:
        await transform(engine, request_of(_file(folder), folder / "out"))
    return parts(folder / "out")


@pytest.fixture(scope="module")
def _token() -> Iterator[None]:
    """The cluster's own, which its callers show."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex())
        yield


@pytest.fixture(scope="module")
def cluster(_token: None) -> Iterator[_Cluster]:
    """A cluster of this test's own, and its address. Ray gives up after 30 s, so it is started again."""
    for attempt in range(_ATTEMPTS):
        port = free_port()
        options = ["--head", f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--block"]
        process = subprocess.Popen(
            [_PYTHON.with_name("ray"), "start", "--disable-usage-stats", *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout
        lines = []
        for line in process.stdout:
            lines.append(line)
            if found := re.search(r"--address='(\S+)'", line):
                address = found[1]
                break
        else:
            process.wait()
            assert attempt < _ATTEMPTS - 1, "".join(lines)
            continue
        yield psutil.Process(process.pid), address
        break
    children = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    process.communicate()
    psutil.wait_procs(children, timeout=60)


def _file(folder: Path) -> Path:
    return write_rows(folder / "rows.jsonl", make_rows(1200))


def _workers(cluster: psutil.Process) -> list[psutil.Process]:
    """Ray's processes that map the dataset."""
    return [child for child in cluster.children(recursive=True) if "MapWorker" in " ".join(child.cmdline())]


@pytest.mark.parametrize("actors", [1, 2])
async def test_the_output_of_any_number_of_actors_is_the_same(
    actors: int, cluster: _Cluster, repository: Path, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    words = command(repository, _file(tmp_path), tmp_path / "out", "--ray", cluster[1], python=str(_PYTHON))
    run = Run([*words, "--actors", str(actors)], tmp_path / "out")
    output, _ = run.process.communicate()
    assert run.process.returncode == 0, output
    assert parts(tmp_path / "out") == unbroken


async def test_a_worker_that_is_killed_costs_its_shard_s_time_only(
    cluster: _Cluster, repository: Path, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    words = command(repository, _file(tmp_path), tmp_path / "out", "--ray", cluster[1], python=str(_PYTHON))
    run = Run([*words, "--actors", "2"], tmp_path / "out")
    assert run.wait_for_shards(2)
    workers = _workers(cluster[0])
    assert len(workers) == 2
    workers[0].kill()
    output, _ = run.process.communicate()
    assert run.process.returncode == 0, output
    assert parts(tmp_path / "out") == unbroken


async def test_a_run_on_ray_that_is_killed_goes_on(
    cluster: _Cluster, repository: Path, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    file, out = _file(tmp_path), tmp_path / "out"
    words = command(repository, file, out, "--ray", cluster[1], "--actors", "2", python=str(_PYTHON))
    run = Run(words, out)
    assert run.wait_for_shards(3)
    run.kill()
    async with running_near_engine(find_bundle(repository, MODEL, ""), TransformSettings.of()) as engine:
        report = await transform(engine, request_of(file, out))
    assert report.resumed_rows >= 60
    assert parts(out) == unbroken
