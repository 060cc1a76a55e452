"""cli/run.py: the first request that it shows is one that its door takes."""

import json
import shlex

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
