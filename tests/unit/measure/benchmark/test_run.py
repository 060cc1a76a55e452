"""run.py: what of a matrix is measured when a cell, or a whole variant, cannot be."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from neuronpipe.measure.benchmark import run
from neuronpipe.measure.benchmark.matrix import LATENCY, Cell, MatrixRequest, make_matrix, published_model
from neuronpipe.measure.benchmark.measuring import Effort, Samples
from neuronpipe.measure.benchmark.processes import CannotMeasure
from neuronpipe.measure.benchmark.run import Run, RunRequest

_LENGTHS = (8, 16, 32, 64)


class _Process:
    """A process that ends with texts of 16 tokens, cannot measure those of 32, and loads nothing in bfloat16."""

    started_with: list[list[int]]

    def __init__(self) -> None:
        self.is_running = True

    @classmethod
    @contextmanager
    def started(cls, folder: Path, variant: Any, cells: Sequence[Cell], effort: Effort) -> Iterator[Self]:
        cls.started_with.append([cell.length for cell in cells])
        if variant.dtype == "bfloat16":
            raise CannotMeasure("it does not load")
        yield cls()

    def measure(self, cell: Cell) -> Samples:
        if cell.length == 16:
            self.is_running = False
            raise CannotMeasure("its process was ended by SIGSEGV")
        if cell.length == 32:
            raise CannotMeasure("too long")
        return Samples([1.0], [0.1], [0.8], [0.1], tokens=cell.length)


def _reasons(folder: Path, dtype: str) -> dict[int, str]:
    matrix = make_matrix(
        MatrixRequest(
            [published_model("bert-base-uncased")],
            lengths=_LENGTHS,
            batches=(1,),
            modes=(LATENCY,),
            is_product=True,
            dtypes=(dtype,),
            cores=(1,),
        )
    )
    request = RunRequest(
        matrix=matrix, effort=Effort(), folder=folder, cache=folder, minutes=1e6, command="", cold_starts=0
    )
    results = Run(request, lambda line: None).run()
    return {one.cell.length: one.reason for one in results.cells}


@pytest.fixture(autouse=True)
def _faked(monkeypatch: pytest.MonkeyPatch) -> None:
    _Process.started_with = []
    monkeypatch.setattr(run, "VariantProcess", _Process)
    monkeypatch.setattr(run, "prepare_bundle", lambda *_: Path())
    monkeypatch.setattr(run, "operations_per_s", lambda: 1e9)


def test_a_cell_that_ends_its_process_leaves_the_others_to_another(tmp_path: Path) -> None:
    reasons = _reasons(tmp_path, "float32")
    assert reasons == {8: "", 16: "its process was ended by SIGSEGV", 32: "too long", 64: ""}
    assert _Process.started_with == [[8, 16, 32, 64], [32, 64]]


def test_a_variant_that_does_not_load_has_one_reason_for_all_its_cells(tmp_path: Path) -> None:
    assert _reasons(tmp_path, "bfloat16") == dict.fromkeys(_LENGTHS, "it does not load")
    assert _Process.started_with == [list(_LENGTHS)]
