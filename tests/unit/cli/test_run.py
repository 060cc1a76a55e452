"""cli/run.py: the first request that it shows is one that its door takes, and its processes end with it."""

import json
import shlex
import subprocess
import sys

import pytest

from neuronpipe.cli import run
from neuronpipe.core.task_inputs import SAMPLES
from neuronpipe.doors.http.huggingface_tasks import CONVERTERS

_MODEL_TASKS = [task for task in SAMPLES if task not in ("tokenization", "detokenization")]


@pytest.mark.parametrize("task", _MODEL_TASKS)
def test_thefirst_request_of_each_task_is_one_that_its_door_takes(task: str) -> None:
    program, address, *_, data = shlex.split(run.first_request("m", task, "127.0.0.1:8080"))
    body = json.loads(data)
    assert program == "curl"
    if task == "text_generation":
        assert address.endswith("/v1/completions")
        assert body["prompt"] == SAMPLES[task]["prompt"]
    else:
        assert address == "http://127.0.0.1:8080/models/m"
        CONVERTERS[task].takes.validate_python(body)
        assert body.get("prompt_name") == ("query" if SAMPLES[task].get("is_query") else None)


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
