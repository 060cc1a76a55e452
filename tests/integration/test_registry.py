"""A registry that changes while processes serve: no caller notices, and what is wrong with a version hurts nobody else.

NEURONPIPE_SWAPS: how often versions swap under load.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.models_pb2 import Model, VersionState
from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.bundles.registry import Registry, Signed
from neuronpipe.bundles.registry_file import REGISTRY_FILE, change_registry
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError
from tests.integration.requests import classify
from tests.integration.test_lifecycle import free_port
from tests.unit.soon import soon

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

_SWAPS = int(os.environ.get("NEURONPIPE_SWAPS", "5"))
_SIGNED = Signed("ann")
_CALLERS = 8
_POLL = ("--registry-poll-s", "0.1")


@pytest.fixture
def versions(fake_repository: Path, tmp_path: Path) -> Path:
    """Versions 1 and 2 of a classifier, which say in their labels which they are; 1 is stable."""
    for version in (1, 2):
        folder = tmp_path / "classifier" / str(version)
        shutil.copytree(fake_repository / "classifier" / "1", folder)
        content = json.loads((folder / MANIFEST_FILE).read_text())
        content["model"]["version"] = version
        content["model"]["labels"] = [f"{version}-{label}" for label in content["model"]["labels"]]
        (folder / MANIFEST_FILE).write_text(json.dumps(content))
    make_stable(tmp_path, 1)
    return tmp_path


def make_stable(repository: Path, version: int) -> Registry:
    return change_registry(repository, lambda now: now.alias("classifier", "stable", version, _SIGNED), _SIGNED)


@contextmanager
def one_process(repository: Path) -> Iterator[Mapping[str, ServiceProcess]]:
    with ServiceProcess("all", "--repository", str(repository), *_POLL) as process:
        yield {"gateway": process.wait_until_ready()}


@contextmanager
def fronted(repository: Path) -> Iterator[Mapping[str, ServiceProcess]]:
    with ServiceProcess("all", "--repository", str(repository), *_POLL, "--front-processes", "2") as process:
        yield {"gateway": process.wait_until_ready()}


_SYSTEMS = {
    "one process": one_process,
    "four processes": lambda repository: four_processes(repository, *_POLL),
    "front processes": fronted,
}


@dataclass
class Load:
    """What callers got, without a version and with the alias."""

    answers: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    async def wait_for_more(self, version: str) -> None:
        """Waits until a version has answered some more."""
        enough = self.answers[version] + _CALLERS
        await soon(lambda: self.answers[version] > enough)

    async def call(self, client: AsyncClient, number: int) -> None:
        """One caller, which asks without a pause until it is cancelled."""
        count = 0
        while True:
            count += 1
            request = classify(f"caller {number}, request {count % 50}")  # few texts, or caches of tokens would grow
            request.version = ("", "stable")[count % 2]
            try:
                response = await client.infer(request, timeout_s=30)
            except NeuronpipeError as error:
                self.wrong.append(f"{error.reason}: {error.message}")
                continue
            labels = [one.label for one in response.result.text_classification.labels]
            self.answers[response.version] += 1
            if not labels or any(not label.startswith(f"{response.version}-") for label in labels):
                self.wrong.append(f"version {response.version} answered {labels}")


@asynccontextmanager
async def under_load(client: AsyncClient) -> AsyncIterator[Load]:
    load = Load()
    async with asyncio.TaskGroup() as group:
        callers = [group.create_task(load.call(client, number)) for number in range(_CALLERS)]
        try:
            yield load
        finally:
            for caller in callers:
                caller.cancel()


async def listed(client: AsyncClient) -> dict[str, Model]:
    return {model.version: model for model in await client.list_models()}


async def serves_only(client: AsyncClient, version: str) -> None:
    """Waits until a version has all requests, and no other is loaded."""
    async with asyncio.timeout(60):
        while True:
            models = await listed(client)
            if models.keys() == {version} and models[version].state == VersionState.VERSION_STATE_READY:
                return
            await asyncio.sleep(0.02)


def resident_kib(process: ServiceProcess) -> int:
    """The memory of a process and its children."""
    pids = [process.pid, *map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]
    lines = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


@pytest.mark.parametrize("processes_of", _SYSTEMS)
async def test_no_answer_is_lost_or_wrong_while_versions_swap(versions: Path, processes_of: str) -> None:
    with _SYSTEMS[processes_of](versions) as processes:
        async with AsyncClient(processes["gateway"].target) as client, under_load(client) as load:
            after: list[int] = []
            for swap in range(_SWAPS):
                version = 2 - swap % 2
                make_stable(versions, version)
                await serves_only(client, str(version))
                await load.wait_for_more(str(version))
                after.append(sum(map(resident_kib, processes.values())))
    assert load.wrong == []
    assert load.answers.keys() == {"1", "2"}
    print(f"{processes_of}: {_SWAPS} swaps, {load.answers.total()} answers, KiB in turn: {after}")
    if _SWAPS >= 50:  # pools of memory fill at first
        assert max(after[-10:]) < 1.05 * max(after[10:20])


async def test_a_version_that_one_stage_cannot_load_leaves_the_old_one_serving_and_can_be_mended(
    versions: Path,
) -> None:
    path = versions / "classifier" / "2" / "tokenizer.json"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with four_processes(versions, *_POLL) as processes:
        async with AsyncClient(processes["gateway"].target) as client, under_load(client) as load:
            make_stable(versions, 2)
            async with asyncio.timeout(60):
                while (await listed(client)).get("2", Model()).state != VersionState.VERSION_STATE_FAILED:
                    await asyncio.sleep(0.02)
            models = await listed(client)
            assert models["1"].state == VersionState.VERSION_STATE_READY
            assert (models["1"].share, models["2"].share) == (1, 0)
            assert (models["1"].is_desired, models["2"].is_desired) == (False, True)
            assert "tokenizer.json: changed since it was compiled" in models["2"].problem
            assert models["2"].problem.startswith("tokenizer: ")
            logged = processes["tokenizer"].wait_for("a version cannot be loaded; what was served stays")
            assert (logged["model"], logged["version"]) == ("classifier", 2)
            assert "2" not in load.answers
            path.write_bytes(content)
            await serves_only(client, "2")
    assert load.wrong == []


async def test_processes_that_are_killed_come_back_with_what_the_registry_says(versions: Path) -> None:
    addresses = {name: f"127.0.0.1:{free_port()}" for name in ("tokenizer", "neuron-executor", "postprocessor")}
    options = ("--repository", str(versions), *_POLL)
    targets = [
        f"--{option}-target={addresses[name]}"
        for option, name in (("tokenizer", "tokenizer"), ("executor", "neuron-executor"), ("postprocessor",) * 2)
    ]

    def start(name: str) -> ServiceProcess:
        return ServiceProcess(name, *options, "--listen", addresses[name])

    stages = {name: start(name) for name in addresses}
    try:
        with ServiceProcess("gateway", *options, *targets) as gateway:
            gateway.wait_until_ready().wait_for("all stages reached")
            async with AsyncClient(gateway.target) as client:
                for number, name in enumerate(addresses):
                    make_stable(versions, 2 - number % 2)
                    stages[name].signal(signal.SIGKILL)
                    stages[name].wait()
                    stages[name].stop()
                    stages[name] = start(name)
                    await serves_only(client, str(2 - number % 2))
                    response = await client.infer(classify("A fine day."), timeout_s=30)
                    assert response.version == str(2 - number % 2)
    finally:
        for stage in stages.values():
            stage.stop()


def _registry(repository: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "neuronpipe", "registry", *arguments, "--repository", str(repository)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_a_day_of_a_platform_engineer(versions: Path) -> None:
    with one_process(versions) as processes:
        async with AsyncClient(processes["gateway"].target) as client:
            (versions / REGISTRY_FILE).unlink()  # versions 1 and 2 were compiled, and nobody has looked at them
            said = _registry(versions, "alias", "classifier", "stable", "1", "--note", "known to work")
            assert "requests without a version: version 1 100 %; aliases: stable 1" in said
            _registry(versions, "alias", "classifier", "canary", "2")
            said = _registry(versions, "route", "classifier", "stable=50", "canary=50")
            assert "requests without a version: version 1 50 %, version 2 50 %" in said
            async with asyncio.timeout(60):
                while (await listed(client)).get("2", Model()).share != 0.5:
                    await asyncio.sleep(0.02)
            answers = Counter[str]()
            for number in range(200):
                request = classify("A fine day.")
                request.request_id = f"request {number}"
                answers[(await client.infer(request, timeout_s=30)).version] += 1
            # One degree of freedom: what one fair split in a thousand exceeds.
            assert (answers["1"] - 100) ** 2 / 100 + (answers["2"] - 100) ** 2 / 100 < 10.83
            for name in ("ann", "bob", "cleo"):  # whoever gives a key stays with one version
                async with AsyncClient(processes["gateway"].target, route_key=name) as own:
                    found = await own.infer_batch([classify(f"text {number}") for number in range(20)])
                assert len({outcome.response.version for outcome in found}) == 1
            _registry(versions, "rollback", "classifier", "--note", "canary is slow")
            assert "canary is slow" in _registry(versions, "history", "classifier")
            _registry(versions, "reject", "classifier", "2", "--author", "bob")
            await serves_only(client, "1")
            with pytest.raises(NeuronpipeError, match="has no version 2; it has: 1"):
                await client.infer(InferRequest(model="classifier", version="2", input=classify("x").input))
            rows = [row.split() for row in _registry(versions, "list").splitlines()]
            assert [row[:4] for row in rows[1:]] == [
                ["classifier", "1", "approved", "stable"],
                ["classifier", "2", "rejected", rows[2][3]],
            ]
