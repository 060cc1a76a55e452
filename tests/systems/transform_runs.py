"""Runs of `neuronpipe transform` for tests: rows, processes that may be killed, and what they must have written."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from neuronpipe.api.v1.tasks_pb2 import TaskInput, TextClassificationInput
from neuronpipe.bulk.transform.request import Engine, TransformRequest
from neuronpipe.bulk.transform.run import TransformReport, make_plan, run_plan, run_with
from neuronpipe.bulk.transform.shards import MANIFEST_FILE

MODEL = "classifier"
_WORDS = tuple("the cat sat on a mat while rain fell over London and nobody in the street knew it".split())  # noqa: SIM905
_LIMIT_S = 200


def make_rows(count: int) -> list[dict[str, Any]]:
    """Makes rows of 1 to 40 words."""
    return [
        {"id": number, "review": " ".join(_WORDS[(number + word) % len(_WORDS)] for word in range(1 + number * 7 % 40))}
        for number in range(count)
    ]


def write_rows(file: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Writes the rows as JSON Lines, CSV or Parquet, by the file's name."""
    if file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif file.suffix == ".csv":
        lines = ["id,review", *(f"{row['id']},{row['review']}" for row in rows)]
        file.write_text("\n".join(lines) + "\n")
    else:
        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), file, row_group_size=300)
    return file


def request_of(file: Path, output: Path, **changes: Any) -> TransformRequest:
    """Makes the request of `command`, for a run in this process."""
    fields: dict[str, Any] = {
        "inputs": [str(file)],
        "output": str(output),
        "model": MODEL,
        "task": "text_classification",
        "columns": {"text": "review"},
        "keep": ["id"],
        "shard_rows": 20,
    }
    return TransformRequest(**(fields | changes))


async def transform(engine: Engine, request: TransformRequest) -> TransformReport:
    """Runs a transformation in this process."""
    template = TaskInput(text_classification=TextClassificationInput())
    template.text_classification.SetInParent()
    plan = make_plan(request, engine.model, template)
    return await run_plan(plan, run_with(engine), lambda line: None)


def command(repository: Path, file: Path, output: Path, *more: str, python: str = sys.executable) -> list[str]:
    """Returns the command line of the same run, as a process."""
    arguments = ["--repository", repository, "--model", MODEL, "--input", file, "--output", output]
    options = ["--column", "text=review", "--keep", "id", "--shard-rows", "20"]
    return [python, "-m", "neuronpipe", "transform", *map(str, arguments), *options, *more]


class Run:
    """A process of it."""

    def __init__(self, words: Sequence[str], output: Path) -> None:
        self._output = output
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ
        )

    def wait_for_shards(self, count: int) -> bool:
        """Waits until `count` shards are listed. Returns False if the process has ended before."""
        deadline_s = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline_s:
            if len(list((self._output / "_shards").glob("*.json"))) >= count:
                return True
            if self.process.poll() is not None:
                return False
            time.sleep(0.002)
        raise TimeoutError(f"no {count} shards after {_LIMIT_S} s")

    def kill(self) -> None:
        """Ends the process as a power cut would."""
        self.process.kill()
        self.process.communicate()


def results(folder: Path) -> dict[str, bytes]:
    """Reads the files that a run must write the same every time, by name."""
    return parts(folder) | {MANIFEST_FILE: (folder / MANIFEST_FILE).read_bytes()}


def parts(folder: Path) -> dict[str, bytes]:
    """Reads the files of results, by name."""
    return {path.name: path.read_bytes() for path in folder.glob("part-*")}


def json_records(folder: Path) -> list[dict[str, Any]]:
    """Reads all rows of results in JSON Lines."""
    return [json.loads(line) for path in sorted(folder.glob("part-*.jsonl")) for line in path.read_bytes().splitlines()]
