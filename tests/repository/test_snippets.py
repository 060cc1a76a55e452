"""What the pages show is right: each fenced block of README.md, its neighbours and docs/ is run, or says why not.

- `console`: lines that begin with "$ " run in bash, with the commands of
  tests/documentation/snippet_commands.py. The folder has a repository, models/. A command that is
  only checked, as it takes long, makes the block one that is not run. Other lines are output, which is compared as
  tests/documentation/printed.py says, unless `<!-- output of another model: REASON -->` is before the block. Blocks
  after `<!-- recorded: STEP -->` run on a real model in test_recordings.py.
- `python`, `js`: run against a gateway with the models of `_MODELS`. The addresses of `_SHOWN` stand for its own.
  After `<!-- run in .venv-NAME -->`, Python is that of an environment which `make setup` makes.
- `go`, `java`: parts of the programs of `_EXAMPLES`, which tests/integration/commands/test_examples.py builds and runs.
- `json`, `toml`, `yaml`: parsed. `mermaid`, `text`: there is nothing to run.
- What cannot be run here has `<!-- not run here: REASON -->` on the line before it. The commands of such a `console`
  block are checked all the same, but for programs that this test does not know.
"""

import json
import os
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

import pytest
import yaml
from google.protobuf import json_format

from demo.model import find_minilm
from demo.processes import ServiceProcess
from neuronpipe.api.v1.tasks_pb2 import TaskResult
from neuronpipe.cli.task_json import read_task_input
from neuronpipe.core.task_inputs import SAMPLES
from tests.callers.metrics import series_of
from tests.documentation.pages import ROOT, Fence, all_pages, fences
from tests.documentation.printed import OutputDiffersError, align, parts_of
from tests.documentation.snippet_commands import PROGRAMS
from tests.models.architectures import make_source
from tests.models.compiling import compile_model
from tests.models.images import image_files

pytestmark = pytest.mark.sampled

_OPTIONS = ("--kept-traces", "100", "--metrics-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0")
_DEFAULTS = ("--default-models", "minilm")
# The addresses of the pages → the gateway's log line that has the address in their place.
_SHOWN = {"127.0.0.1:50050": "listening", "127.0.0.1:9464": "metrics", "127.0.0.1:8080": "listening for HTTP"}
_LIMIT_S = 60
# The models of the pages, by their names there → architecture and task of small ones. MiniLM is as it is published.
_MODELS = {
    "answerer": ("BERT", "question_answering"),
    "entailer": ("BERT", "zero_shot_classification"),
    "minilm": ("MiniLM", "sentence_embedding"),
    "reranker": ("BERT", "rerank"),
    "sentiment": ("BERT", "text_classification"),
    "squad": ("BERT", "question_answering"),
    "viewer": ("ViT", "image_classification"),
    "vit": ("ViT", "image_classification"),
}
# These programs are the system's own; a block that needs another one is not run.
_SYSTEM_PROGRAMS = ("cat", "ls", "mkdir", "touch")
_EXAMPLES = {"go": ROOT / "examples" / "go" / "main.go", "java": ROOT / "examples/java/src/main/java/Classify.java"}
_FAIL = 'echo "$1: is not known to this test" >&2; touch ~/failed; return 127'
_FAULTS = ("INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "INTERNAL")

_fences = [fence for page in all_pages() for fence in fences(page)]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models of the pages, for the fake back end."""
    sources, repository = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("repository")
    for name, (architecture, task) in _MODELS.items():
        source = find_minilm() if name == "minilm" else make_source(sources / name, architecture, task)
        compile_model(source, repository, task, name=name, backend="fake")
    return repository


@pytest.fixture(scope="module")
def gateway(repository: Path) -> Iterator[ServiceProcess]:
    """A gateway with the models of the pages."""
    with ServiceProcess("all", "--repository", str(repository), *_OPTIONS, *_DEFAULTS) as process:
        yield process.wait_until_ready()


def _at(gateway: ServiceProcess, content: str) -> str:
    """A block with the addresses of the gateway."""
    for shown, event in _SHOWN.items():
        content = content.replace(shown, str(gateway.wait_for(event)["address"]))
    return content


def _refused(gateway: ServiceProcess) -> Counter[str]:
    """How many requests were at fault so far, by the status that says so; a program may hide it from who runs it."""
    requests = "neuronpipe_request_duration_seconds_count"
    counts = {name: int(count) for name, count in series_of(gateway).items() if name.startswith(requests)}
    return Counter({name: count for name, count in counts.items() if any(f'"{status}"' in name for status in _FAULTS)})


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What docker/certificates makes for the pages."""
    made = tmp_path_factory.mktemp("certificates")
    subprocess.run([ROOT / "docker" / "certificates", made, "all", "caller"], check=True, capture_output=True)
    return made


@pytest.fixture
def folder(tmp_path: Path, certificates: Path) -> Path:
    """A folder with what a reader would have."""
    (tmp_path / "certificates").symlink_to(certificates)
    (tmp_path / "cat.jpg").write_bytes(next(content for name, content in image_files() if "JPEG" in name))
    (tmp_path / "texts.txt").write_text("A fine day.\n")
    for environment in (".venv", "venv"):
        (tmp_path / environment / "bin").mkdir(parents=True)
        (tmp_path / environment / "bin" / "activate").touch()
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    return tmp_path


@pytest.mark.parametrize("fence", [fence for fence in _fences if not fence.reason], ids=str)
def test_a_snippet_is_right(fence: Fence, folder: Path, request: pytest.FixtureRequest) -> None:
    if fence.language in _PARSERS:
        _PARSERS[fence.language](fence.content)
        return
    if fence.language not in _RUNNERS:
        language = fence.language or "no language"
        pytest.fail(f"{fence}: a block of {language} cannot be run; put <!-- not run here: REASON --> before it")
    gateway: ServiceProcess = request.getfixturevalue("gateway")
    (folder / "models").symlink_to(request.getfixturevalue("repository"))
    refused = _refused(gateway)
    content = _at(gateway, fence.content)
    if fence.language == "console":
        content = f"$ export NEURONPIPE_TARGET={gateway.target}\n{content}"
    if fence.environment:
        process = _run_python(content, folder, ROOT / fence.environment / "bin" / "python")
    else:
        process = _RUNNERS[fence.language](content, folder)
    assert process.returncode == 0, f"{fence}: {process.stdout}{process.stderr}"
    assert _refused(gateway) == refused, f"{fence}: {process.stdout}{process.stderr}"
    shown = [line for _, lines in parts_of(fence.content) for line in lines]
    if fence.language == "console" and any(shown) and not fence.of_another_model:
        align(shown, process.stdout.splitlines())


@pytest.mark.parametrize(
    "fence",
    [fence for fence in _fences if fence.reason and not fence.recorded and fence.language == "console"],
    ids=str,
)
def test_the_commands_of_a_block_that_is_not_run_are_right(fence: Fence, folder: Path, gateway: ServiceProcess) -> None:
    process = run_console(_at(gateway, fence.content), folder, is_marked=True)
    assert process.returncode == 0, f"{fence}: {process.stdout}{process.stderr}"


# What is wrong → a block that has it, and what is said about it.
_WRONG = {
    "an option of a command": ("$ neuronpipe models --targets 127.0.0.1:1", "--targets"),
    "an option of a service": ("$ neuronpipe serve all --repository models --max-batches 3", "--max-batches"),
    "the value of a setting": ("$ neuronpipe serve all --repository models --max-batch-size 0", "--max-batch-size: "),
    "a variable": ("$ export NEURONPIPE_ALL_SIZE=8\n$ neuronpipe serve all --repository models", "NEURONPIPE_ALL_SIZE"),
    "a setting that is missing": ("$ neuronpipe serve gateway", "--repository is required"),
    "a command in the background": ("$ neuronpipe serve al &\n$ make demo", "'al'"),
    "a command before another": ("$ neuronpipe infr && make demo", "'infr'"),
    "a command behind another": ("$ make demo && neuronpipe infr", "'infr'"),
    "a command within another": ('$ make "$(neuronpipe infr)" demo || true', "'infr'"),
    "the second line of a command": ("$ neuronpipe compile model \\\n    --repositories models", "--repositories"),
    "an address": ("$ neuronpipe models --target 127.0.0.1:1 --timeout-s 1", "UNAVAILABLE"),
    "a target of make": ("$ make dmo", "there is no target dmo"),
    "a variable of make": ("$ make logs servic=tokenizer", "there is no variable servic"),
    "an extra": ("$ pip install 'neuronpipe[compiler]'", "there is no extra compiler"),
    "a module": ("$ python -m tests.modles /tmp/models", "there is no -m tests.modles"),
    "a file of tests": ("$ pytest tests/contracts", "there is no tests/contracts"),
    "a method": ("$ grpcurl -plaintext 127.0.0.1:1 neuronpipe.api.v1.ModelService/List", "ModelService.List"),
}


@pytest.mark.parametrize(("content", "said"), _WRONG.values(), ids=_WRONG)
def test_a_wrong_command_is_found(content: str, said: str, folder: Path) -> None:
    process = run_console(content, folder, is_marked=True)
    assert process.returncode != 0
    assert said in process.stderr


_NOT_RUN = {
    "a program": ("$ wget http://127.0.0.1:9464/metrics && neuronpipe --version", "wget: is not known"),
    "make": ("$ make demo", "make is not run"),
    "pip": ("$ pip install neuronpipe", "pip is not run"),
    "pytest": ("$ pytest tests/unit", "pytest is not run"),
    "python": ("$ python -m tests.models.repository models", "python -m tests.models.repository is not run"),
    "neuronpipe": ("$ neuronpipe compile SOURCE --repository models", "neuronpipe compile is not run"),
    "a service": ("$ neuronpipe serve all --repository none", "neuronpipe serve is not run"),
}


@pytest.mark.parametrize(("content", "said"), _NOT_RUN.values(), ids=_NOT_RUN)
def test_a_command_that_is_not_run_needs_a_mark(content: str, said: str, folder: Path) -> None:
    process = run_console(content, folder)
    assert process.returncode != 0
    assert said in process.stderr
    assert run_console(content, folder, is_marked=True).returncode == 0


def test_output_that_a_command_does_not_print_is_found(folder: Path) -> None:
    content = "$ neuronpipe bundle keygen --key a.pem --public-key b.pem\nmade the key 23b44a6ce11a26b8: b.pem, a.pem"
    process = run_console(content, folder)
    [(_, shown)] = parts_of(content)
    with pytest.raises(OutputDiffersError, match=r"made the key [0-9a-f]{16}: a\.pem, b\.pem"):
        align(shown, process.stdout.splitlines())


def test_a_service_that_does_not_start_is_found(folder: Path) -> None:
    (folder / "models").mkdir()
    process = run_console("$ neuronpipe serve all --repository models --listen 127.0.0.1:50050", folder)
    assert process.returncode != 0
    assert "models" in process.stderr


def test_a_request_that_is_refused_is_found_where_the_program_hides_it(gateway: ServiceProcess, folder: Path) -> None:
    before = _refused(gateway)
    hidden = "try:\n    client.embed('none', 'A fine day.')\nexcept Exception:\n    pass"
    program = f"from neuronpipe.client import Client\nclient = Client('{gateway.target}')\n{hidden}"
    assert _run_python(program, folder).returncode == 0
    assert _refused(gateway) != before


def test_a_path_of_http_that_is_not_there_is_found(gateway: ServiceProcess, folder: Path) -> None:
    process = run_console(_at(gateway, "$ curl http://127.0.0.1:8080/v1/embedings"), folder)
    assert process.returncode != 0


def test_a_part_that_an_example_does_not_have_is_found() -> None:
    with pytest.raises(AssertionError, match=r"defer connection\.Shut"):
        _check_part("go", "defer connection.Close()\ndefer connection.Shut()\n")


def test_output_is_not_run(folder: Path) -> None:
    assert run_console("$ make demo\nneuronpipe infr\n", folder, is_marked=True).returncode == 0


def _run(command: list[str], folder: Path, environment: Mapping[str, str]) -> "subprocess.CompletedProcess[str]":
    variables = {"HOME": str(folder), "PYTHONPATH": f"{ROOT / 'services'}{os.pathsep}{ROOT}", **environment}
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )


def run_console(content: str, folder: Path, *, is_marked: bool = False) -> "subprocess.CompletedProcess[str]":
    """Runs the commands of a block, and fails where any of them does, in the background or before `&&` too.

    `is_marked`: the block says why it is not run, so that programs may be unknown and commands only checked.
    """
    path = folder / ("path-of-marked" if is_marked else "path")
    path.mkdir()
    for name in PROGRAMS:
        _write_program(path / name, f'"{sys.executable}" -m tests.documentation.snippet_commands {name} "$@"')
    _write_program(path / "curl", '/usr/bin/curl --silent --show-error --fail-with-body "$@"')
    for name in _SYSTEM_PROGRAMS:
        (path / name).symlink_to(f"/bin/{name}")
    handle = f"command_not_found_handle() {{ {':' if is_marked else _FAIL}; }}"
    (folder / "failed").unlink(missing_ok=True)
    script = "\n".join([handle, *_commands(content), "wait", "test ! -e ~/failed"])
    variables = {"PATH": str(path), "IS_MARKED": str(int(is_marked))}
    return _run(["/bin/bash", "-e", "-o", "pipefail", "-c", script], folder, variables)


def _write_program(path: Path, command: str) -> None:
    path.write_text(f"#!/bin/sh\n{command} || {{ touch ~/failed; exit 1; }}\n")
    path.chmod(0o755)


def _commands(content: str) -> Iterator[str]:
    """The commands of a block without its output."""
    is_continued = False
    for line in content.splitlines():
        if line.startswith("$ ") or is_continued:
            yield line.removeprefix("$ ")
            is_continued = line.endswith("\\")


def _run_python(content: str, folder: Path, python: Path = Path(sys.executable)) -> "subprocess.CompletedProcess[str]":
    (folder / "snippet.py").write_text(content)
    # haystack would report its use.
    return _run([str(python), "snippet.py"], folder, {"HAYSTACK_TELEMETRY_ENABLED": "False"})


def _run_js(content: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    (folder / "snippet.js").write_text(content)
    modules = ROOT / "tests" / "integration" / "node" / "node_modules"
    return _run(["node", "snippet.js"], folder, {"NODE_PATH": str(modules), "PATH": os.environ["PATH"]})


def _read_json(content: str) -> None:
    """Parses it, the input of a task as the command line does, and the result of a task as its message."""
    value = json.loads(content)
    if not isinstance(value, dict) or not SAMPLES.keys() >= value.keys():
        return
    try:
        json_format.ParseDict(value, TaskResult())
    except json_format.ParseError:
        read_task_input(content)


def _check_part(language: str, content: str) -> None:
    """The lines of a block are in the example, in their order."""
    lines = iter([line.strip() for line in _EXAMPLES[language].read_text(encoding="utf-8").splitlines()])
    missing = [line for line in map(str.strip, content.splitlines()) if line and line not in lines]
    assert missing == [], f"{_EXAMPLES[language]} does not have, in this order: {missing}"


def _nothing(content: str) -> None:
    """There is nothing to run."""


_PARSERS: Mapping[str, Callable[[str], object]] = MappingProxyType(
    {
        "go": partial(_check_part, "go"),
        "java": partial(_check_part, "java"),
        "json": _read_json,
        "mermaid": _nothing,
        "text": _nothing,
        "toml": tomllib.loads,
        "yaml": lambda content: list(yaml.safe_load_all(content)),
    }
)
_RUNNERS: Mapping[str, Callable[[str, Path], "subprocess.CompletedProcess[str]"]] = MappingProxyType(
    {"console": run_console, "js": _run_js, "python": _run_python}
)
