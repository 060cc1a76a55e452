"""Triton's loading and unloading of models, by tritonclient: the registry changes, and every process follows."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from demo.processes import ServiceProcess, four_processes
from neuronpipe.bundles.registry import REGISTRY_FILE
from tests.systems.guarded_gateway import registry_callers

pytestmark = [pytest.mark.local_only, pytest.mark.sampled, pytest.mark.usefixtures("polls_often")]

_OPTIONS = ("--http-listen", "127.0.0.1:0")


def _started(gateway: ServiceProcess, model: str, key: str) -> "subprocess.Popen[bytes]":
    http = str(gateway.wait_for("listening for HTTP")["address"])
    program = [sys.executable, "-m", "tests.callers.triton_control", gateway.target, http, model]
    return subprocess.Popen([*program, *([key] if key else [])], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def _told(gateway: ServiceProcess, model: str = "classifier", key: str = "") -> dict[str, Any]:
    with _started(gateway, model, key) as running:
        said, wrong = running.communicate(timeout=100)
    assert running.returncode == 0, wrong.decode()
    found: dict[str, Any] = json.loads(said)
    return found


def _history(repository: Path) -> list[tuple[str, str]]:
    history = json.loads((repository / REGISTRY_FILE).read_text())["history"]
    return [(change["author"], change["action"]) for change in history]


def test_tritonclient_unloads_a_model_and_loads_it_again(versions: Path) -> None:
    with four_processes(versions, gateway_options=(*_OPTIONS, "--model-control")) as processes:
        told = _told(processes["gateway"])
    for door, codes in {"grpc": ("NOT_FOUND", "INVALID_ARGUMENT"), "http": ("404", "400")}.items():
        said = told[door]
        assert "model_repository" in said["server"]["extensions"]
        assert [said["unload"], said["unload: ready"]] == [None, False]
        assert said["unload: infer"][0] == codes[0]
        assert ["classifier", "1", "UNAVAILABLE", "unloaded"] in said["unload: index"]
        assert not [entry for entry in said["unload: index"] if entry[2] == "READY"]
        assert [said["load"], said["load: ready"], said["load: infer"]] == [None, True, "1"]
        assert ["classifier", "1", "READY", ""] in said["load: index"]
        assert ["classifier/raw", "1", "READY", ""] in said["load: index"]
        assert said["load with a configuration"][0] == codes[1]
        assert "model 'unknown' is not registered" in said["unknown"][1]
    assert _history(versions)[-4:] == [("anonymous", "unload"), ("anonymous", "load")] * 2


def test_a_model_that_cannot_be_loaded_says_why(versions: Path) -> None:
    path = versions / "classifier" / "1" / "tokenizer.json"
    with four_processes(versions, gateway_options=(*_OPTIONS, "--model-control")) as processes:
        path.write_bytes(path.read_bytes()[:-1])
        told = _told(processes["gateway"])
    for door, code in {"grpc": "FAILED_PRECONDITION", "http": "412"}.items():
        said = told[door]
        assert said["load"][0] == code
        assert "version 1 cannot be loaded: " in said["load"][1]
        assert "tokenizer.json: changed since it was compiled" in said["load"][1]
        assert said["load: ready"] is False
        assert [entry[2] for entry in said["load: index"] if entry[0] == "classifier"] == ["UNAVAILABLE"]


async def test_a_tenant_unloads_a_model_with_the_right_to_only(
    versions: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    keys, callers = registry_callers(tmp_path_factory.mktemp("callers"))
    options = ("--repository", str(versions), *_OPTIONS, "--model-control", *callers)
    with ServiceProcess("all", *options) as process:
        process.wait_until_ready()
        app, other, none = [
            await asyncio.to_thread(_told, process, "classifier", key) for key in (keys["app"], keys["other"], "")
        ]
        for door, code in {"grpc": "PERMISSION_DENIED", "http": "403"}.items():
            for verb in ("load", "unload"):
                assert app[door][verb] == [code, "tenant 'app' does not have the right manages_registry"]
                assert other[door][verb][1] == "model 'classifier' is not registered"
                assert other[door][f"{verb}: index"] == []
                assert none[door][verb][0] in ("UNAUTHENTICATED", "401")
            assert app[door]["unload: infer"] == "1"
        assert _history(versions)[-1][1] != "unload"
        ops = await asyncio.to_thread(_told, process, "classifier", keys["ops"])
    assert [ops[door]["load: infer"] for door in ("grpc", "http")] == ["1", "1"]
    assert _history(versions)[-1] == ("ops", "load")
