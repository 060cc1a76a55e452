"""cli/transform.py: what is refused before anything runs."""

import json
from pathlib import Path

import pytest

from neuronpipe import cli
from neuronpipe.bulk.transform import run
from neuronpipe.core import logs


@pytest.fixture(autouse=True)
def _logs_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "start_logging", lambda *_: None)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"id": number, "review": "A fine day."}) + "\n" for number in range(3)))
    return file


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--column", "textt=review"],
            "--column textt=review: must be FIELD=COLUMN, with a field of text-classification",
        ),
        (["--column", "text"], "--column text: must be FIELD=COLUMN"),
        (["--column", "truncation=review"], "--column truncation=review: must be FIELD=COLUMN"),
        ([], "--column: the input has no column 'text', it has: id, review"),
        (["--column", "text=review", "--keep", "date"], "--keep: the input has no column 'date'"),
        (["--column", "text=review", "--options", '{"text": "x"}'], "--column text: --options has it as well"),
        (["--options", '{"top_k": '], "--options: "),
        (
            ["--options", '{"topk": 1}'],
            "--options: text_classification: there is no field 'topk'; did you mean 'top_k'",
        ),
        (["--task", "fill-mask"], "--task fill-mask: model 'classifier' supports text-classification"),
        (["--shard-rows", "0"], "--shard-rows 0: must be 1 or more"),
        (["--price-per-hour", "nan"], "--price-per-hour nan: must be 0 or more"),
        (["--input-format", "openai", "--keep", "id"], "--keep: not with --input-format openai"),
        (["--version", "7"], "model 'classifier' has no version 7"),
        (["--keep", "id", "--column", "text=review", "--prefix", "", "--input", "/x/none-*.jsonl"], "no such file"),
    ],
)
def test_options_that_make_no_sense_are_named(
    words: list[str],
    message: str,
    rows: Path,
    fake_repository: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out"
    always = ["--repository", str(fake_repository), "--model", "classifier", "--input", str(rows)]
    with pytest.raises(SystemExit) as ended:
        cli.main(["transform", *always, "--output", str(output), *words])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not output.exists()


def test_ray_needs_the_model_in_process(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--target", "127.0.0.1:1", "--model", "m", "--input", str(rows), "--output", str(tmp_path / "out")]
    with pytest.raises(SystemExit):
        cli.main(["transform", *words, "--ray", "local"])
    assert "--ray: needs --repository" in capsys.readouterr().err


@pytest.mark.parametrize(("package", "extra"), [("pyarrow", "parquet"), ("ray", "ray"), ("openvino", "all")])
def test_a_package_that_is_missing_names_its_extra(
    package: str,
    extra: str,
    rows: Path,
    fake_repository: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=package)

    monkeypatch.setattr(run, "find_format", missing)
    words = ["--repository", str(fake_repository), "--model", "classifier", "--input", str(rows)]
    with pytest.raises(SystemExit):
        cli.main(["transform", *words, "--column", "text=review", "--output", str(tmp_path / "out")])
    assert f"pip install 'neuronpipe[{extra}]'" in capsys.readouterr().err
