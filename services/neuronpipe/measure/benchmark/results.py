"""The results of a run: a JSON file that grows with each cell, from which reports are made, and two side by side."""

import csv
import dataclasses
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import files_told, replace_file
from neuronpipe.measure.benchmark.matrix import Cell, Variant
from neuronpipe.measure.benchmark.measuring import Samples
from neuronpipe.measure.figures import Interval, bootstrap, mean, median, p95, ratio

# Of results.json. Raised whenever a reader of before would misunderstand it.
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
        """Inputs a second of a closed loop, by Little's law."""
        return self.cell.callers * self.cell.batch / (self.mean_ms / 1e3)

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second, special ones included."""
        return self.throughput_per_s * self.tokens

    @property
    def mean_ms(self) -> float:
        """Mean latency."""
        return float(np.mean(self.latency_ms))

    @property
    def p95_interval(self) -> Interval:
        """The 95th percentile of the latency in ms, with its confidence interval."""
        return bootstrap(self.latency_ms, p95)

    def percentile_ms(self, percent: float) -> float:
        """Of the latency, by linear interpolation."""
        return float(np.percentile(self.latency_ms, percent))


def cell_result(cell: Cell, samples: Samples, *, steal: float, others: float) -> CellResult:
    """Parts are means, so that they sum to the mean latency."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ColdStart:
    """`serve all` with one model: starts from nothing, then single requests of `length` tokens. Times in ms.

    `model_ms`: computing, of each request; `overhead_ms`: the rest of what the caller waited. `reason`: why there are
    none.
    """

    model: str
    task: str
    length: int
    size_bytes: int = 0
    memory_bytes: int = 0
    starts_ms: Sequence[float] = ()
    model_ms: Sequence[float] = ()
    overhead_ms: Sequence[float] = ()
    reason: str = ""


@dataclass(kw_only=True)
class Results:
    """A run. `effort`, `machine`: what figures depend on; a run is resumed only where they are the same.

    `base_length`: tokens of the cells that tables of one length show.
    """

    command: str
    machine: dict[str, str]
    effort: dict[str, float]
    models: dict[str, dict[str, Any]]
    base_length: int = 128
    planned: int = 0
    minutes: float = 0.0
    cells: list[CellResult] = field(default_factory=list)
    cold_starts: list[ColdStart] = field(default_factory=list)

    @property
    def measured(self) -> list[CellResult]:
        """Those with samples."""
        return [one for one in self.cells if not one.reason]

    @property
    def at_base_length(self) -> list[CellResult]:
        """Those with samples, of the base length or of images."""
        return [one for one in self.measured if one.cell.length in (0, self.base_length)]

    @property
    def is_complete(self) -> bool:
        """Whether each planned cell has samples or a reason."""
        return len(self.cells) >= self.planned


def write_results(results: Results, folder: Path) -> None:
    """Replaces the file of a folder. Raises SetupError where it cannot be written."""
    content = {"schema_version": SCHEMA_VERSION, **dataclasses.asdict(results)}
    with files_told(f"{folder}: cannot be written", "; see --out"):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / RESULTS_FILE, (json.dumps(content, separators=(",", ":")) + "\n").encode(), mode=0o644)


def read_results(path: Path) -> Results:
    """Of a folder or of its file. Raises SetupError for what is no report, or one of another schema version."""
    file = path / RESULTS_FILE if path.is_dir() else path
    try:
        with files_told(f"{file}", "; a run of `neuronpipe benchmark` leaves one"):
            content = json.loads(file.read_text())
    except ValueError as error:
        raise SetupError(f"{file}: is no JSON of `neuronpipe benchmark`") from error
    found = content.pop("schema_version", None) if isinstance(content, dict) else None
    if found != SCHEMA_VERSION:
        raise SetupError(
            f"{file}: has the schema version {found}, this neuronpipe reads {SCHEMA_VERSION}; measure again, or use "
            "the neuronpipe that wrote it"
        )
    try:
        cells = [_cell(one) for one in content.pop("cells")]
        starts = [ColdStart(**one) for one in content.pop("cold_starts")]
        return Results(**content, cells=cells, cold_starts=starts)
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
    """A line for each cell."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(_COLUMNS)
    for one in results.cells:
        cell = one.cell
        head = (*dataclasses.astuple(cell.variant), cell.mode, cell.batch, cell.length, len(one.latency_ms))
        figures = _figures(one) if not one.reason else ("",) * (len(_COLUMNS) - len(head) - 1)
        writer.writerow((*head, *figures, one.reason))
    return text.getvalue()


def _figures(one: CellResult) -> Sequence[str]:
    interval = one.p95_interval
    values = (
        *(one.mean_ms, one.percentile_ms(50), interval.value, interval.low, interval.high, one.percentile_ms(99)),
        *(one.throughput_per_s, one.tokens_per_s, one.preprocess_ms, one.predict_ms, one.postprocess_ms),
        *(one.steal, one.others),
    )
    return [f"{value:.{_DIGITS}g}" for value in values]


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
