"""A swap that something breaks in the middle: a process that is killed when it has loaded the new version and nothing
has been switched, and clocks that jump.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import pytest

from demo.processes import ServiceProcess
from neuronpipe.bundles.folder_repository import FolderRepository
from neuronpipe.bundles.registry import REGISTRY_FILE, Signed
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError
from tests.callers.requests import classify
from tests.models.versions import changing_manifest
from tests.servers.ports import free_port
from tests.suite.waiting import happens
from tests.systems.versions import Load, make_stable, one_process_of, serves_only, under_load

pytestmark = [pytest.mark.local_only, pytest.mark.sampled, pytest.mark.usefixtures("polls_often")]

_SIGNED = Signed("ann")
_STAGES = {"tokenizer": "tokenizer", "executor": "neuron-executor", "postprocessor": "postprocessor"}


class _System:
    """The four processes at fixed addresses, so that each can be killed and started again."""

    def __init__(self, repository: Path) -> None:
        names = (*_STAGES.values(), "gateway")
        self._addresses = {name: f"127.0.0.1:{free_port()}" for name in names}
        self._options = ("--repository", str(repository))
        self.processes = {name: self._started(name) for name in names}

    def _started(self, name: str) -> ServiceProcess:
        targets = [f"--{option}-target={self._addresses[service]}" for option, service in _STAGES.items()]
        own = targets if name == "gateway" else []
        return ServiceProcess(name, *self._options, "--listen", self._addresses[name], *own)

    @property
    def target(self) -> str:
        return self._addresses["gateway"]

    def kill(self, name: str) -> None:
        self.processes[name].signal(signal.SIGKILL)
        self.processes[name].wait()
        self.processes[name].stop()

    def start(self, name: str) -> None:
        self.processes[name] = self._started(name)

    def stop(self) -> None:
        for process in self.processes.values():
            process.stop()


@pytest.fixture
def restartable(versions: Path) -> Iterator[_System]:
    """Version 2 has a file that executors read and one that tokenizers read; 1 is stable."""
    folder = versions / "classifier" / "2"
    (folder / "weights").write_bytes(b"weights")
    with changing_manifest(folder) as content:
        content["files"]["weights"] = sha256(b"weights").hexdigest()
        content["artifacts"][0]["files"] = ["weights"]
    (versions / REGISTRY_FILE).unlink()
    make_stable(versions, 1)
    made = _System(versions)
    try:
        made.processes["gateway"].wait_until_ready().wait_for("all stages reached")
        yield made
    finally:
        made.stop()


async def test_processes_that_are_killed_come_back_with_what_the_registry_says(
    versions: Path, restartable: _System
) -> None:
    async with AsyncClient(restartable.target) as client:
        for number, name in enumerate(_STAGES.values()):
            version = 2 - number % 2
            make_stable(versions, version)
            restartable.kill(name)
            restartable.start(name)
            await serves_only(client, str(version))
            assert (await client.infer(classify("A fine day."), timeout_s=30)).version == str(version)


@pytest.mark.parametrize("killed", [*_STAGES.values(), "gateway"])
async def test_a_process_that_is_killed_between_loading_and_switching_loses_nothing_else(
    versions: Path, restartable: _System, killed: str
) -> None:
    """One stage cannot load version 2, so that nothing switches while the others have it loaded."""
    late, file = ("neuron-executor", "weights") if killed == "tokenizer" else ("tokenizer", "tokenizer.json")
    path = versions / "classifier" / "2" / file
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    # Whoever starts anew knows of version 1 by this name.
    FolderRepository(versions).change_registry(lambda now: now.alias("classifier", "former", 1, _SIGNED), _SIGNED)
    async with AsyncClient(restartable.target) as client, under_load(client) as load:
        await load.wait_for_more("1")
        make_stable(versions, 2)
        await asyncio.to_thread(restartable.processes[killed].wait_for, "version ready", 2)
        await asyncio.to_thread(
            restartable.processes[late].wait_for, "a version cannot be loaded; the versions in use stay"
        )
        await load.wait_for_more("1")
        assert load.wrong == []
        await asyncio.to_thread(restartable.kill, killed)
        restartable.start(killed)

        async def is_answered() -> bool:
            return await _answer_of(client, "former") == "1"

        await happens(is_answered)
        assert "2" not in load.answers
        path.write_bytes(content)
        # A change of the registry has what failed tried again at once.
        FolderRepository(versions).change_registry(
            lambda now: now.alias("classifier", "former", None, _SIGNED), _SIGNED
        )
        await serves_only(client, "2")
        await load.wait_for_more("2")
        lost = len(load.wrong)
        await load.wait_for_more("2")
        assert len(load.wrong) == lost
    _check(load)


async def _answer_of(client: AsyncClient, version: str) -> str:
    request = classify("A fine day.")
    request.version = version
    try:
        return (await client.infer(request, timeout_s=5)).version
    except NeuronpipeError:
        return ""


def _check(load: Load) -> None:
    """While the killed process is away requests fail, but none waits for ever or has the answer of another version."""
    assert [error for error in load.wrong if not error.startswith("UNAVAILABLE: ")] == []
    assert load.answers.keys() == {"1", "2"}


# What a process gets that asks for the time of day, shifted by the seconds in a file. gRPC's core and obstore ask as
# Python does, so that all of a process has the same clock.
_CLOCK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long shift_s(void) {
  long found = 0;
  FILE *file = fopen(getenv("SHIFTED_CLOCK"), "r");
  if (file) {
    if (fscanf(file, "%ld", &found) != 1) found = 0;
    fclose(file);
  }
  return found;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int failed = real(clock, now);
  if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift_s();
  return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
  struct timespec found;
  int failed = clock_gettime(CLOCK_REALTIME, &found);
  now->tv_sec = found.tv_sec;
  now->tv_usec = found.tv_nsec / 1000;
  return failed;
}

time_t time(time_t *now) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (now) *now = found.tv_sec;
  return found.tv_sec;
}
"""
_YEAR_S = 365 * 24 * 3600


@pytest.fixture
def clock(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the seconds by which the clocks of processes that are started are wrong."""
    folder = tmp_path_factory.mktemp("clock")
    (folder / "clock.c").write_text(_CLOCK)
    (folder / "seconds").write_text("0")
    library = folder / "clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, folder / "clock.c", "-ldl"], check=True)
    monkeypatch.setenv("SHIFTED_CLOCK", str(folder / "seconds"))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    return folder / "seconds"


def _set(file: Path, content: bytes, time_s: float) -> None:
    """Replaces a file by one that was changed at a time."""
    written = file.with_name(f".{file.name}.new")
    written.write_bytes(content)
    os.utime(written, (time_s, time_s))
    written.replace(file)


@pytest.mark.parametrize("jump_s", [-_YEAR_S, _YEAR_S])
async def test_a_clock_that_jumps_by_a_year_changes_nothing(versions: Path, clock: Path, jump_s: int) -> None:
    """The clock of the service, that of who changes the registry, and so the time at which the file was changed."""
    registry = versions / REGISTRY_FILE
    then_s = time.time() + jump_s
    with one_process_of(versions) as processes:
        service = processes["gateway"]
        async with AsyncClient(service.target) as client, under_load(client) as load:
            await load.wait_for_more("1")
            _set(clock, b"%d" % jump_s, 0)
            await load.wait_for_more("1")
            command = [sys.executable, "-m", "neuronpipe", "registry", "alias", "classifier", "stable", "2"]
            before = registry.read_bytes()
            subprocess.run([*command, "--repository", str(versions)], check=True, timeout=60, capture_output=True)
            changed = registry.read_bytes()
            _set(registry, before, then_s)
            await serves_only(client, "1")
            _set(registry, changed, then_s - 1)
            await serves_only(client, "2")
            await load.wait_for_more("2")
            _set(clock, b"0", 0)
            make_stable(versions, 1)
            await serves_only(client, "1")
            await load.wait_for_more("1")
        ready = [str(event["time"]) for event in service.events() if event["event"] == "version ready"]
    assert load.wrong == []
    assert load.answers.keys() == {"1", "2"}
    year = datetime.fromtimestamp(then_s, UTC).isoformat()[:4]
    assert any(moment.startswith(year) for moment in ready), "its clock did not jump"
    history = json.loads(registry.read_text())["history"]
    assert [change["aliases"]["stable"] for change in history[-2:]] == [2, 1]
    assert history[-2]["time"].startswith(year)
