"""How long a run will take: said before it starts, and again after each cell."""

import time
from collections.abc import Mapping, Sequence

import numpy as np

from neuronpipe.measure.benchmark.matrix import Cell, Matrix
from neuronpipe.measure.benchmark.measuring import Effort
from neuronpipe.measure.benchmark.models import IMAGE_TOKENS, BenchmarkModel

_OPERATIONS = 2.0  # for each parameter and token: a product and a sum
_SIDE = 1024
_TRIALS = 5
# Of what matrices of this size reach. A guess, which the cells that are measured correct.
_EFFICIENCY = 0.75
_CALL_S = 0.001
# Compiling: constant, and for each parameter. Guesses for two CPUs.
_COMPILE_S, _COMPILE_S_PER_PARAMETER = 12.0, 2.5e-7
_LOAD_S = 6.0
_TRUSTED = 5


def operations_per_s() -> float:
    """What this machine's CPUs do with float32 matrices, measured in half a second."""
    generator = np.random.default_rng(0)
    left, right = (generator.random((_SIDE, _SIDE), np.float32) for _ in range(2))
    best_s = float("inf")
    for _ in range(_TRIALS):
        began_s = time.perf_counter()
        left @ right
        best_s = min(best_s, time.perf_counter() - began_s)
    return 2 * _SIDE**3 / best_s


class Estimate:
    """Times in seconds. Corrects itself by the cells that are measured."""

    def __init__(self, matrix: Matrix, effort: Effort, speed: float) -> None:
        """`speed`: operations a second."""
        self._models: Mapping[str, BenchmarkModel] = {model.name: model for model in matrix.models}
        self._effort = effort
        self._speed = speed * _EFFICIENCY
        self._guessed_s = self._taken_s = 0.0
        self._noted = 0

    def cell_s(self, cell: Cell) -> float:
        """One cell, before anything is known of it."""
        effort = self._effort
        operations = _OPERATIONS * self._models[cell.variant.model].parameters * (cell.length or IMAGE_TOKENS)
        call_s = cell.callers * (_CALL_S + operations * cell.batch / self._speed)
        warm_up_s = min(effort.warm_up_calls * call_s, effort.seconds / 4 + call_s)
        return warm_up_s + max(effort.seconds, effort.least_calls * call_s / cell.callers)

    def note(self, cell: Cell, seconds: float) -> None:
        """A cell has been measured."""
        self._guessed_s += self.cell_s(cell)
        self._taken_s += seconds
        self._noted += 1

    def left_s(self, cells: Sequence[Cell], missing_bundles: Sequence[BenchmarkModel]) -> float:
        """All that is left, with what must be compiled and loaded."""
        factor = self._taken_s / self._guessed_s if self._noted >= _TRUSTED else 1.0
        compiling_s = sum(_COMPILE_S + model.parameters * _COMPILE_S_PER_PARAMETER for model in missing_bundles)
        loading_s = _LOAD_S * len({cell.variant for cell in cells})
        return factor * sum(map(self.cell_s, cells)) + compiling_s + loading_s


def minutes_text(seconds: float) -> str:
    """For people."""
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{seconds:.0f} s"
