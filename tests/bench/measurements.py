"""What a benchmark measures, and ratios of it within a round."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


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


# None where a turn does not tell, as one without answers.
Value: TypeAlias = Callable[[Measurement], float | None]


def throughput(one: Measurement) -> float:
    """Answers a second."""
    return one.throughput_per_s


def latency(name: str) -> Value:
    """A percentile of the latency in ms."""
    return lambda one: one.latencies_ms.get(name)


p50 = latency("p50")


def figure(name: str, factor: float = 1.0) -> Value:
    """One of the figures that a system tells of itself, times a factor."""
    return lambda one: one.figures[name] * factor if name in one.figures else None


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


class Measurements:
    """All of a run."""

    def __init__(self, measurements: Iterable[Measurement] = ()) -> None:
        self.all = list(measurements)

    def of(self, section: str, system: str, callers: int) -> list[Measurement]:
        """One system's turns, by round."""
        return [one for one in self.all if (one.section, one.system, one.callers) == (section, system, callers)]

    def systems(self, section: str) -> list[str]:
        """In the order in which they were first measured."""
        return list(dict.fromkeys(one.system for one in self.all if one.section == section))

    def callers(self, section: str) -> list[int]:
        """The numbers of callers that a section was measured with."""
        return sorted({one.callers for one in self.all if one.section == section})

    def spread(self, section: str, system: str, callers: int, value: Value) -> Spread | None:
        """Of a value over the rounds."""
        return Spread.of([found for one in self.of(section, system, callers) if (found := value(one)) is not None])

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
        references = {
            one.round: value(one)
            for one in self.of(section, reference, callers if reference_callers is None else reference_callers)
        }
        pairs = [(value(one), references.get(one.round)) for one in self.of(section, system, callers)]
        return Spread.of([mine / other for mine, other in pairs if mine is not None and other])
