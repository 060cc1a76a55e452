"""The results of a run, in a JSON file that grows with each cell, and the comparison of two runs."""

import csv
import dataclasses
import io
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import replace_file, reporting_os_errors
from neuronpipe.measure.benchmark.matrix import Cell, Variant
from neuronpipe.measure.benchmark.measuring import CellSamples
from neuronpipe.measure.figures import Interval, bootstrap, mean, median, p95, ratio

# The version of results.json. Raised when an older reader would misunderstand the file.
SCHEMA_VERSION = 1
RESULTS_FILE = "results.json"
_DIGITS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CellResult:
    """A cell with its samples in ms, or the reason why it has none.

    `steal`, `others`: shares of the CPUs' time that the hypervisor and other processes took meanwhile.
    """

    cell: Cell
    reason: str = ""
    latency_ms: Sequence[float] = ()
    preprocess_ms: float = 0.0
    predict_ms: float = 0.0
    postprocess_ms: float = 0.0
    tokens: float = 0.0
    steal: float = 0.0
    others: float = 0.0

    @property
    def throughput_per_s(self) -> float:
        """Inputs per second of a closed loop, by Little's law."""
        return self.cell.callers * self.cell.batch / (self.mean_ms / 1e3)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, special tokens included."""
        return self.throughput_per_s * self.tokens

    @property
    def mean_ms(self) -> float:
        return float(np.mean(self.latency_ms))

    @property
    def p95_interval(self) -> Interval:
        """The 95th percentile of the latency in ms, with its confidence interval."""
        return bootstrap(self.latency_ms, p95)

    def percentile_ms(self, percent: float) -> float:
        """Returns a percentile of the latency, by linear interpolation."""
        return float(np.percentile(self.latency_ms, percent))


def cell_result(cell: Cell, samples: CellSamples, *, steal: float, others: float) -> CellResult:
    """Makes the result of a cell. Its parts are means, so that they sum to the mean latency."""
    return CellResult(
        cell=cell,
        latency_ms=tuple(float(f"{value:.{_DIGITS}g}") for value in samples.latency_ms),
        preprocess_ms=float(np.mean(samples.preprocess_ms)),
        predict_ms=float(np.mean(samples.predict_ms)),
        postprocess_ms=float(np.mean(samples.postprocess_ms)),
        tokens=samples.tokens,
        steal=steal,
        others=others,
    )


@dataclass(kw_only=True)
class Results:
    """A run. `effort`, `machine`: the figures depend on them; a run is resumed only if they are equal.

    `base_length`: tokens of the cells in tables of one length.
    """

    command: str
    machine: dict[str, str]
    effort: dict[str, float]
    models: dict[str, dict[str, Any]]
    base_length: int = 128
    planned: int = 0
    minutes: float = 0.0
    cells: list[CellResult] = field(default_factory=list)

    @property
    def measured(self) -> list[CellResult]:
        """The cells with samples."""
        return [cell for cell in self.cells if not cell.reason]

    @property
    def at_base_length(self) -> list[CellResult]:
        """The cells with samples whose inputs have the base length or are images."""
        return [result for result in self.measured if result.cell.length in (0, self.base_length)]

    @property
    def best(self) -> dict[str, CellResult]:
        """Each model's cell of the base length with the highest throughput."""
        rising = sorted(self.at_base_length, key=lambda result: result.throughput_per_s)
        found = {result.cell.variant.model: result for result in rising}
        return {model: found[model] for model in self.models if model in found}

    @property
    def is_complete(self) -> bool:
        """Whether each planned cell has samples or a reason."""
        return len(self.cells) >= self.planned


def check_folder(folder: Path) -> None:
    """Makes the folder of a run. Raises SetupError if files cannot be written there."""
    with reporting_os_errors(f"{folder}: cannot be written", "; see --out"):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()


def write_results(results: Results, folder: Path) -> None:
    """Replaces the results file of a folder. Raises SetupError if it cannot be written."""
    content = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(results)}
    with reporting_os_errors(f"{folder}: cannot be written", "; see --out"):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / RESULTS_FILE, (json.dumps(content, separators=(",", ":")) + "\n").encode(), mode=0o644)


def read_results(path: Path) -> Results:
    """Reads the results of a folder, or of a file. Raises SetupError for other files, and other schema versions."""
    file = path / RESULTS_FILE if path.is_dir() else path
    try:
        with reporting_os_errors(f"{file}", "; a run of `neuronpipe benchmark` leaves one"):
            content = json.loads(file.read_text())
    except ValueError as error:
        raise SetupError(f"{file}: is no JSON of `neuronpipe benchmark`") from error
    schema_version = content.pop("schema_version", None) if isinstance(content, dict) else None
    if schema_version != SCHEMA_VERSION:
        problem = f"has the schema version {schema_version}, this neuronpipe reads {SCHEMA_VERSION}"
        raise SetupError(f"{file}: {problem}; measure again, or use the neuronpipe that wrote it")
    try:
        cells = [_cell(cell) for cell in content.pop("cells")]
        return Results(**content, cells=cells)
    except (KeyError, TypeError, AttributeError) as error:
        raise SetupError(f"{file}: is damaged: {error}") from error


def _cell(content: dict[str, Any]) -> CellResult:
    cell, latency_ms = content.pop("cell"), tuple(content.pop("latency_ms"))
    return CellResult(cell=Cell(Variant(**cell.pop("variant")), **cell), latency_ms=latency_ms, **content)


_COLUMNS = (
    *("model", "backend", "dtype", "cores", "mode", "batch", "length", "calls"),
    *("mean_ms", "p50_ms", "p95_ms", "p95_low_ms", "p95_high_ms", "p99_ms"),
    *("throughput_per_s", "tokens_per_s", "preprocess_ms", "predict_ms", "postprocess_ms", "steal", "others", "reason"),
)


def results_csv(results: Results) -> str:
    """Returns a line for each cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for result in results.cells:
        cell = result.cell
        head = (*dataclasses.astuple(cell.variant), cell.mode, cell.batch, cell.length, len(result.latency_ms))
        figures = _figures(result) if not result.reason else ("",) * (len(_COLUMNS) - len(head) - 1)
        writer.writerow((*head, *figures, result.reason))
    return text.getvalue()


def _figures(result: CellResult) -> Sequence[str]:
    interval = result.p95_interval
    values = (
        *(result.mean_ms, result.percentile_ms(50), interval.value, interval.low, interval.high),
        *(result.percentile_ms(99), result.throughput_per_s, result.tokens_per_s),
        *(result.preprocess_ms, result.predict_ms, result.postprocess_ms, result.steal, result.others),
    )
    return [f"{value:.{_DIGITS}g}" for value in values]


_DIFFERENT = ("CPU", "CPUs to use", "instructions", "libraries", "neuronpipe")


@dataclass(frozen=True, slots=True)
class Compared:
    """A cell of two runs, with ratios of the second run to the first. Latency above 1 is slower, throughput below 1 is
    less.

    `reason`: why only the first run has figures; then there are no ratios.
    """

    cell: Cell
    p50: Interval | None = None
    p95: Interval | None = None
    throughput: Interval | None = None
    reason: str = ""

    def is_regression(self, threshold: float) -> bool:
        """Returns whether the whole interval of median latency or throughput is worse by more than the threshold."""
        if self.p50 is None or self.throughput is None:
            return True
        return self.p50.low > 1 + threshold or self.throughput.high < 1 / (1 + threshold)

    def is_improvement(self, threshold: float) -> bool:
        """Returns whether the whole interval of median latency or throughput is better by more than the threshold."""
        if self.p50 is None or self.throughput is None:
            return False
        return self.p50.high < 1 / (1 + threshold) or self.throughput.low > 1 + threshold

    def row(self, threshold: float) -> Sequence[str]:
        """Returns the cells of a table."""
        better = "better" if self.is_improvement(threshold) else ""
        verdict = "REGRESSION" if self.is_regression(threshold) else better
        if self.reason:
            return (self.cell.name, "", "", "", f"{verdict}: not measured: {self.reason}")
        return (self.cell.name, *map(_text, (self.p50, self.p95, self.throughput)), verdict)


def compare_results(before: Results, after: Results) -> list[Compared]:
    """Compares the cells that the first run has measured and the second has planned, in the order of the first.

    Raises SetupError if the runs have no common cell.
    """
    results_after = {result.cell: result for result in after.cells}
    common = [result for result in before.measured if result.cell in results_after]
    if not common:
        raise SetupError("the two runs have no cell in common: models, dtypes, cores, batches and lengths all differ")
    return [_compare(result, results_after[result.cell]) for result in common]


def _compare(before: CellResult, after: CellResult) -> Compared:
    if after.reason:
        return Compared(before.cell, reason=after.reason)
    slower = ratio(after.latency_ms, before.latency_ms, mean)
    return Compared(
        before.cell,
        p50=ratio(after.latency_ms, before.latency_ms, median),
        p95=ratio(after.latency_ms, before.latency_ms, p95),
        # The throughput of a closed loop is the inverse of its mean latency.
        throughput=Interval(1 / slower.value, 1 / slower.high, 1 / slower.low),
    )


def differences(before: Results, after: Results) -> list[str]:
    """Returns the differences between the machines, which the ratios also measure."""
    return [
        f"{name}: {before.machine.get(name)} | {after.machine.get(name)}"
        for name in _DIFFERENT
        if before.machine.get(name) != after.machine.get(name)
    ]


def compared_rows(compared: Sequence[Compared], threshold: float) -> list[Sequence[str]]:
    """Returns the rows of a table, its heading first."""
    return [("CELL", "P50", "P95", "THROUGHPUT", ""), *(comparison.row(threshold) for comparison in compared)]


def _text(interval: Interval | None) -> str:
    return f"{interval.value:.3f} ({interval.low:.3f} to {interval.high:.3f})" if interval else ""
