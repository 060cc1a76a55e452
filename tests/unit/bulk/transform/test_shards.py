"""bulk/transform/shards.py: a shard has the results of the rows that were there when the run began."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.bulk.transform.request import InputOutcome, ModelFacts
from neuronpipe.core.errors import InvalidInput, SetupError
from tests.systems.transform_runs import MODEL, make_rows, request_of, transform, write_rows


class _Engine:
    """An engine that refuses every input, while another program writes the file again at the tenth call."""

    model = ModelFacts(MODEL, "1", "digest", ["text_classification"])
    window_rows, windows_in_flight = 10, 1

    def __init__(self, file: Path) -> None:
        self._file, self._calls = file, 0

    async def infer(self, inputs: Sequence[TaskInput]) -> Sequence[InputOutcome]:
        self._calls += 1
        if self._calls == 10:
            write_rows(self._file, [{**row, "review": "another"} for row in make_rows(200)])
        return [InvalidInput("text", "is refused") for _ in inputs]


@pytest.mark.parametrize("ending", [".jsonl", ".csv", ".parquet"])
async def test_rows_of_a_file_that_changes_are_no_results(ending: str, tmp_path: Path) -> None:
    file = write_rows(tmp_path / f"rows{ending}", make_rows(200))
    with pytest.raises(SetupError, match=f"{file}: has changed since the run began"):
        await transform(_Engine(file), request_of(file, tmp_path / "out"))
    complete = len(list((tmp_path / "out" / "_shards").iterdir()))
    assert 0 < complete <= 5  # of ten; a window is read ahead of the answers
