"""neuronpipe transform --ray: the bytes of one actor, of two, and of two of which one is killed.

Ray is in an environment of its own, .venv-ray, of 600 MB: `make ray` makes it and runs this.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from neuronpipe.transform.near_engine import find_bundle, running_near_engine
from neuronpipe.transform.settings import TransformSettings
from tests.integration.transforming import (
    MODEL,
    Run,
    command,
    make_rows,
    parts,
    request_of,
    transform,
    write_rows,
)

_ROOT = Path(__file__).parents[2]
_PYTHON = _ROOT / ".venv-ray" / "bin" / "python"

pytestmark = [
    pytest.mark.local_only,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not _PYTHON.exists(), reason="needs Ray: `make ray` installs it into .venv-ray and runs this"),
]


@pytest.fixture(scope="module")
async def unbroken(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a run in this process writes."""
    folder = tmp_path_factory.mktemp("unbroken")
    async with running_near_engine(find_bundle(repository, MODEL, ""), TransformSettings()) as engine:
        await transform(engine, request_of(_file(folder), folder / "out"))
    return parts(folder / "out")


def _file(folder: Path) -> Path:
    return write_rows(folder / "rows.jsonl", make_rows(1200))


def _workers(process: psutil.Process) -> Iterator[psutil.Process]:
    """Ray's processes that map the dataset."""
    return (one for one in process.children(recursive=True) if "MapWorker" in one.name() + " ".join(one.cmdline()))


@pytest.mark.parametrize("actors", [1, 2])
async def test_the_output_of_any_number_of_actors_is_the_same(
    actors: int, repository: Path, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    words = command(repository, _file(tmp_path), tmp_path / "out", "--ray", "local", python=str(_PYTHON))
    run = Run([*words, "--actors", str(actors)], tmp_path / "out")
    output, _ = run.process.communicate()
    assert run.process.returncode == 0, output
    assert parts(tmp_path / "out") == unbroken


async def test_a_worker_that_is_killed_costs_its_shard_s_time_only(
    repository: Path, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    words = command(repository, _file(tmp_path), tmp_path / "out", "--ray", "local", python=str(_PYTHON))
    run = Run([*words, "--actors", "2"], tmp_path / "out")
    assert run.wait_for_shards(2)
    workers = list(_workers(psutil.Process(run.process.pid)))
    assert len(workers) == 2
    os.kill(workers[0].pid, signal.SIGKILL)
    output, _ = run.process.communicate()
    assert run.process.returncode == 0, output
    assert parts(tmp_path / "out") == unbroken


async def test_a_run_on_ray_that_is_killed_goes_on(
    repository: Path, unbroken: dict[str, bytes], tmp_path: Path
) -> None:
    file, out = _file(tmp_path), tmp_path / "out"
    words = command(repository, file, out, "--ray", "local", "--actors", "2", python=str(_PYTHON))
    run = Run(words, out)
    assert run.wait_for_shards(3)
    processes = psutil.Process(run.process.pid).children(recursive=True)
    run.kill()
    psutil.wait_procs(processes, timeout=60)  # Ray's own end with the one that started them
    async with running_near_engine(find_bundle(repository, MODEL, ""), TransformSettings()) as engine:
        report = await transform(engine, request_of(file, out))
    assert report.resumed_rows >= 60
    assert parts(out) == unbroken
