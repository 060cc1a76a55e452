"""run.py: what of a matrix is measured when a cell, or a whole variant, cannot be."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark import run
from neuronpipe.measure.benchmark.bundles import WantedBundle
from neuronpipe.measure.benchmark.matrix import LATENCY, Cell, MatrixRequest, Variant, make_matrix, published_model
from neuronpipe.measure.benchmark.measuring import CellEffort, CellSamples
from neuronpipe.measure.benchmark.run import BenchmarkRun, RunRequest
from neuronpipe.platform.process.worker import ProcessEnded

_LENGTHS = (8, 16, 32, 64)


class _Worker:
    """A process that ends with texts of 16 tokens, cannot measure those of 32, and loads nothing in bfloat16."""

    started_with: list[list[int]]

    def __init__(self, first: str) -> None:
        self._answer: CellSamples | str = first

    @classmethod
    @contextmanager
    def started(
        cls, work: Any, folder: Path, variant: Variant, cells: Sequence[Cell], effort: CellEffort, name: str
    ) -> Iterator[Self]:
        cls.started_with.append([cell.length for cell in cells])
        yield cls("it does not load" if variant.dtype == "bfloat16" else "")

    def send(self, cell: Cell) -> None:
        if cell.length == 16:
            raise ProcessEnded("the process ended with signal SIGSEGV")
        self._answer = "too long" if cell.length == 32 else CellSamples([1.0], [0.1], [0.8], [0.1], tokens=cell.length)

    def receive(self) -> CellSamples | str:
        return self._answer


def _reasons(folder: Path, dtype: str) -> dict[int, str]:
    models, one = [published_model("bert-base-uncased")], (1,)
    wanted = MatrixRequest(
        models, lengths=_LENGTHS, batches=one, modes=(LATENCY,), is_product=True, dtypes=(dtype,), cores=one
    )
    matrix = make_matrix(wanted)
    request = RunRequest(matrix=matrix, effort=CellEffort(), folder=folder, cache=folder, minutes=1e6, command="")
    results = BenchmarkRun(request, lambda line: None).run()
    return {cell.cell.length: cell.reason for cell in results.cells}


@pytest.fixture(autouse=True)
def _faked(monkeypatch: pytest.MonkeyPatch) -> None:
    _Worker.started_with = []
    monkeypatch.setattr(run, "Worker", _Worker)
    monkeypatch.setattr(WantedBundle, "prepare", lambda *_: Path())
    monkeypatch.setattr(run, "operations_per_s", lambda: 1e9)


def test_a_cell_that_ends_its_process_leaves_the_others_to_another(tmp_path: Path) -> None:
    reasons = _reasons(tmp_path, "float32")
    assert reasons == {8: "", 16: "the process ended with signal SIGSEGV", 32: "too long", 64: ""}
    assert _Worker.started_with == [[8, 16, 32, 64], [32, 64]]


def test_a_variant_that_does_not_load_has_one_reason_for_all_its_cells(tmp_path: Path) -> None:
    assert _reasons(tmp_path, "bfloat16") == dict.fromkeys(_LENGTHS, "it does not load")
    assert _Worker.started_with == [list(_LENGTHS)]


@pytest.mark.parametrize("folder", ["/proc/x", "/dev/null"])
def test_a_folder_that_cannot_be_written_to_is_found_before_anything_is_measured(folder: str) -> None:
    with pytest.raises(SetupError, match=f"^{folder}: cannot be written: .*; see --out$"):
        _reasons(Path(folder), "float32")
    assert _Worker.started_with == []
