"""cli/run.py: the first request that it shows is one that its door takes, and its processes end with it."""

import json
import shlex
import subprocess
import sys

import pytest

from neuronpipe.cli import run
from neuronpipe.core.settings import read_settings
from neuronpipe.core.task_inputs import SAMPLES
from neuronpipe.doors.http.huggingface_tasks import CONVERTERS
from neuronpipe.serve.settings import AllSettings

_MODEL_TASKS = [task for task in SAMPLES if task not in ("tokenization", "detokenization")]


@pytest.mark.parametrize("task", _MODEL_TASKS)
def test_thefirst_request_of_each_task_is_one_that_its_door_takes(task: str) -> None:
    program, address, *_, data = shlex.split(run.first_request("m", task, "http://127.0.0.1:8080"))
    body = json.loads(data)
    assert program == "curl"
    if task == "text_generation":
        assert address.endswith("/v1/completions")
        assert body["prompt"] == SAMPLES[task]["prompt"]
    else:
        assert address == "http://127.0.0.1:8080/models/m"
        CONVERTERS[task].takes.validate_python(body)
        assert body.get("prompt_name") == ("query" if SAMPLES[task].get("is_query") else None)


@pytest.mark.parametrize(
    ("http_listen", "variables", "console", "header"),
    [
        ("127.0.0.1:8080", {}, "console  http://127.0.0.1:8080/\n", False),
        ("0.0.0.0:8080", {}, "console  off (--http-listen is not on loopback", False),
        ("0.0.0.0:8080", {"CONSOLE": "on"}, "console  http://127.0.0.1:8080/\n", False),
        ("127.0.0.1:8080", {"CONSOLE": "off", "API_KEYS": "/keys"}, "console  off\n", True),
    ],
)
def test_the_addresses_and_the_request_that_it_shows_fit_the_settings(
    http_listen: str,
    variables: dict[str, str],
    console: str,
    header: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"NEURONPIPE_ALL_{name}", value)
    options = {"repository": "models", "listen": "127.0.0.1:50050", "http_listen": http_listen}
    run._tell("m", "text_classification", read_settings(AllSettings, options), "127.0.0.1:50050", http_listen)
    shown = capsys.readouterr().err
    assert console in shown
    assert "  HTTP     http://127.0.0.1:8080\n" in shown
    assert "curl http://127.0.0.1:8080/models/m" in shown
    assert ('-H "authorization: Bearer $NEURONPIPE_API_KEY"' in shown) is header
    assert ("neuronpipe key create --api-keys /keys --tenant TENANT" in shown) is header


def test_what_it_has_started_ends_with_it_also_when_it_is_killed() -> None:
    code = """
import sys, time
from neuronpipe.cli import run
run._NEURONPIPE = (sys.executable, "-c")
run._started("import time; print('started', flush=True); time.sleep(600)")
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as command:
        assert command.stdout
        assert command.stdout.readline() == "started\n"
        command.kill()
        assert command.stdout.read() == ""  # its end is that of the last process that could write
