"""What a run shows while it runs, and reports at its end."""

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from neuronpipe.bulk.transform.manifest import DoneShard
from neuronpipe.bulk.transform.shards import NAMED_ERRORS, Progress, RowError

_TERMINAL_INTERVAL_S, _LOG_INTERVAL_S = 0.5, 30.0


class TooManyErrors(Exception):
    """More rows failed than may."""


class RunProgress:
    """Counts rows, and shows them on standard error from time to time."""

    def __init__(self, rows: int, done: Sequence[DoneShard], max_errors: int | None) -> None:
        """`rows`: of the whole input. `done`: shards of a run before, with which this one goes on."""
        self.errors: list[RowError] = []
        self.rows = 0
        self._total = rows
        self._resumed = sum(shard.rows for shard in done)
        self._failed = sum(shard.errors for shard in done)
        self._max_errors = max_errors
        self._began_s = time.monotonic()
        self._is_terminal = sys.stderr.isatty()
        self._shown_s = self._began_s
        self._is_shown = False

    @property
    def seconds(self) -> float:
        """Since the run began to compute."""
        return time.monotonic() - self._began_s

    def note(self, progress: Progress) -> None:
        """Counts rows. Raises TooManyErrors."""
        self.rows += progress.rows
        self._failed += progress.errors
        self.errors += progress.named_errors[: NAMED_ERRORS - len(self.errors)]
        if self._max_errors is not None and self._failed > self._max_errors:
            named = "; ".join(f"{one.file} row {one.row}: {one.message}" for one in self.errors)
            raise TooManyErrors(f"{self._failed} rows failed, --max-errors is {self._max_errors}: {named}")
        interval_s = _TERMINAL_INTERVAL_S if self._is_terminal else _LOG_INTERVAL_S
        if time.monotonic() >= self._shown_s + interval_s:
            self._shown_s = time.monotonic()
            self._show()

    def end(self) -> None:
        """Leaves the line that was shown last."""
        if self._is_terminal and self._is_shown:
            self._show()
            self._write("\n")

    def _show(self) -> None:
        done, rate = self._resumed + self.rows, self.rows / max(self.seconds, 1e-9)
        share = f"{done / self._total:.1%}" if self._total else "100 %"
        left = _duration((self._total - done) / rate) if rate else "?"
        line = f"{done:,} of {self._total:,} rows ({share}), {rate:,.0f} rows/s, {left} left, {self._failed:,} failed"
        self._is_shown = True
        self._write(f"\r{line}\033[K" if self._is_terminal else f"{line}\n")

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a run. `seconds`, `rows_per_s`, `tokens_per_s` and `cost`: of this command alone; rows, errors and
    tokens: of all shards, also those that a run before has left. `padding`: the share of computed tokens that was
    padding.
    """

    model: str
    rows: int
    errors: int
    shards: int
    resumed_rows: int
    seconds: float
    rows_per_s: float
    tokens: int
    tokens_per_s: float
    truncated_tokens: int
    padding: float
    cost: float | None
    cost_per_million_rows: float | None


def make_report(
    model: str, shards: Sequence[DoneShard], new: Sequence[DoneShard], seconds: float, price_per_hour: float
) -> Report:
    """The figures. `new`: the shards of this command."""

    def total(read: Callable[[DoneShard], int], of: Sequence[DoneShard] = shards) -> int:
        return sum(map(read, of))

    rows, new_rows = total(lambda shard: shard.rows), total(lambda shard: shard.rows, new)
    tokens, padded = total(lambda shard: shard.tokens), total(lambda shard: shard.padded_tokens)
    cost = price_per_hour * seconds / 3600 if price_per_hour else None
    return Report(
        model=model,
        rows=rows,
        errors=total(lambda shard: shard.errors),
        shards=len(shards),
        resumed_rows=rows - new_rows,
        seconds=round(seconds, 3),
        rows_per_s=round(new_rows / max(seconds, 1e-9), 1),
        tokens=tokens,
        tokens_per_s=round(total(lambda shard: shard.tokens, new) / max(seconds, 1e-9), 1),
        truncated_tokens=total(lambda shard: shard.truncated_tokens),
        padding=round(1 - tokens / padded, 4) if padded else 0.0,
        cost=None if cost is None else round(cost, 6),
        cost_per_million_rows=None if cost is None or not new_rows else round(cost / new_rows * 1e6, 4),
    )


def report_rows(report: Report) -> list[tuple[str, str]]:
    """The report as the rows of a table."""
    figures = asdict(report)
    shown = {
        "rows": f"{report.rows:,}" + (f", {report.resumed_rows:,} of them before" if report.resumed_rows else ""),
        "errors": f"{report.errors:,}",
        "shards": f"{report.shards:,}",
        "time": f"{_duration(report.seconds)}, {report.rows_per_s:,.0f} rows/s",
        "tokens": f"{report.tokens:,}, {report.tokens_per_s:,.0f} tokens/s",
        "padding": f"{report.padding:.1%} of the computed tokens",
    }
    if report.truncated_tokens:
        shown["truncated"] = f"{report.truncated_tokens:,} tokens"
    if figures["cost"] is not None:
        shown["cost"] = f"{report.cost:,.4f}, {report.cost_per_million_rows or 0:,.2f} for a million rows"
    return [("model", report.model), *shown.items()]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{seconds:.1f} s"
