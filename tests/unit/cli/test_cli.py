"""cli/: exit codes, and messages that say what to do."""

import base64
import importlib
import io
import json as json_library
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from PIL import Image

from neuronpipe import __version__, cli
from neuronpipe.api.v1.models_pb2 import Model, VersionState
from neuronpipe.api.v1.tasks_pb2 import Entity, RankedText, TaskInput
from neuronpipe.bundles import sources
from neuronpipe.cli import models, serve
from neuronpipe.cli.request import parse_target
from neuronpipe.core import logs
from neuronpipe.core.errors import InvalidInput, SetupError, Unavailable
from neuronpipe.core.settings import fields_of, variable_name
from neuronpipe.core.task_inputs import SAMPLES
from neuronpipe.platform.process.settings import ServerSettings
from neuronpipe.platform.telemetry import start
from neuronpipe.serve.settings import AllSettings, PipelineProcessSettings
from neuronpipe.stages.settings import NeuronExecutorSettings, PostprocessorSettings, TokenizerSettings
from tests.unit.cli.running import run_command
from tests.unit.client.fake_gateway import fake_gateway
from tests.unit.every_error import EVERY_ERROR
from tests.unit.task_messages import task_result

_SERVICES: dict[str, type[ServerSettings]] = {
    "all": AllSettings,
    "gateway": PipelineProcessSettings,
    "tokenizer": TokenizerSettings,
    "neuron-executor": NeuronExecutorSettings,
    "postprocessor": PostprocessorSettings,
}
_ROOT = Path(__file__).parents[3]
# Nothing listens on the discard port.
_NOWHERE = "127.0.0.1:9"
_INFER = "infer --model m --json {}"

pytestmark = pytest.mark.usefixtures("no_settings_from_outside")


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(capsys, "--version") == (0, f"neuronpipe {__version__}\n", "")


_BAD_JSON = ("", "{", "7", '{"text_classification": {"txt": "x"}}', '{"sentence_embedding": {"text": 1}}')
# A command → what its standard error says.
_NOT_UNDERSTOOD: dict[str, str] = {
    **dict.fromkeys(("", "frobnicate", "infer --text a", "compile x --version one"), "^usage: neuronpipe"),
    "serve": r"required: SERVICE; SERVICE is one of all, gateway, [\w, -]+\n\Z",
    "serve frobnicator": "".join(f"(?=.*{service})" for service in _SERVICES),
    "complie": r"invalid choice: 'complie'; did you mean compile\?\n\Z",
    f"models --target {_NOWHERE} --frobnicate": r"\nneuronpipe models: error: unrecognized arguments: --frobnicate\n\Z",
    "models --target http://h:80": "'http://h:80' is a URL: give HOST:PORT of gRPC, such as localhost:50050",
    f"load --model m --target {_NOWHERE}": "nothing listens at --target",
    **{
        f"{command} --target {target}": f"error: argument --target: '{target}' does not end with a port from 1 to 65535"
        ": give HOST:PORT, as localhost:50050"
        for command in (_INFER, "models", "health", "load --model m")
        for target in ("localhost", "localhost:", ":50050", "localhost:http", "h:0", "h:65536", "dns:///gateway", "h:٣")
    },
    **{
        f"{command} --target '{target}'": "error: argument --target: is empty"
        for command in (_INFER, "models")
        for target in ("", " ")
    },
    **{
        f"{command} --target {_NOWHERE} --timeout-s={given}": "error: argument --timeout-s: "
        for command in (_INFER, "models")
        for given in ("0", "-1", "86400.1", "1e300", "inf", "-inf", "nan", "soon", "")
    },
    **{
        f"job submit --input-uri file:///x {option} {given}": f"argument {option}"
        for option in ("--ttl-s", "--work-limit-s")
        for given in ("-1", "1e10", "soon")
    },
    **{
        f"infer --target {_NOWHERE} --model m --json '{json}'": "^neuronpipe: --json: is not a valid TaskInput: "
        for json in (*_BAD_JSON, '{"frobnication": {}}')
    },
    rf"""infer --target {_NOWHERE} --model m --json '{{"text_classification": {{"text": "\ud83d"}}}}'""": (
        "^neuronpipe: --json: "
    ),
    f"{_INFER} --target {_NOWHERE} --image {os.devnull}": r"^neuronpipe: --json: not with --image; the JSON has all",
    "infer --example no": r"there is no task 'no' \(there are: text-classification, sentence-embedding, ",
    "registry route --repository . m 1=90 2=5 1=5": "^neuronpipe: TARGET=SHARE 1=90 2=5 1=5: names a target twice\n",
}


@pytest.mark.parametrize(("command", "problem"), _NOT_UNDERSTOOD.items(), ids=lambda value: repr(value)[:60])
def test_an_unclear_command_exits_with_two(capsys: pytest.CaptureFixture[str], command: str, problem: str) -> None:
    code, output, errors = run_command(capsys, *shlex.split(command))
    assert (code, output) == (2, "")
    assert re.search(problem, errors)


@pytest.mark.parametrize("service", _SERVICES)
def test_help_lists_every_setting_with_its_variable(capsys: pytest.CaptureFixture[str], service: str) -> None:
    code, output, _ = run_command(capsys, "serve", service, "--help-all")
    assert code == 0
    flattened = " ".join(output.split())
    # A long name may be broken at its hyphens.
    missing = [
        name
        for name, field in fields_of(_SERVICES[service]).items()
        if f"--{name.replace('_', '-')}" not in flattened
        or variable_name(_SERVICES[service], name) not in flattened
        or str(field.description).split(" ", 1)[0] not in flattened
    ]
    assert missing == []


@pytest.mark.parametrize("service", [*_SERVICES, "worker"])
def test_help_shows_twelve_options_first_and_how_to_see_all(capsys: pytest.CaptureFixture[str], service: str) -> None:
    _, output, _ = run_command(capsys, "serve", service, "--help")
    shown = set(re.findall(r"^  (--[a-z-]+)", output, re.MULTILINE)) - {"--help-all"}
    assert "--listen" in shown
    assert len(shown) <= 12
    assert "--help-all" in output


def test_every_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = run_command(capsys, "--help")
    commands = re.findall(r"^    ([a-z]+) ", output, re.MULTILINE)
    assert {"compile", "serve", "infer", "models"} <= set(commands)


@pytest.mark.parametrize("service", _SERVICES)
def test_a_missing_setting_exits_with_two_and_its_flag(capsys: pytest.CaptureFixture[str], service: str) -> None:
    variable = variable_name(_SERVICES[service], "repository")
    code, output, errors = run_command(capsys, "serve", service)
    assert (code, output) == (2, "")
    assert errors.startswith(f"neuronpipe: --repository is required (variable: {variable}): folder ")


def _serving_fails_with(monkeypatch: pytest.MonkeyPatch, fault: Exception) -> None:
    """Once the settings are read; nothing of this process is changed before."""

    def fail(*arguments: object) -> None:
        raise fault

    monkeypatch.setattr(logs, "start_logging", lambda *_: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setattr(sources, "check_folder", lambda settings: None)
    monkeypatch.setattr(start, "running_telemetry", fail)


def test_a_setting_from_the_environment_is_not_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURONPIPE_ALL_REPOSITORY", "/x")
    _serving_fails_with(monkeypatch, SetupError("all settings are there"))
    assert run_command(capsys, "serve", "all") == (2, "", "neuronpipe: all settings are there\n")


@pytest.mark.parametrize(
    ("command", "meant"),
    [
        ("serve gateway --repositry /x", "--repositry: did you mean --repository?"),
        (f"infer --target {_NOWHERE} --modle m --json {{}}", "--modle: did you mean --model?"),
        (f"models --target {_NOWHERE} --timeout=3 --tiemout-s 3", "--tiemout-s: did you mean --timeout-s?"),
        ("cache stats --reddis-url=redis://h", "--reddis-url: did you mean --redis-url?"),
        ("--verison", "--verison: did you mean --version?"),
    ],
)
def test_a_misspelt_flag_gets_a_suggestion_and_not_the_whole_usage(
    capsys: pytest.CaptureFixture[str], command: str, meant: str
) -> None:
    code, output, errors = run_command(capsys, *command.split())
    assert (code, output) == (2, "")
    assert errors.endswith(f"{meant}\n")
    assert len(errors.splitlines()) == 2


@pytest.mark.parametrize(
    "target", ["h:1", "[::1]:50050", "dns:///gateway:50050", "unix:/tmp/gateway.sock", "ipv4:127.0.0.1:1,127.0.0.1:2"]
)
def test_a_target_of_grpcs_is_taken(target: str) -> None:
    assert parse_target(target) == target


def test_models_are_listed_in_columns_that_align_with_one_for_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    short = Model(name="m", version="1", task="rerank", tasks=["rerank"], max_tokens=4, backends=["fake"])
    short.dtype, short.architecture = "int8", "A"
    long = Model(
        name="a-model-with-a-name-longer-than-24",
        version="12",
        is_default=True,
        task="sentence_embedding",
        tasks=["feature_extraction", "sentence_embedding"],
        max_tokens=512,
        backends=["openvino", "torch"],
        dtype="float32",
        architecture="BertModel",
        state=VersionState.VERSION_STATE_READY,
        aliases=["canary", "stable"],
        share=0.95,
        problem="tokenizer: no room",
        shapes=138,
        shapes_ready=40,
        lone_graphs=3,
        lone_graph_bytes=41_400_000,
    )
    with fake_gateway() as gateway:
        gateway.models = [short, long]
        code, output, errors = run_command(capsys, "models", "--target", gateway.target)
    assert code == 0
    assert output.splitlines() == [
        "MODEL                               VERSION  TASKS                                  TOKENS  BACK END        "
        "DTYPE    ARCHITECTURE  STATE  ALIASES        SHARE  SHAPES  GRAPHS",
        "m                                   1        rerank                                 4       fake          "
        "  int8     A                                   0 %",
        "a-model-with-a-name-longer-than-24  12*      sentence-embedding,feature-extraction  512     openvino,torch  "
        "float32  BertModel     ready  canary,stable  95 %   40/138  3, 41 MB",
    ]
    assert errors == "a-model-with-a-name-longer-than-24 version 12: tokenizer: no room\n"


def test_an_unknown_variable_exits_with_two_and_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURONPIPE_GATEWAY_REPOSITRY", "/x")
    code, _, errors = run_command(capsys, "serve", "gateway", "--repository", "/x")
    assert code == 2
    assert errors.startswith(
        "neuronpipe: NEURONPIPE_GATEWAY_REPOSITRY: no such setting; did you mean NEURONPIPE_GATEWAY_"
    )


def test_a_response_has_its_zeros_and_the_names_of_the_protos(capsys: pytest.CaptureFixture[str]) -> None:
    ranked, entity = RankedText(index=0, score=0.5), Entity(label="PER", score=0.5, text="Ada", start=0, end=3)
    with fake_gateway() as gateway:
        gateway.answering.set()
        for result, field, expected in (
            (task_result(rerank={"texts": [ranked]}), "rerank", {"texts": [{"index": 0, "score": 0.5}]}),
            (
                task_result(token_classification={"entities": [entity]}),
                "token_classification",
                {"entities": [{"label": "PER", "score": 0.5, "text": "Ada", "start": 0, "end": 3}]},
            ),
        ):
            gateway.result = result
            _, output, _ = run_command(capsys, *_INFER.split(), "--target", gateway.target)
            assert json_library.loads(output)["result"] == {field: expected}


@pytest.mark.parametrize("task", [field.name for field in TaskInput.DESCRIPTOR.fields])
@pytest.mark.parametrize("separator", "-_")
def test_the_example_of_every_task_can_be_sent(capsys: pytest.CaptureFixture[str], task: str, separator: str) -> None:
    code, example, errors = run_command(capsys, "infer", "--example", task.replace("_", separator))
    assert (code, errors) == (0, "")
    with fake_gateway() as gateway:
        gateway.answering.set()
        assert run_command(capsys, "infer", "--target", gateway.target, "--model", "m", "--json", example)[0] == 0
        [request] = gateway.requests
    assert request.input.WhichOneof("task") == task
    assert example.rstrip() in (_ROOT / "docs" / "tasks.md").read_text()


def test_the_example_of_an_image_is_one() -> None:
    image = SAMPLES["image_classification"]["image"]
    assert Image.open(io.BytesIO(base64.b64decode(str(image)))).size == (1, 1)


def test_an_image_that_cannot_be_read_exits_with_two(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    image = tmp_path / "none.png"
    code, _, errors = run_command(capsys, "infer", "--target", _NOWHERE, "--model", "m", "--image", str(image))
    assert (code, errors) == (2, f"neuronpipe: --image {image}: cannot be read: No such file or directory\n")


def test_an_image_is_sent_to_the_gateway(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    image = tmp_path / "a.png"
    image.write_bytes(b"\x89PNG")
    with fake_gateway() as gateway:
        gateway.answering.set()
        gateway.models = [Model(name="m", task="image_classification")]
        assert run_command(capsys, *f"infer --target {gateway.target} --model m --image {image}".split())[0] == 0
    assert [request.input.image_classification.image for request in gateway.requests] == [b"\x89PNG"]


@pytest.mark.parametrize("command", [_INFER, "models"])
def test_a_gateway_that_is_not_there_exits_with_one(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, output, errors = run_command(capsys, *command.split(), "--target", _NOWHERE, "--timeout-s", "10")
    assert (code, output) == (1, "")
    assert errors.startswith("neuronpipe: UNAVAILABLE: ")


def test_a_part_of_a_second_of_a_job_is_not_taken_for_the_default() -> None:
    options = cli.make_parser().parse_args(["job", "submit", "--input-uri", "file:///x", "--ttl-s", "250ms"])
    assert options.ttl_s == 1


@pytest.mark.parametrize("timeout_s", ["0.001", "86400"])
def test_a_deadline_within_bounds_is_taken(monkeypatch: pytest.MonkeyPatch, timeout_s: str) -> None:
    taken: list[float] = []
    monkeypatch.setattr(models, "run", lambda options: taken.append(options.timeout_s))
    cli.main(["models", "--target", _NOWHERE, "--timeout-s", timeout_s])
    assert taken == [float(timeout_s)]


@pytest.mark.parametrize(
    "command",
    [
        f"infer --target {_NOWHERE} --json {{}} --model",
        f"infer --target {_NOWHERE} --json {{}} --model m --version",
        f"infer --target {_NOWHERE} --model m --json",
        "models --target",
        "serve all --repository",
        "compile x --task text-classification --repository /x --name",
    ],
)
def test_bytes_that_are_no_text_exit_with_two(capsys: pytest.CaptureFixture[str], command: str) -> None:
    code, output, errors = run_command(capsys, *command.split(), os.fsdecode(b"\xff"))
    assert (code, output) == (2, "")
    assert errors.endswith("error: argument '\\udcff': not valid UTF-8\n")


def _failing_with(monkeypatch: pytest.MonkeyPatch, fault: BaseException, command: str = "models") -> None:
    def fail(options: object) -> None:
        raise fault

    monkeypatch.setattr(f"neuronpipe.cli.{command}.run", fail)


@pytest.mark.parametrize(
    ("fault", "code", "said"),
    [
        *((error, 1, f"neuronpipe: {error.reason}: {error.message}\n") for error in EVERY_ERROR),
        (InvalidInput("text", "is empty"), 1, "neuronpipe: INVALID_INPUT: text: is empty\n"),
        (SetupError("/models: no such folder"), 2, "neuronpipe: /models: no such folder\n"),
        (PermissionError(13, "no", "/x"), 2, f"neuronpipe: /x: permission denied for user {os.geteuid()}\n"),
        (KeyboardInterrupt(), 128 + 2, ""),  # as shells tell of SIGINT, 2
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_a_command_that_fails_exits_with_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: BaseException, code: int, said: str
) -> None:
    _failing_with(monkeypatch, fault)
    monkeypatch.setattr(cli, "is_reachable", lambda target: True)
    assert run_command(capsys, "models", "--target", _NOWHERE) == (code, "", said)


def test_a_target_where_nothing_listens_is_told_with_what_may_be_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURONPIPE_TARGET", _NOWHERE)
    code, _, error = run_command(capsys, "models", "--timeout-s", "5")
    assert code == 1
    assert error == (
        f"neuronpipe: UNAVAILABLE: nothing listens at --target {_NOWHERE}; is `neuronpipe serve` running there?\n"
    )


def test_a_target_of_http_is_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _failing_with(
        monkeypatch, Unavailable("Failed parsing HTTP/2 (Trying to connect an http1.x server (HTTP status 400))")
    )
    code, _, error = run_command(capsys, "models", "--target", _NOWHERE)
    assert code == 1
    assert f"--target {_NOWHERE} speaks HTTP/1.1; give the port of gRPC" in error


@pytest.mark.parametrize(
    ("command", "install"),
    [
        (f"models --target {_NOWHERE}", "neuronpipe"),
        ("compile x --repository /x", "'neuronpipe[compile]'"),
        ("cache stats", "'neuronpipe[tokenizer]'"),
        ("completion bash", "'neuronpipe[completion]'"),
    ],
)
def test_a_missing_package_exits_with_two_and_what_installs_it_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str, install: str
) -> None:
    words = command.split()
    _failing_with(monkeypatch, ModuleNotFoundError("No module named 'grpc'", name="grpc"), words[0])
    message = f"neuronpipe: {words[0]} needs the package grpc, which is not installed: pip install {install}\n"
    assert run_command(capsys, *words) == (2, "", message)


@pytest.mark.parametrize(
    ("service", "package", "extra"),
    [
        ("all", "tokenizers", "all"),
        ("gateway", "redis", "gateway"),
        ("gateway", "tokenizers", "tokenizer"),
        ("tokenizer", "tokenizers", "tokenizer"),
        ("postprocessor", "uvloop", "postprocessor"),
        ("neuron-executor", "uvloop", "executor-openvino"),
    ],
)
def test_a_service_names_the_extra_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, service: str, package: str, extra: str
) -> None:
    _serving_fails_with(monkeypatch, ModuleNotFoundError(name=package))
    _, _, errors = run_command(capsys, "serve", service, "--repository", "/x")
    assert errors.endswith(
        f"serve needs the package {package}, which is not installed: pip install 'neuronpipe[{extra}]'\n"
    )


def test_every_extra_that_is_named_exists_and_is_on_the_page() -> None:
    extras = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    commands = [importlib.import_module(f"neuronpipe.cli.{name.replace('-', '_')}") for name in cli.COMMANDS]
    assert {*(command.EXTRA for command in commands), *(extra for *_, extra in serve.SERVICES.values())} <= {
        "",
        *extras,
    }
    listed = re.findall(r"^\| `([\w-]+)` \|", (_ROOT / "docs" / "quick-start.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(extras)


@pytest.mark.parametrize("fault", [ZeroDivisionError(), ModuleNotFoundError(name="neuronpipe.nothing")], ids=repr)
def test_a_fault_of_ours_is_not_hidden(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault: Exception
) -> None:
    _failing_with(monkeypatch, fault)
    with pytest.raises(type(fault)):
        run_command(capsys, "models", "--target", _NOWHERE)


def test_the_installed_command_is_this_one(tmp_path: Path) -> None:
    words = f"-m neuronpipe serve all --repository {tmp_path}/none --listen 127.0.0.1:0".split()
    process = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith(f"neuronpipe: {tmp_path}/none: no such folder")


@pytest.mark.parametrize("is_buffered", [True, False])
def test_an_output_that_cannot_be_written_ends_a_command_without_a_traceback(is_buffered: bool) -> None:
    words = [sys.executable, *([] if is_buffered else ["-u"]), "-m", "neuronpipe", "infer", "--example", "rerank"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as left, Path("/dev/full").open("wb") as full:  # noqa: PTH123 (a descriptor)
        behind_head, on_a_full_disk = (
            subprocess.run(
                words, stdout=to, stderr=subprocess.PIPE, text=True, env=environment, check=False, timeout=60
            )
            for to in (left, full)
        )
    assert (behind_head.returncode, behind_head.stderr) == (128 + 13, "")  # as shells tell of SIGPIPE, 13
    expected = (2, "neuronpipe: the output: No space left on device\n")
    assert (on_a_full_disk.returncode, on_a_full_disk.stderr) == expected


def test_ctrl_c_while_the_output_waits_exits_as_shells_expect(monkeypatch: pytest.MonkeyPatch) -> None:
    class Output(io.StringIO):
        """A pipe that is full."""

        def flush(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", Output())
    with pytest.raises(SystemExit) as exit:
        cli.main(["infer", "--example", "rerank"])
    assert exit.value.code == 130
