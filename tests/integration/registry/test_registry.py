"""A registry that changes while processes serve: no caller notices, and what is wrong with a version hurts nobody else.

NEURONPIPE_SWAPS: how often versions swap under load.
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.models_pb2 import VersionState
from neuronpipe.bundles.registry import REGISTRY_FILE
from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.core.names import Metrics
from neuronpipe.platform.telemetry.prometheus import scrape
from tests.callers.requests import classify
from tests.models.versions import changing_manifest, copy_classifier
from tests.suite.commands import output, run
from tests.suite.waiting import happens
from tests.systems.guarded_gateway import registry_callers
from tests.systems.versions import CALLERS, listed, make_stable, one_process_of, serves_only, shows, under_load

pytestmark = [pytest.mark.local_only, pytest.mark.sampled, pytest.mark.usefixtures("polls_often")]

_SWAPS = int(os.environ.get("NEURONPIPE_SWAPS", "5"))


@contextmanager
def fronted(repository: Path) -> Iterator[Mapping[str, ServiceProcess]]:
    with ServiceProcess("all", "--repository", str(repository), "--front-processes", "2") as process:
        yield {"gateway": process.wait_until_ready()}


_SYSTEMS = {
    "one process": one_process_of,
    "four processes": lambda repository: four_processes(repository),
    "front processes": fronted,
}


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
    with four_processes(versions) as processes:
        async with AsyncClient(processes["gateway"].target) as client, under_load(client) as load:
            make_stable(versions, 2)
            await shows(client, "2", "state", VersionState.VERSION_STATE_FAILED)
            models = await listed(client)
            assert models["1"].state == VersionState.VERSION_STATE_READY
            assert (models["1"].share, models["2"].share) == (1, 0)
            assert (models["1"].is_desired, models["2"].is_desired) == (False, True)
            assert "tokenizer.json: changed since it was compiled" in models["2"].problem
            assert models["2"].problem.startswith("tokenizer: ")
            logged = processes["tokenizer"].wait_for("a version cannot be loaded; the versions in use stay")
            assert (logged["model"], logged["version"]) == ("classifier", 2)
            assert "2" not in load.answers
            path.write_bytes(content)
            await serves_only(client, "2")
    assert load.wrong == []


def _run_registry(
    option: str, place: str, verb: str, *arguments: str, environment: Mapping[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    return run("registry", verb, option, place, *arguments, environment=environment)


def _registry(repository: Path, verb: str, *arguments: str) -> str:
    return output("registry", verb, "--repository", str(repository), *arguments)


def make_worse(repository: Path, how: str) -> None:
    """Changes version 2 before anybody has approved it."""
    folder = repository / "classifier" / "2"
    with changing_manifest(folder) as content:
        if how == "slower":
            content["artifacts"][0]["properties"] = {"device_time_s": "1"}
        elif how == "other answers":
            content["model"]["labels"].reverse()
        else:  # fails for the texts of Load, and not in warming up
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
            word = tokenizer.encode("caller", add_special_tokens=False).ids[0]
            content["artifacts"][0]["properties"] = {"failing_token_id": str(word)}


@pytest.fixture
def same_answers(fake_repository: Path, tmp_path: Path) -> Path:
    """Versions 1 and 2 of a classifier that answer alike; nobody has approved them."""
    copy_classifier(fake_repository, tmp_path, (1, 2))
    return tmp_path


@pytest.mark.parametrize(
    ("worse", "guard", "told"),
    [
        ("", "agreement=0.99", "version 2 is stable, it was 1"),
        pytest.param("slower", "p99=1.5", "p99 is", marks=[pytest.mark.alone, pytest.mark.long]),
        ("other answers", "agreement=0.99", "agreement is 0.0000, the guard is 0.99"),
        ("failing", "errors=1%", "of the requests fail, the guard is"),
    ],
)
async def test_a_promotion_ends_at_stable_or_where_it_began(
    same_answers: Path, worse: str, guard: str, told: str
) -> None:
    if worse:
        make_worse(same_answers, worse)
    make_stable(same_answers, 1)
    _registry(same_answers, "alias", "classifier", "canary", "2")
    # A core for each caller: no request waits for a batch of the other version.
    options = ("--repository", str(same_answers), "--metrics-listen", "127.0.0.1:0", "--front-processes", "2")
    with ServiceProcess("all", *options, "--cores", str(CALLERS)) as process:
        process.wait_until_ready()
        url = f"http://{process.wait_for('metrics')['address']}/metrics"
        async with AsyncClient(process.target) as client, under_load(client):
            promote = (
                *("registry", "promote", "classifier", "canary", "--repository", str(same_answers), "--metrics", url),
                *("--guard", guard, "--for", "3s", "--requests", "20", "--steps", "50,100"),
            )
            done = await asyncio.to_thread(run, *promote, limit_s=300)
            stable = "1" if worse else "2"
            assert done.returncode == (1 if worse else 0), done.stdout + done.stderr
            assert told in (done.stderr if worse else done.stdout)
            await shows(client, stable, "share", 1.0)
            models = await listed(client)
            assert "stable" in models[stable].aliases
            assert "canary" in models["2"].aliases
            assert models["2"].shadow_share == 0.0


async def test_an_interrupted_promotion_leaves_what_was_before(same_answers: Path) -> None:
    make_stable(same_answers, 1)
    _registry(same_answers, "alias", "classifier", "canary", "2")
    options = ("--repository", str(same_answers), "--metrics-listen", "127.0.0.1:0")
    with ServiceProcess("all", *options) as process:
        url = f"http://{process.wait_until_ready().wait_for('metrics')['address']}/metrics"
        promote = ("registry", "promote", "classifier", "canary", "--metrics", url, "--guard", "errors=1%")
        command = [sys.executable, "-m", "neuronpipe", *promote, "--repository", str(same_answers)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout
            assert "promote canary: 5 %" in running.stdout.readline()
            running.send_signal(signal.SIGINT)
            assert "promote canary: moved back: interrupted" in running.stdout.readline()
        assert running.returncode == 130
    routed = json.loads((same_answers / REGISTRY_FILE).read_text())["models"]["classifier"]
    assert (routed["aliases"], routed["route"]) == ({"stable": 1, "canary": 2}, {})


async def test_a_shadow_gets_copies_and_no_caller_notices(versions: Path) -> None:
    _registry(versions, "alias", "classifier", "candidate", "2")
    said = _registry(versions, "route", "classifier", "--shadow", "candidate=100")
    assert (
        "requests without a version: version 1 100 %; aliases: stable 1, candidate 2; copies: version 2 100 %" in said
    )
    with four_processes(versions, gateway_options=("--metrics-listen", "127.0.0.1:0")) as processes:
        gateway = processes["gateway"]
        url = f"http://{gateway.wait_for('metrics')['address']}/metrics"

        def copies() -> dict[tuple[str, ...], float]:
            found = scrape(url, [Metrics.SHADOW_COPIES, Metrics.SHADOW_AGREEMENT])
            return {key: value for key, value in found.items() if key[1] in ("_total", "_sum")}

        async with AsyncClient(gateway.target) as client:
            await shows(client, "2", "shadow_share", 1.0)
            for number in range(20):
                response = await client.infer(classify(f"text {number}"), timeout_s=30)
                assert response.version == "1"
            compared = (Metrics.SHADOW_COPIES.name, "_total", "classifier", "2", "compared")
            await happens(lambda: copies().get(compared) == 20)
            # The labels of version 2 have other names, so that no answer is the same.
            assert copies()[Metrics.SHADOW_AGREEMENT.name, "_sum", "classifier", "2"] == 0
            _registry(versions, "route", "classifier", "--shadow", "none")
            _registry(versions, "alias", "classifier", "candidate", "none")
            await serves_only(client, "1")


async def test_the_registry_over_grpc_is_the_one_of_the_folder(versions: Path) -> None:
    options = ("--repository", str(versions))
    with ServiceProcess("all", *options) as plain:
        refused = _run_registry("--target", plain.wait_until_ready().target, "list")
        assert (refused.returncode, "runs without --registry-service" in refused.stderr) == (2, True)
    with ServiceProcess("all", *options, "--registry-service") as process:
        target = ("--target", process.wait_until_ready().target)
        asked = _run_registry(*target, "approve", "classifier", "2", "--note", "looks good")
        assert "approved version 2: looks good" in asked.stdout, asked.stderr
        _run_registry(*target, "alias", "classifier", "canary", "2", "--author", "bob")
        routed = _run_registry(*target, "route", "classifier", "stable=75", "canary=25", "--shadow", "canary=10")
        told = "version 1 75 %, version 2 25 %; aliases: stable 1, canary 2; copies: version 2 10 %"
        assert told in routed.stdout, routed.stdout + routed.stderr
        async with AsyncClient(process.target) as client:
            await shows(client, "2", "share", 0.25)
        assert _run_registry(*target, "rollback", "classifier").returncode == 0
        rows = _run_registry(*target, "list").stdout.splitlines()
        assert [row.split()[:4] for row in rows[1:]] == [
            ["classifier", "1", "approved", "stable"],
            ["classifier", "2", "approved", "canary"],
        ]
        wrong = _run_registry(*target, "alias", "classifier", "next", "7")
        assert (wrong.returncode, "model 'classifier': next is version 7" in wrong.stderr) == (2, True)
        outside = _run_registry(*target, "approve", "../classifier", "2")
        assert outside.returncode == 1
        assert "CHANGE_REFUSED" in outside.stderr
        assert "no such bundle" in outside.stderr
    authors = [change["author"] for change in json.loads((versions / REGISTRY_FILE).read_text())["history"]]
    assert "bob" in authors


async def test_a_tenant_changes_the_registry_with_the_right_to_only(
    versions: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys, callers = registry_callers(tmp_path_factory.mktemp("callers"))
    with ServiceProcess("all", "--repository", str(versions), "--registry-service", *callers) as process:
        target = ("--target", process.wait_until_ready().target)

        def as_tenant(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
            return _run_registry(*target, *arguments, environment={"NEURONPIPE_API_KEY": keys[name]})

        refused = as_tenant("app", "approve", "classifier", "2")
        assert refused.returncode == 1
        assert "NOT_ALLOWED: tenant 'app' does not have the right manages_registry" in refused.stderr
        assert "classifier" in as_tenant("app", "list").stdout
        assert "classifier" not in as_tenant("other", "list").stdout
        assert "MODEL_NOT_FOUND" in as_tenant("other", "approve", "classifier", "2").stderr
        assert as_tenant("ops", "approve", "classifier", "2", "--author", "ann").returncode == 0
    assert json.loads((versions / REGISTRY_FILE).read_text())["history"][-1]["author"] == "ops: ann"


async def test_a_day_of_a_platform_engineer(versions: Path) -> None:
    with one_process_of(versions) as processes:
        async with AsyncClient(processes["gateway"].target) as client:
            (versions / REGISTRY_FILE).unlink()  # versions 1 and 2 were compiled, and nobody has looked at them
            said = _registry(versions, "alias", "classifier", "stable", "1", "--note", "known to work")
            assert "requests without a version: version 1 100 %; aliases: stable 1" in said
            _registry(versions, "alias", "classifier", "canary", "2")
            said = _registry(versions, "route", "classifier", "stable=50", "canary=50")
            assert "requests without a version: version 1 50 %, version 2 50 %" in said
            await shows(client, "2", "share", 0.5)
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
            assert "requests without a version: none" in _registry(versions, "unload", "classifier")
            assert "unloaded" in _registry(versions, "list")
            assert "requests without a version: version 1 100 %" in _registry(versions, "load", "classifier")
            _registry(versions, "reject", "classifier", "2", "--author", "bob")
            await serves_only(client, "1")
            with pytest.raises(NeuronpipeError, match="has no version 2; it has: 1"):
                await client.infer(InferRequest(model="classifier", version="2", input=classify("x").input))
            rows = [row.split() for row in _registry(versions, "list").splitlines()]
            assert [row[:4] for row in rows[1:]] == [
                ["classifier", "1", "approved", "stable"],
                ["classifier", "2", "rejected", rows[2][3]],
            ]
