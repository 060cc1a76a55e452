"""command.py: `neuronpipe load` as it is typed; what is wrong with it exits with 2 and is named."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.measure.load import run
from neuronpipe.measure.load.report import LoadResult
from neuronpipe.measure.load.request import LoadRequest
from tests.unit.cli.running import run_command
from tests.unit.measure.load.written_rows import result_of, rows

# Nothing listens on the discard port.
_LOAD = ("load", "--target", "127.0.0.1:9", "--model", "m")


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[LoadRequest]:
    """The requests that were run; each gives one answer."""
    return _giving(monkeypatch, result_of(rows({"due_s": 1.0, "latency_s": 0.5})))


def _giving(monkeypatch: pytest.MonkeyPatch, result: LoadResult) -> list[LoadRequest]:
    taken: list[LoadRequest] = []

    def run_load(request: LoadRequest, tell: run.Tell) -> LoadResult:
        taken.append(request)
        tell("a second")
        return result

    monkeypatch.setattr(run, "run_load", run_load)
    return taken


def test_every_option_reaches_the_request(capsys: pytest.CaptureFixture[str], requests: list[LoadRequest]) -> None:
    options = "--version 2 --rate 5 --duration 3 --warm-up 0 --texts t --deadline-ms 7 --priority bulk --processes 4"
    assert run_command(capsys, *_LOAD, *options.split(), "--seed", "9")[0] == 0
    run_command(capsys, *_LOAD)
    defaults = LoadRequest(target="127.0.0.1:9", model="m")
    times: dict[str, Any] = {"rate_per_s": 5.0, "duration_s": 3.0, "warm_up_s": 0.0, "deadline_ms": 7.0}
    others: dict[str, Any] = {"version": "2", "texts": Path("t"), "priority": "bulk", "processes": 4, "seed": 9}
    assert requests == [dataclasses.replace(defaults, **times, **others), defaults]


def test_table_goes_to_standard_output_alone(capsys: pytest.CaptureFixture[str], requests: list[LoadRequest]) -> None:
    code, output, errors = run_command(capsys, *_LOAD)
    assert code == 0
    assert "throughput" in output
    assert errors == "a second\n"


def test_json_on_standard_output_is_alone(capsys: pytest.CaptureFixture[str], requests: list[LoadRequest]) -> None:
    _, output, errors = run_command(capsys, *_LOAD, "--json", "-")
    assert json.loads(output)["latency_ms"]["p50"] == 500.0
    assert "throughput" in errors


def test_json_goes_to_the_file(capsys: pytest.CaptureFixture[str], requests: list[LoadRequest], tmp_path: Path) -> None:
    _, output, _ = run_command(capsys, *_LOAD, "--json", str(tmp_path / "figures.json"))
    assert json.loads((tmp_path / "figures.json").read_text())["answers"] == 1
    assert "throughput" in output


def test_json_that_cannot_be_written_is_said_before_the_run(
    capsys: pytest.CaptureFixture[str], requests: list[LoadRequest], tmp_path: Path
) -> None:
    for file, problem in (
        (tmp_path / "none" / "x", "No such file or directory"),
        (tmp_path, "Is a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
    ):
        assert run_command(capsys, *_LOAD, "--json", str(file)) == (2, "", f"neuronpipe: --json {file}: {problem}\n")
    assert requests == []


def test_no_answer_at_all_exits_with_one(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    _giving(monkeypatch, result_of(rows({"outcome": "UNAVAILABLE"})))
    code, output, _ = run_command(capsys, *_LOAD)
    assert code == 1
    assert "UNAVAILABLE" in output


def test_broken_off_exits_as_shells_expect_and_with_the_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _giving(monkeypatch, result_of(rows({"due_s": 1.0}), is_broken_off=True))
    code, output, _ = run_command(capsys, *_LOAD)
    assert code == 130
    assert "throughput" in output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--rate 1 --concurrency 1", "not allowed with argument"),
        ("--priority high", "argument --priority: invalid choice: 'high' (choose from"),
        ("--rate fast", "argument --rate: invalid float value: 'fast'"),
        ("--concurrency 1.5", "argument --concurrency: invalid int value: '1.5'"),
        ("--rate nan", "neuronpipe: --rate nan: must be more than 0 and at most 100,000 requests a second"),
        ("--texts /none/at/all", "neuronpipe: --texts /none/at/all: No such file or directory"),
        ("--ttft-ms 100", "are for --generate"),
        ("--generate --prompt-tokens many", "--prompt-tokens many: must be N, uniform:LOW,HIGH or "),
        ("--generate --num-beams 17", "--num-beams 17: must be from 1 to 16"),
    ],
)
def test_what_is_wrong_exits_with_two_and_is_named(
    capsys: pytest.CaptureFixture[str], options: str, message: str
) -> None:
    code, output, errors = run_command(capsys, *_LOAD, *options.split())
    assert (code, output) == (2, "")
    assert message in errors
