"""cli.py: exit codes, and messages that say what to do."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from neuronpipe import __version__, cli
from neuronpipe.core import config
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, SetupError
from tests.unit.client.fake_gateway import fake_gateway
from tests.unit.every_error import EVERY_ERROR

_SERVICES: dict[str, type[config.ServerSettings]] = {
    "all": config.AllSettings,
    "gateway": config.GatewaySettings,
    "tokenizer": config.TokenizerSettings,
    "neuron-executor": config.NeuronExecutorSettings,
    "postprocessor": config.PostprocessorSettings,
}
# Nothing listens on the discard port.
_NOWHERE = "127.0.0.1:9"
_INFER = ("infer", "--model", "m", "--json", "{}")


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("NEURONPIPE_"):
            monkeypatch.delenv(name)


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command that ends by itself."""
    code = 0
    try:
        cli.main(arguments)
    except SystemExit as exit:
        code = int(exit.code or 0)
    return code, *capsys.readouterr()


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(capsys, "--version") == (0, f"neuronpipe {__version__}\n", "")


@pytest.mark.parametrize(
    "arguments",
    [(), ("frobnicate",), ("serve",), ("serve", "frobnicator"), ("infer", "--model", "m"), ("compile", "x", "--version", "one")],
    ids=str,
)
def test_a_command_that_cannot_be_understood_exits_with_two(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, output, errors = _run(capsys, *arguments)
    assert (code, output) == (2, "")
    assert errors.startswith("usage: neuronpipe")


def test_an_unknown_service_is_told_which_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, errors = _run(capsys, "serve", "frobnicator")
    assert all(service in errors for service in _SERVICES)


def test_an_unknown_setting_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = _run(capsys, "serve", "gateway", "--repositry", "/x")
    assert code == 2
    assert "--repositry" in errors


@pytest.mark.parametrize("service", _SERVICES)
def test_help_lists_every_setting_with_its_variable(capsys: pytest.CaptureFixture[str], service: str) -> None:
    code, output, _ = _run(capsys, "serve", service, "--help")
    assert code == 0
    flattened = " ".join(output.split())
    # A long name may be broken at its hyphens.
    missing = [
        name
        for name, field in _SERVICES[service].model_fields.items()
        if f"--{name.replace('_', '-')} {name.upper()}" not in flattened
        or config.variable_name(_SERVICES[service], name) not in flattened
        or str(field.description).split(" ", 1)[0] not in flattened
    ]
    assert missing == []


def test_every_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    _, output, _ = _run(capsys, "--help")
    commands = re.findall(r"^    ([a-z]+) ", output, re.MULTILINE)
    assert {"compile", "serve", "infer", "models"} <= set(commands)


@pytest.mark.parametrize("service", _SERVICES)
def test_a_missing_setting_exits_with_two_and_is_named(capsys: pytest.CaptureFixture[str], service: str) -> None:
    variable = config.variable_name(_SERVICES[service], "repository")
    assert _run(capsys, "serve", service) == (2, "", f"neuronpipe: {variable}: Field required\n")


def test_an_unknown_variable_exits_with_two_and_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURONPIPE_GATEWAY_REPOSITRY", "/x")
    code, _, errors = _run(capsys, "serve", "gateway", "--repository", "/x")
    assert code == 2
    assert errors.startswith("neuronpipe: NEURONPIPE_GATEWAY_REPOSITRY: no such setting; there are NEURONPIPE_GATEWAY_")


@pytest.mark.parametrize(
    "json",
    ["", "{", "7", '{"text_classification": {"txt": "x"}}', '{"sentence_embedding": {"text": 1}}', '{"frobnication": {}}'],
)
def test_malformed_json_exits_with_two_and_says_what_is_wrong(capsys: pytest.CaptureFixture[str], json: str) -> None:
    code, output, errors = _run(capsys, "infer", "--target", _NOWHERE, "--model", "m", "--json", json)
    assert (code, output) == (2, "")
    assert errors.startswith("neuronpipe: --json: is no TaskInput: ")


def test_an_image_that_cannot_be_read_exits_with_two(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, _, errors = _run(capsys, "infer", "--target", _NOWHERE, "--model", "m", "--image", str(tmp_path / "none.png"))
    assert (code, errors) == (2, f"neuronpipe: --image {tmp_path / 'none.png'}: cannot be read: No such file or directory\n")


def test_an_image_is_sent_to_the_gateway(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG")
    with fake_gateway() as gateway:
        gateway.answering.set()
        code, _, _ = _run(capsys, "infer", "--target", gateway.target, "--model", "m", "--image", str(tmp_path / "a.png"))
    assert code == 0
    assert [request.input.image_classification.image for request in gateway.requests] == [b"\x89PNG"]


def test_an_image_takes_the_place_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, errors = _run(capsys, *_INFER, "--target", _NOWHERE, "--image", "a.png")
    assert code == 2
    assert "not allowed with argument --json" in errors


def test_json_with_half_a_character_exits_with_two(capsys: pytest.CaptureFixture[str]) -> None:
    json = '{"text_classification": {"text": "\\ud83d"}}'
    code, _, errors = _run(capsys, "infer", "--target", _NOWHERE, "--model", "m", "--json", json)
    assert code == 2
    assert errors.startswith("neuronpipe: --json: ")


@pytest.mark.parametrize("command", [_INFER, ("models",)], ids=lambda command: command[0])
def test_a_gateway_that_is_not_there_exits_with_one(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    code, output, errors = _run(capsys, *command, "--target", _NOWHERE, "--timeout-s", "10")
    assert (code, output) == (1, "")
    assert errors.startswith("neuronpipe: UNAVAILABLE: ")


@pytest.mark.parametrize("timeout_s", ["0", "-1", "86400.1", "1e300", "inf", "-inf", "nan", "soon", ""])
@pytest.mark.parametrize("command", [_INFER, ("models",)], ids=lambda command: command[0])
def test_a_deadline_out_of_bounds_exits_with_two(capsys: pytest.CaptureFixture[str], command: tuple[str, ...], timeout_s: str) -> None:
    code, output, errors = _run(capsys, *command, "--target", _NOWHERE, f"--timeout-s={timeout_s}")
    assert (code, output) == (2, "")
    assert "error: argument --timeout-s: " in errors


@pytest.mark.parametrize("timeout_s", ["0.001", "86400"])
def test_a_deadline_within_bounds_is_taken(monkeypatch: pytest.MonkeyPatch, timeout_s: str) -> None:
    taken: list[float] = []
    monkeypatch.setattr(cli, "_models", lambda options: taken.append(options.timeout_s))
    cli.main(["models", "--target", _NOWHERE, "--timeout-s", timeout_s])
    assert taken == [float(timeout_s)]


@pytest.mark.parametrize("target", ["", " "])
@pytest.mark.parametrize("command", [_INFER, ("models",)], ids=lambda command: command[0])
def test_an_empty_target_exits_with_two(capsys: pytest.CaptureFixture[str], command: tuple[str, ...], target: str) -> None:
    code, output, errors = _run(capsys, *command, "--target", target)
    assert (code, output) == (2, "")
    assert "error: argument --target: is empty" in errors


@pytest.mark.parametrize(
    "command",
    [
        ("infer", "--target", _NOWHERE, "--json", "{}", "--model"),
        ("infer", "--target", _NOWHERE, "--json", "{}", "--model", "m", "--version"),
        ("infer", "--target", _NOWHERE, "--model", "m", "--json"),
        ("models", "--target"),
        ("serve", "all", "--repository"),
        ("compile", "x", "--task", "text-classification", "--repository", "/x", "--name"),
    ],
    ids=" ".join,
)
def test_bytes_that_are_no_text_exit_with_two(capsys: pytest.CaptureFixture[str], command: tuple[str, ...]) -> None:
    code, output, errors = _run(capsys, *command, os.fsdecode(b"\xff"))
    assert (code, output) == (2, "")
    assert errors.endswith("error: argument '\\udcff': not valid UTF-8\n")


def _failing_with(monkeypatch: pytest.MonkeyPatch, fault: BaseException) -> None:
    def fail(options: object) -> None:
        raise fault

    monkeypatch.setattr(cli, "_models", fail)


@pytest.mark.parametrize("error", EVERY_ERROR, ids=lambda error: type(error).__name__)
def test_a_request_that_failed_exits_with_one_and_its_reason(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, error: NeuronpipeError
) -> None:
    _failing_with(monkeypatch, error)
    assert _run(capsys, "models", "--target", _NOWHERE) == (1, "", f"neuronpipe: {error.reason}: {error.message}\n")


def test_a_setup_error_exits_with_two_and_its_message(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _failing_with(monkeypatch, SetupError("/models: no such folder"))
    assert _run(capsys, "models", "--target", _NOWHERE) == (2, "", "neuronpipe: /models: no such folder\n")


def test_a_missing_package_exits_with_two_and_is_named(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _failing_with(monkeypatch, ModuleNotFoundError("No module named 'grpc'", name="grpc"))
    code, _, errors = _run(capsys, "models", "--target", _NOWHERE)
    assert code == 2
    assert "needs the package grpc; install neuronpipe with the extra that 'models' needs" in errors


def test_ctrl_c_exits_as_shells_expect(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _failing_with(monkeypatch, KeyboardInterrupt())
    # 128 plus the number of SIGINT, 2.
    assert _run(capsys, "models", "--target", _NOWHERE) == (130, "", "")


def test_a_fault_of_ours_is_not_hidden(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _failing_with(monkeypatch, ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        _run(capsys, "models", "--target", _NOWHERE)


def test_an_input_at_fault_is_told_by_its_field(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _failing_with(monkeypatch, InvalidInput("text", "is empty"))
    assert "INVALID_INPUT: text: is empty" in _run(capsys, "models", "--target", _NOWHERE)[2]


def test_the_installed_command_is_this_one(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "neuronpipe", "serve", "all", "--repository", str(tmp_path / "none"), "--listen", "127.0.0.1:0"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith(f"neuronpipe: {tmp_path}/none: no such folder")
