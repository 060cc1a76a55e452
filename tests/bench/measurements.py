"""What a benchmark measures, and ratios of it within a round."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Self, TypeAlias

from neuronpipe.measure.figures import Distribution
from neuronpipe.measure.load.report import LoadResult


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One turn of one system. Rounds of equal number were measured right after each other, so that only they are
    compared.

    `latencies_ms` are of the requests of the turn: p50, p90 and p99. `figures` are what only some systems tell of
    themselves.
    """

    section: str
    system: str
    callers: int
    round: int
    throughput_per_s: float
    errors: int = 0
    latencies_ms: dict[str, float] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        result: LoadResult,
        section: str,
        system: str,
        callers: int,
        round: int,
        figures: Mapping[str, float] = MappingProxyType({}),
    ) -> Self:
        """The turn in which the load generator found this."""
        return cls(
            section=section,
            system=system,
            callers=callers,
            round=round,
            throughput_per_s=result.throughput_per_s,
            errors=sum(result.errors.values()),
            latencies_ms=percentiles_of(result.latency_ms),
            figures=dict(figures),
        )


def percentiles_of(latency_ms: Distribution | None) -> dict[str, float]:
    """The percentiles of a turn; none of no latencies."""
    return {name: getattr(latency_ms, name) for name in ("p50", "p90", "p99")} if latency_ms else {}


# None where a turn does not tell, as one without answers.
Value: TypeAlias = Callable[[Measurement], float | None]


def throughput(turn: Measurement) -> float:
    """Answers a second."""
    return turn.throughput_per_s


def latency(name: str) -> Value:
    """A percentile of the latency in ms."""
    return lambda turn: turn.latencies_ms.get(name)


p50 = latency("p50")


def figure(name: str, factor: float = 1.0) -> Value:
    """One of the figures that a system tells of itself, times a factor."""
    return lambda turn: turn.figures[name] * factor if name in turn.figures else None


@dataclass(frozen=True)
class Spread:
    """The median of some rounds, the smallest and the largest."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        """None of no values."""
        return cls(statistics.median(values), min(values), max(values), len(values)) if values else None

    def text(self, form: str) -> str:
        """The three in words, in a format of numbers."""
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def spread_text(values: Sequence[float], form: str) -> str:
    """The median of values in words, with the smallest and the largest."""
    spread = Spread.of(values)
    return spread.text(form) if spread else ""


def number(value: float) -> str:
    """Three digits, but no more than two decimals."""
    return f"{value:.{0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2}f}"


def ratios(values: Sequence[float], references: Sequence[float]) -> list[float]:
    """Values to those of the same rounds."""
    return [value / reference for value, reference in zip(values, references, strict=True)]


class Measurements:
    """All of a run."""

    def __init__(self, measurements: Iterable[Measurement] = ()) -> None:
        self.all = list(measurements)

    def of(self, section: str, system: str, callers: int) -> list[Measurement]:
        """One system's turns, by round."""
        return [turn for turn in self.all if (turn.section, turn.system, turn.callers) == (section, system, callers)]

    def systems(self, section: str) -> list[str]:
        """In the order in which they were first measured."""
        return list(dict.fromkeys(turn.system for turn in self.all if turn.section == section))

    def callers(self, section: str) -> list[int]:
        """The numbers of callers that a section was measured with."""
        return sorted({turn.callers for turn in self.all if turn.section == section})

    def spread(self, section: str, system: str, callers: int, value: Value) -> Spread | None:
        """Of a value over the rounds."""
        found = map(value, self.of(section, system, callers))
        return Spread.of([number for number in found if number is not None])

    def ratio(
        self,
        section: str,
        system: str,
        reference: str,
        callers: int,
        value: Value,
        reference_callers: int | None = None,
    ) -> Spread | None:
        """Of a system's value to the reference's of the same round."""
        turns = self.of(section, reference, callers if reference_callers is None else reference_callers)
        references = {turn.round: value(turn) for turn in turns}
        pairs = [(value(turn), references.get(turn.round)) for turn in self.of(section, system, callers)]
        return Spread.of([mine / other for mine, other in pairs if mine is not None and other])
