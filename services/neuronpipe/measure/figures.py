"""Figures: percentiles of samples, confidence intervals, and tables.

Intervals are by the percentile bootstrap (Efron, 1979), from a fixed seed so that equal samples agree.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Distribution:
    """Percentiles by linear interpolation, the mean and the largest of some values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


def distribution(values: NDArray[np.floating | np.integer]) -> Distribution | None:
    """Returns the distribution of some values; None without values."""
    if not len(values):
        return None
    exact = values.astype(np.float64)
    p50, p90, p95, p99 = np.percentile(exact, (50, 90, 95, 99)).tolist()
    return Distribution(mean=float(exact.mean()), p50=p50, p90=p90, p95=p95, p99=p99, max=float(exact.max()))


_RESAMPLES = 1000
_CONFIDENCE = 0.95
_SEED = 20261123
# Samples that are drawn at once: all resamples of a million samples together would take gigabytes.
_CHUNK = 1 << 20

Samples = Sequence[float] | NDArray[np.float64]
Statistic = Callable[[NDArray[np.float64]], NDArray[np.float64]]


@dataclass(frozen=True, slots=True)
class Interval:
    """A value with its confidence interval of 95 %."""

    value: float
    low: float
    high: float

    @property
    def relative_width(self) -> float:
        """Half of the interval's width, as a share of the value."""
        return (self.high - self.low) / 2 / self.value if self.value else float("inf")


def bootstrap(samples: Samples, statistic: Statistic) -> Interval:
    """Returns a statistic of some samples. `statistic` reduces the last axis. Raises ValueError without samples."""
    exact = np.asarray(samples, np.float64)
    if not len(exact):
        raise ValueError("no samples")
    return Interval(float(statistic(exact)), *_bounds(_resampled(exact, statistic, _SEED)))


def ratio(after: Samples, before: Samples, statistic: Statistic) -> Interval:
    """Returns the ratio of a statistic of two independent sets of samples. Raises ValueError without samples."""
    new, old = np.asarray(after, np.float64), np.asarray(before, np.float64)
    if not len(new) or not len(old):
        raise ValueError("no samples")
    ratios = _resampled(new, statistic, _SEED) / _resampled(old, statistic, _SEED + 1)
    return Interval(float(statistic(new) / statistic(old)), *_bounds(ratios))


def median(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the median of the last axis."""
    medians: NDArray[np.float64] = np.median(samples, axis=-1)
    return medians


def mean(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the mean of the last axis."""
    means: NDArray[np.float64] = np.mean(samples, axis=-1)
    return means


def p95(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the 95th percentile of the last axis, by linear interpolation."""
    percentiles: NDArray[np.float64] = np.percentile(samples, 95, axis=-1)
    return percentiles


def _resampled(samples: NDArray[np.float64], statistic: Statistic, seed: int) -> NDArray[np.float64]:
    """Returns the statistic of each resample."""
    random, size = np.random.default_rng(seed), len(samples)
    rows = max(1, _CHUNK // size)
    counts = [min(rows, _RESAMPLES - first) for first in range(0, _RESAMPLES, rows)]
    return np.concatenate([statistic(samples[random.integers(0, size, (count, size))]) for count in counts])


def _bounds(statistics: NDArray[np.float64]) -> tuple[float, float]:
    tail = (1 - _CONFIDENCE) / 2 * 100
    low, high = np.percentile(statistics, (tail, 100 - tail)).tolist()
    return low, high


def number(value: float) -> str:
    """Formats a number with three digits, without an exponent."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}" if value >= 1 else f"{value:.3f}"


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a title. `note`: its content, and its source."""

    title: str
    note: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def section(self) -> Iterator[str]:
        """Yields the table's lines in a page of Markdown."""
        yield from (f"## {self.title}", "", self.note, "")
        yield from (*markdown_table(self.columns, self.rows), "") if self.rows else ("None.", "")


def markdown_table(columns: Sequence[str], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    """Yields the lines of a table."""
    for row in (columns, ["---"] * len(columns), *rows):
        yield "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |"
