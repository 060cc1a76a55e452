"""Tables and samples made of the code, in pages written by hand: each between a line with its name and an end."""

import ast
import inspect
from collections.abc import Callable, Mapping
from functools import partial

from neuronpipe.cli.request import sample_json
from neuronpipe.cli.run import first_request
from neuronpipe.client import task_methods
from neuronpipe.core.generation_options import OPTIONS
from neuronpipe.core.task_inputs import SAMPLES
from neuronpipe.doors.oip.task_model import TaskModel
from neuronpipe.doors.oip.tensors import TensorSpec
from neuronpipe.tasks import TASKS
from tests.reference.answers import answer_json, result_json
from tests.reference.markdown import code, table, text

_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "a boolean",
    "words": "`false`, `true`, `never`",
    "token": "a token",
    "text": "up to {0.max_size} characters",
    "json": "JSON of up to {0.max_size} characters",
    "texts": "up to {0.max_items} strings of up to {0.max_size} characters",
    "tokens": "up to {0.max_items} tokens",
    "sequences": "up to {0.max_items} sequences of up to {0.max_size} tokens",
    "biases": "for up to {0.max_items} tokens, {0.minimum} to {0.maximum}",
}


def _options() -> list[str]:
    """The options of generation."""
    rows = []
    for name, option in OPTIONS.items():
        meaning = f"with `do_sample`: {option.text}" if option.draws else option.text
        valid = option.bounds or _KINDS[option.kind].format(option)
        rows.append([code(name), text(meaning), valid, code(option.openai)])
    return [*table(["Option", "Meaning", "Valid", "OpenAI's API"], rows)]


def _oip_tasks() -> list[str]:
    """The tensors and parameters of each task in the Open Inference Protocol."""
    rows = []
    for task in TASKS:
        model = TaskModel(task)
        cells = [[_tensor(input) for input in model.inputs], [_tensor(output) for output in model.outputs]]
        rows.append([task, *map(", ".join, cells), ", ".join(map(code, model.parameters))])
    return [*table(["Task", "Inputs", "Outputs", "Parameters"], rows)]


def _tensor(spec: TensorSpec) -> str:
    axes = ["n" for dim in spec.dims if dim == -1]
    return code(spec.name) + (f" [{', '.join(axes)}]" if axes else "") + "?" * spec.is_optional


def _sample(task: str) -> list[str]:
    """The input that `neuronpipe infer --example` prints, its result, and what each interface calls it."""
    lines = ["", "```json", sample_json(task), "```", "", "The result:", "", "```json", result_json(task), "```", ""]
    words = "Python: " + ", ".join(map(code, _methods(task))) + "."
    if task not in TASKS:
        return [*lines, words]
    request = first_request("NAME", task, "http://127.0.0.1:8080").replace(" -d ", " \\\n  -d ", 1)
    answers = [answer] if (answer := answer_json(task)) else []
    lines += ["```text", request, *answers, "```", ""]  # tests/unit/cli/test_run.py tries each
    model = TaskModel(task)
    tensors = [
        ", ".join(code(tensor.name) + "?" * tensor.is_optional for tensor in side)
        for side in (model.inputs, model.outputs)
    ]
    return [*lines, f"{words} [OIP](oip.md#tensors-of-tasks): {' → '.join(tensors)}."]


def _methods(task: str) -> list[str]:
    """The methods of the Python client whose requests are for a task."""
    tree = ast.parse(inspect.getsource(task_methods.TaskMethods))
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    return [
        method.name
        for method in methods
        if any(isinstance(node, ast.Constant) and node.value == task for node in ast.walk(method))
    ]


# Page of docs/ → its parts by their names.
PARTS: Mapping[str, Mapping[str, Callable[[], list[str]]]] = {
    "generation.md": {"options": _options},
    "oip.md": {"tasks": _oip_tasks},
    "tasks.md": {f"sample of {task}": partial(_sample, task) for task in SAMPLES},
}


def filled(page: str, content: str) -> str:
    """The content of a page with its parts as the code has them. Raises ValueError for a page without their places."""
    for name, made in PARTS[page].items():
        before, begin, rest = content.partition(f"<!-- {name}: made by make fix-docs -->\n")
        _, end, after = rest.partition("\n<!-- end -->")
        if not end:
            place = f"<!-- {name}: made by make fix-docs -->, an empty line and <!-- end -->"
            raise ValueError(f"docs/{page} has no place for the {name}; write, each on a line: {place}")
        lines = "\n".join(made())
        content = f"{before}{begin}{lines}\n{end}{after}"
    return content
