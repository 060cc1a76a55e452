"""neuronpipe transform: what is killed and goes on writes the same bytes as what is not; rows fail alone.

NEURONPIPE_TRANSFORM_KILLS: how often each run is killed.
"""

import json
import os
import random
import resource
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from neuronpipe.bulk.transform.far_engine import running_far_engine
from neuronpipe.bulk.transform.files import open_folder
from neuronpipe.bulk.transform.near_engine import NearEngine, TransformSettings, find_bundle, running_near_engine
from neuronpipe.bulk.transform.run import TooManyErrors
from neuronpipe.core.errors import ModelNotFound, SetupError, Unavailable
from tests.systems.transform_runs import (
    MODEL,
    Run,
    command,
    json_records,
    make_rows,
    request_of,
    results,
    transform,
    write_rows,
)

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_KILLS = int(os.environ.get("NEURONPIPE_TRANSFORM_KILLS", "1"))
_ROWS = 1200


@pytest_asyncio.fixture(scope="module")
async def engine(repository: Path) -> AsyncIterator[NearEngine]:
    async with running_near_engine(find_bundle(repository, MODEL, ""), TransformSettings.of()) as engine:
        yield engine


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
async def test_a_run_that_is_killed_goes_on_and_writes_the_same_bytes(
    ending: str, engine: NearEngine, repository: Path, tmp_path: Path
) -> None:
    file = write_rows(tmp_path / f"rows{ending}", make_rows(_ROWS))
    unbroken, killed = tmp_path / "unbroken", tmp_path / "killed"
    await transform(engine, request_of(file, unbroken))
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    listed = 0
    for _ in range(_KILLS):
        run = Run(command(repository, file, killed), killed)
        was_running = run.wait_for_shards(listed + chance.randint(1, 15))
        time.sleep(chance.uniform(0, 0.03))  # so that it is killed anywhere in its work
        run.kill()
        listed = len(list((killed / "_shards").iterdir()))
        if not was_running or listed > _ROWS // 20 - 20:
            break
    report = await transform(engine, request_of(file, killed))
    assert report.resumed_rows >= 20, f"seed {seed}"
    assert (report.rows, report.errors) == (_ROWS, 0)
    assert results(killed) == results(unbroken), f"seed {seed}"
    assert not list(killed.glob(".*unfinished")), f"seed {seed}"


async def test_the_output_does_not_depend_on_how_the_work_is_shared_out(engine: NearEngine, tmp_path: Path) -> None:
    """Shards that are missing are computed alone; those that are there stay as they are."""
    file = write_rows(tmp_path / "rows.jsonl", make_rows(300))
    await transform(engine, request_of(file, tmp_path / "all"))
    await transform(engine, request_of(file, tmp_path / "some"))
    for number in (0, 7, 14):
        (tmp_path / "some" / f"part-{number:05d}.jsonl").unlink()
    report = await transform(engine, request_of(file, tmp_path / "some"))
    assert report.resumed_rows == 240
    assert results(tmp_path / "some") == results(tmp_path / "all")


async def test_a_row_that_fails_gets_its_error_and_others_their_results(engine: NearEngine, tmp_path: Path) -> None:
    lines = [json.dumps(row).encode() for row in make_rows(50)]
    lines[3] = b'{"id": 3, "review": '
    lines[5] = b'{"id": 5, "review": "caf\xe9"}'
    lines[7] = b'{"id": 7, "text": "a column of another name"}'
    lines[9] = json.dumps({"id": 9, "review": "x" * (10 << 20)}).encode()
    lines[11] = json.dumps({"id": 11, "review": "many words " * 600}).encode()
    lines[13] = b'{"id": 13, "review": ""}'
    (tmp_path / "rows.jsonl").write_bytes(b"\n".join(lines))
    report = await transform(engine, request_of(tmp_path / "rows.jsonl", tmp_path / "out"))
    records = json_records(tmp_path / "out")
    assert (len(records), report.rows, report.errors) == (50, 50, 6)
    errors = {number: record["error"] for number, record in enumerate(records) if record["error"]}
    assert errors.keys() == {3, 5, 7, 9, 11, 13}
    for number, words in {3: "no valid JSON", 5: "not UTF-8", 7: "'review': is missing", 9: "bytes, the limit"}.items():
        assert words in errors[number]
    assert "tokens, the model takes" in errors[11]
    for number, record in enumerate(records):
        assert bool(record["label"]) is (number not in errors)
        assert record["id"] == (number if number not in (3, 5) else None)
    with pytest.raises(TooManyErrors, match=r"rows\.jsonl row 4: row: is no valid JSON"):
        await transform(engine, request_of(tmp_path / "rows.jsonl", tmp_path / "few", max_errors=2))


async def test_runs_that_differ_do_not_mix(engine: NearEngine, tmp_path: Path) -> None:
    file = write_rows(tmp_path / "rows.jsonl", make_rows(40))
    await transform(engine, request_of(file, tmp_path / "out"))
    with pytest.raises(SetupError, match="holds a run that differs in prefix"):
        await transform(engine, request_of(file, tmp_path / "out", prefix="p_"))
    write_rows(file, make_rows(41))
    with pytest.raises(SetupError, match="holds a run that differs in input"):
        await transform(engine, request_of(file, tmp_path / "out"))


def _mount(*options: str) -> None:
    subprocess.run(["mount", *options], check=True)


@contextmanager
def _small_disk(folder: Path) -> Iterator[Callable[[], None]]:
    """A folder with room for 24 KiB, until the function that it gives is called: a file system in memory, or where none
    may be mounted a limit on the size of files.
    """
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24k", "tmpfs", folder], check=False, capture_output=True
    )
    if mounted.returncode:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 10, limits[1]))
        try:
            yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        return
    try:
        yield partial(_mount, "-o", "remount,size=64m", str(folder))
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
async def test_a_run_goes_on_after_its_disk_was_full(ending: str, engine: NearEngine, tmp_path: Path) -> None:
    file = write_rows(tmp_path / f"rows{ending}", make_rows(1200))
    with _small_disk(tmp_path / "disk") as enlarge:
        request = request_of(file, tmp_path / "disk" / "out", shard_rows=400, keep=["id", "review"])
        with pytest.raises(SetupError, match=r"cannot be written: (No space left on device|File too large)"):
            await transform(engine, request)
        assert not list((tmp_path / "disk" / "out").glob(".*unfinished"))
        enlarge()
        await transform(engine, request)
        await transform(engine, replace(request, output=str(tmp_path / "unbroken")))
        assert results(tmp_path / "disk" / "out") == results(tmp_path / "unbroken")


def test_one_run_writes_to_a_folder_at_a_time(tmp_path: Path) -> None:
    with (
        open_folder(str(tmp_path / "out")).locked(),
        pytest.raises(SetupError, match="another run writes there"),
        open_folder(str(tmp_path / "out")).locked(),
    ):
        pass


async def test_a_gateway_gives_the_same_results(engine: NearEngine, one_process_target: str, tmp_path: Path) -> None:
    rows = make_rows(300)
    rows[17]["review"] = ""
    file = write_rows(tmp_path / "rows.jsonl", rows)
    await transform(engine, request_of(file, tmp_path / "near"))
    async with running_far_engine(one_process_target, MODEL, "", 30, None) as far:
        report = await transform(far, request_of(file, tmp_path / "far"))
    assert (report.rows, report.errors) == (300, 1)
    near = json_records(tmp_path / "near")
    for ours, theirs in zip(near, json_records(tmp_path / "far"), strict=True):
        assert (ours["id"], ours["label"], ours["error"]) == (theirs["id"], theirs["label"], theirs["error"])
        # A batch of another shape changes the last bits of float32.
        assert ours["score"] is None or ours["score"] == pytest.approx(theirs["score"], abs=1e-5)


async def test_a_gateway_that_does_not_answer_ends_the_run(one_process_target: str) -> None:
    with pytest.raises(ModelNotFound):
        async with running_far_engine(one_process_target, "none", "", 5, None):
            pass
    with pytest.raises(Unavailable):
        async with running_far_engine("127.0.0.1:1", MODEL, "", 1, None):
            pass
