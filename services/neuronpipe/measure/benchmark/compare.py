"""Two runs side by side: ratios of equal cells with their intervals, and what has become worse."""

from collections.abc import Sequence
from dataclasses import dataclass

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.matrix import Cell
from neuronpipe.measure.benchmark.results import CellResult, Results
from neuronpipe.measure.benchmark.statistics import Interval, mean, median, p95, ratio

_DIFFERENT = ("CPU", "CPUs to use", "instructions", "libraries", "neuronpipe")


@dataclass(frozen=True, slots=True)
class Compared:
    """A cell of two runs: ratios of the second to the first. Latency above 1 is slower, throughput below 1 is less.

    `reason`: why only the first run has figures; then there are no ratios.
    """

    cell: Cell
    p50: Interval | None = None
    p95: Interval | None = None
    throughput: Interval | None = None
    reason: str = ""

    def is_regression(self, threshold: float) -> bool:
        """Whether the whole interval of the median latency or of the throughput is worse by more than the threshold."""
        if self.p50 is None or self.throughput is None:
            return True
        return self.p50.low > 1 + threshold or self.throughput.high < 1 / (1 + threshold)

    def is_improvement(self, threshold: float) -> bool:
        """As is_regression, the other way round."""
        if self.p50 is None or self.throughput is None:
            return False
        return self.p50.high < 1 / (1 + threshold) or self.throughput.low > 1 + threshold


def compare_results(before: Results, after: Results) -> list[Compared]:
    """The cells that the first run has measured and the second has planned, in the order of the first.

    Raises SetupError for runs without a common cell.
    """
    found = {one.cell: one for one in after.cells}
    common = [one for one in before.measured if one.cell in found]
    if not common:
        raise SetupError("the two runs have no cell in common: models, dtypes, cores, batches and lengths all differ")
    return [_compare(one, found[one.cell]) for one in common]


def _compare(before: CellResult, after: CellResult) -> Compared:
    if after.reason:
        return Compared(before.cell, reason=after.reason)
    slower = ratio(after.latency_ms, before.latency_ms, mean)
    return Compared(
        before.cell,
        p50=ratio(after.latency_ms, before.latency_ms, median),
        p95=ratio(after.latency_ms, before.latency_ms, p95),
        # Of a closed loop it is the inverse of the mean latency.
        throughput=Interval(1 / slower.value, 1 / slower.high, 1 / slower.low),
    )


def differences(before: Results, after: Results) -> list[str]:
    """What differs between the machines: ratios are of that, too."""
    return [
        f"{name}: {before.machine.get(name)} | {after.machine.get(name)}"
        for name in _DIFFERENT
        if before.machine.get(name) != after.machine.get(name)
    ]


def compared_rows(compared: Sequence[Compared], threshold: float) -> list[Sequence[str]]:
    """A table, its heading first."""
    rows: list[Sequence[str]] = [("CELL", "P50", "P95", "THROUGHPUT", "")]
    for one in compared:
        said = "REGRESSION" if one.is_regression(threshold) else "better" if one.is_improvement(threshold) else ""
        if one.reason:
            rows.append((one.cell.name, "", "", "", f"{said}: not measured: {one.reason}"))
        else:
            rows.append((one.cell.name, _text(one.p50), _text(one.p95), _text(one.throughput), said))
    return rows


def _text(interval: Interval | None) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})" if interval else ""
