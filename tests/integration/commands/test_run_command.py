"""`neuronpipe run` as people use it: a folder in, a server out, and the request that it shows."""

import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.suite.commands import run

pytestmark = pytest.mark.local_only

_LIMIT_S = 120


@contextmanager
def _running(source: Path, home: Path, *options: str) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """The command, and what it has said once it shows a request."""
    command = [sys.executable, "-m", "neuronpipe", "run", str(source), *options]
    listening = ["--listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    environment = {**os.environ, "HOME": str(home)}
    process = subprocess.Popen([*command, *listening], stderr=subprocess.PIPE, text=True, env=environment)
    try:
        said: list[str] = []
        for line in process.stderr or ():
            said.append(line)
            if line.strip().startswith("curl "):
                break
        yield process, said
    finally:
        process.kill()
        process.communicate()


def _request(said: list[str]) -> httpx.Response:
    assert said[-1].strip().startswith("curl "), "".join(said)
    _, address, *_, data = shlex.split(said[-1])
    return httpx.post(address, json=json.loads(data), timeout=60)


@pytest.mark.timeout(3 * _LIMIT_S)
def test_a_folder_becomes_a_server_whose_shown_request_is_answered_and_ctrl_c_ends_it(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    source = sources["classifier"]
    with _running(source, tmp_path, "--name", "first") as (process, said):
        assert "classification" in "".join(said)
        assert "label" in _request(said).text
        [target] = [line.split()[1] for line in said if line.strip().startswith("gRPC ")]
        traced = _run(tmp_path, "--text", "A fine day.", command=("trace", "--target", target, "--model", "first"))
        assert "predict.compute" in traced.stdout
        process.send_signal(signal.SIGINT)
        assert process.wait(_LIMIT_S) == 0
    [kept] = (tmp_path / ".cache/neuronpipe/run").iterdir()
    assert [bundle.name for bundle in (kept / "first").iterdir() if bundle.is_dir()] == ["1"]
    with _running(source, tmp_path, "--name", "first") as (process, said):
        assert "[1/" not in "".join(said)  # it is not compiled again
        assert _request(said).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(_LIMIT_S) == 0
    done = _run(tmp_path, str(source), "--name", "first", "--listen", "192.0.2.1:1")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "192.0.2.1:1" in done.stderr


def test_a_folder_that_is_not_there_ends_it_with_its_reason(tmp_path: Path) -> None:
    done = _run(tmp_path, str(tmp_path / "none"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"neuronpipe: {tmp_path / 'none'}: no such folder"


def _run(home: Path, *words: str, command: tuple[str, ...] = ("run",)) -> "subprocess.CompletedProcess[str]":
    return run(*command, *words, environment={"HOME": str(home)})
