"""Runs a matrix: each variant in a process of its own, the results written after each cell.

The expected time is shown before the run starts, and again after each cell.
"""

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.bundles import CannotMeasure, WantedBundle
from neuronpipe.measure.benchmark.matrix import IMAGE_TOKENS, BenchmarkModel, Cell, Matrix, Variant
from neuronpipe.measure.benchmark.measuring import CellEffort, work
from neuronpipe.measure.benchmark.results import (
    RESULTS_FILE,
    CellResult,
    Results,
    cell_result,
    check_folder,
    read_results,
    write_results,
)
from neuronpipe.measure.machine import CpuWatch, describe_machine
from neuronpipe.platform.process.worker import ProcessEnded, Worker
from neuronpipe.stages.neuron_executor.runtimes.host import available_cpus

_OPERATIONS = 2.0  # for each parameter and token: a product and a sum
_SIDE = 1024
_TRIALS = 5
# Guessed speed of a model, as a share of the speed of products of matrices of _SIDE rows. Measured cells correct it.
_EFFICIENCY = 0.75
_CALL_S = 0.001
# Guessed compile time on two CPUs: fixed seconds, and seconds per parameter.
_COMPILE_S, _COMPILE_S_PER_PARAMETER = 12.0, 2.5e-7
_LOAD_S = 6.0
_TRUSTED = 5


def operations_per_s() -> float:
    """Returns the speed of this machine's CPUs with float32 matrices, measured in half a second."""
    generator = np.random.default_rng(0)
    factor, other_factor = (generator.random((_SIDE, _SIDE), np.float32) for _ in range(2))
    best_s = float("inf")
    for _ in range(_TRIALS):
        began_s = time.perf_counter()
        factor @ other_factor
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * _SIDE**3 / best_s


class Estimate:
    """Estimates times in seconds. Corrects itself by the measured cells."""

    def __init__(self, matrix: Matrix, effort: CellEffort, speed: float) -> None:
        """`speed`: operations per second."""
        self._matrix = matrix
        self._effort = effort
        self._speed = speed * _EFFICIENCY
        self._guessed_s = self._taken_s = 0.0
        self._noted = 0

    def cell_s(self, cell: Cell) -> float:
        """Returns the guess for a cell, without a correction."""
        effort = self._effort
        operations = _OPERATIONS * self._matrix.model(cell.variant.model).parameters * (cell.length or IMAGE_TOKENS)
        call_s = cell.callers * (_CALL_S + operations * cell.batch / self._speed)
        warm_up_s = min(effort.warm_up_calls * call_s, effort.seconds / 4 + call_s)
        return warm_up_s + max(effort.seconds, effort.least_calls * call_s / cell.callers)

    def note(self, cell: Cell, seconds: float) -> None:
        """Records the time of a measured cell."""
        self._guessed_s += self.cell_s(cell)
        self._taken_s += seconds
        self._noted += 1

    def left_s(self, cells: Sequence[Cell], missing_bundles: Sequence[BenchmarkModel]) -> float:
        """Returns the time for all remaining cells, with compiling and loading."""
        factor = self._taken_s / self._guessed_s if self._noted >= _TRUSTED else 1.0
        compiling_s = sum(_COMPILE_S + model.parameters * _COMPILE_S_PER_PARAMETER for model in missing_bundles)
        loading_s = _LOAD_S * len({cell.variant for cell in cells})
        return factor * sum(map(self.cell_s, cells)) + compiling_s + loading_s


def minutes_text(seconds: float) -> str:
    """Formats a time for people."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"


# The load per CPU before the run; more is a warning.
_QUIET = 0.25
# Facts that must be equal for cells of two runs to be in one report.
_SAME = ("neuronpipe", "CPU", "CPU family, model, stepping", "CPUs to use", "libraries")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A run. `minutes`: a run that would take longer is not begun. `is_fresh`: cells that the folder has already
    are measured again.
    """

    matrix: Matrix
    effort: CellEffort
    folder: Path
    cache: Path
    minutes: float
    command: str
    base_length: int = 128
    is_fresh: bool = False


class BenchmarkRun:
    """A run; `results` grow while it runs, and are in the folder after each cell."""

    def __init__(self, request: RunRequest, tell: Callable[[str], None]) -> None:
        """Reads the results of an interrupted run. Raises SetupError if they cannot be continued."""
        self._request, self._tell = request, tell
        self._effort: dict[str, float] = dataclasses.asdict(request.effort)
        self.results = Results(
            command=request.command,
            machine=describe_machine(),
            effort=self._effort,
            models={model.name: _described(model) for model in request.matrix.models},
            base_length=request.base_length,
        )
        if not request.is_fresh and (request.folder / RESULTS_FILE).is_file():
            self._take_over(read_results(request.folder))
        self.results.planned = len(request.matrix.cells)
        done = {result.cell for result in self.results.cells}
        self._left = [cell for cell in request.matrix.cells if cell not in done]

    def run(self) -> Results:
        """Measures the remaining cells.

        Raises SetupError before that if the matrix would take longer than allowed, or the folder cannot be written to.
        """
        if not self._left:
            return self.results
        self._estimate = Estimate(self._request.matrix, self._request.effort, operations_per_s())
        self._check_load()
        self._check_time()
        check_folder(self._request.folder)
        began_s, minutes_before = time.monotonic(), self.results.minutes
        try:
            for variant, cells in Matrix(self._request.matrix.models, tuple(self._left)).variants.items():
                self._run_variant(variant, cells)
        finally:
            self.results.minutes = minutes_before + (time.monotonic() - began_s) / 60
            write_results(self.results, self._request.folder)
        return self.results

    def _take_over(self, before: Results) -> None:
        out = f"--out {self._request.folder}: has a run"
        for name in _SAME:
            now, then = self.results.machine[name], before.machine.get(name)
            if now != then:
                raise SetupError(f"{out} with {name} {then!r}, this one has {now!r}; give --fresh, or another folder")
        if before.effort != self._effort:
            raise SetupError(
                f"{out} that measured cells for another time or precision; give --fresh, or another folder"
            )
        wanted_cells = set(self._request.matrix.cells)
        self.results.cells = [result for result in before.cells if result.cell in wanted_cells]
        self.results.minutes, self.results.machine = before.minutes, before.machine
        if self.results.cells:
            self._tell(f"{len(self.results.cells)} cells are there from before")

    def _missing(self) -> list[BenchmarkModel]:
        """Returns the models to compile, once for each back end and dtype."""
        wanted_bundles = dict.fromkeys(self._bundle(cell.variant) for cell in self._left)
        return [bundle.model for bundle in wanted_bundles if not bundle.find()]

    def _bundle(self, variant: Variant) -> WantedBundle:
        matrix = self._request.matrix
        buckets = matrix.buckets(variant.model, variant.backend, variant.dtype)
        return WantedBundle(matrix.model(variant.model), variant.backend, variant.dtype, buckets, self._request.cache)

    def _left_s(self) -> float:
        return self._estimate.left_s(self._left, self._missing())

    def _check_time(self) -> None:
        request, left_s = self._request, self._left_s()
        text = (
            f"{len(self._left)} cells of {len(request.matrix.models)} models, {len(self._missing())} to compile: about "
            f"{minutes_text(left_s)}"
        )
        if left_s > request.minutes * 60:
            raise SetupError(
                f"{text}, which is more than --minutes {request.minutes:g}; give fewer --model, --lengths, "
                "--batches or --dtypes, a smaller --cell-seconds, --quick, or more --minutes"
            )
        self._tell(text)

    def _check_load(self) -> None:
        load, cpus = os.getloadavg()[0], available_cpus()
        if load > _QUIET * cpus:
            self._tell(
                f"WARNING: the machine is busy: load {load:.1f} on {cpus} CPUs; figures will be worse than on a "
                "quiet one"
            )

    def _run_variant(self, variant: Variant, cells: Sequence[Cell]) -> None:
        try:
            folder = self._bundle(variant).prepare(self._tell)
            while cells:
                cells = self._measure(folder, variant, cells)
        except (CannotMeasure, ProcessEnded) as error:
            for cell in cells:
                self._note(CellResult(cell=cell, reason=str(error)))

    def _measure(self, folder: Path, variant: Variant, cells: Sequence[Cell]) -> Sequence[Cell]:
        """Measures cells in one process. Returns the remaining cells if one of the cells ended the process.

        Raises CannotMeasure and ProcessEnded if the process does not load the model.
        """
        with Worker.started(work, folder, variant, cells, self._request.effort, name="benchmark") as process:
            if reason := process.receive():
                raise CannotMeasure(reason)
            for number, cell in enumerate(cells):
                began_s, watch = time.monotonic(), CpuWatch()
                try:
                    process.send(cell)
                    answer = process.receive()
                except ProcessEnded as ended:
                    self._note(CellResult(cell=cell, reason=str(ended)))
                    return cells[number + 1 :]
                if isinstance(answer, str):
                    self._note(CellResult(cell=cell, reason=answer))
                    continue
                steal, others = watch.shares()
                self._estimate.note(cell, time.monotonic() - began_s)
                self._note(cell_result(cell, answer, steal=steal, others=others))
        return ()

    def _note(self, result: CellResult) -> None:
        self.results.cells.append(result)
        self._left.remove(result.cell)
        write_results(self.results, self._request.folder)
        outcome = f"not measured: {result.reason}"
        if not result.reason:
            interval = result.p95_interval
            outcome = (
                f"p95 {interval.value:.4g} ms ± {interval.relative_width:.0%}, {result.throughput_per_s:.4g}/s, "
                f"{len(result.latency_ms)} calls"
            )
        place = f"{len(self.results.cells)}/{self.results.planned}"
        self._tell(f"{place} {result.cell.name}: {outcome}; {minutes_text(self._left_s())} left")


def _described(model: BenchmarkModel) -> dict[str, object]:
    return {
        "task": model.task,
        "parameters": model.parameters,
        "weights": "random" if model.is_random else model.source or model.bundle,
    }
