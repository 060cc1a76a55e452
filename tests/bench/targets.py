"""What the benchmark is to show, and whether it does."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench import against_peers, models, overhead, overload, telemetry
from tests.bench.measurements import Measurements, Spread, Value, figure, p50, throughput
from tests.bench.models import CEILING, of_dtype
from tests.bench.systems import ALL, DTYPES, ECHO_SERVER, FOUR


@dataclass(frozen=True)
class Target:
    """`measured` None: its section was not measured. A target is met by the median of the rounds."""

    name: str
    limit: float
    is_at_least: bool
    measured: Spread | None
    unit: str = ""

    @property
    def is_met(self) -> bool | None:
        """None where it was not measured."""
        if self.measured is None:
            return None
        return self.measured.median >= self.limit if self.is_at_least else self.measured.median <= self.limit


def check_targets(found: Measurements) -> list[Target]:
    """All of them, in the order of the sections."""
    return [*_overhead(found), *_models(found), *_peers(found), *_overload(found), *_telemetry(found)]


def _overhead(found: Measurements) -> Iterator[Target]:
    section = overhead.SECTION
    for system, callers, limit in ((ALL, 32, 0.55), (FOUR, 32, 0.36), (FOUR, 64, 0.42)):
        ratio = found.ratio(section, system, ECHO_SERVER, callers, throughput)
        yield Target(f"{system}, no model, {callers} callers: throughput to the echo server's", limit, True, ratio)
    for system, limit in ((ALL, 0.8), (FOUR, 2.4)):
        yield Target(f"{system}, no model, 1 caller: p50", limit, False, found.spread(section, system, 1, p50), " ms")


def _models(found: Measurements) -> Iterator[Target]:
    section, callers = models.SECTION, 32
    for dtype in DTYPES:
        for system, limit in ((ALL, 85.0), (FOUR, 75.0)):
            name = of_dtype(system, dtype)
            ratio = _percent(
                found.ratio(section, name, of_dtype(CEILING, dtype), callers, throughput, reference_callers=0)
            )
            yield Target(f"{name}, {callers} callers: throughput of the back end's alone", limit, True, ratio, " %")
    for dtype in DTYPES:
        for system in (ALL, FOUR):
            name = of_dtype(system, dtype)
            padding = found.spread(section, name, callers, figure("padding", 100))
            yield Target(f"{name}, {callers} callers: padding", 10.0, False, padding, " %")


def _peers(found: Measurements) -> Iterator[Target]:
    section, callers = against_peers.SECTION, 32
    for dtype, limit in zip(DTYPES, (2.0, 4.0, 6.0), strict=True):
        best = best_peer(found, callers, throughput, is_high=True)
        ratio = found.ratio(section, of_dtype(ALL, dtype), best, callers, throughput) if best else None
        yield Target(
            f"{of_dtype(ALL, dtype)}, {callers} callers: throughput to the best peer's ({best or 'not measured'})",
            limit,
            True,
            ratio,
        )
    best = best_peer(found, 1, p50, is_high=False)
    for dtype in DTYPES:
        ratio = found.ratio(section, of_dtype(ALL, dtype), best, 1, p50) if best else None
        yield Target(f"{of_dtype(ALL, dtype)}, 1 caller: p50 to {_named(best)}", 1 / 3, False, ratio)


def _telemetry(found: Measurements) -> Iterator[Target]:
    section, callers = telemetry.SECTION, telemetry.CALLERS
    for system in (ALL, FOUR):
        for how, limit in ((telemetry.ONE_PERCENT, 98.0), (telemetry.EVERYTHING, 85.0)):
            ratio = found.ratio(
                section, f"{system}, float32, {how}", f"{system}, float32, {telemetry.OFF}", callers, throughput
            )
            yield Target(
                f"{system}, MiniLM, {how} of requests traced: throughput to that without",
                limit,
                True,
                _percent(ratio),
                " %",
            )
        for callers_covered in telemetry.COVERAGE_CALLERS:
            for kind in telemetry.KINDS:
                name = f"{system}, {kind}, {telemetry.EVERYTHING}"
                covered = found.spread(section, name, callers_covered, figure("covered", 100))
                yield Target(
                    f"{system}, {kind}, {callers_covered} callers: stages, of a request's span",
                    95.0,
                    True,
                    covered,
                    " %",
                )
        complete = found.spread(section, f"{telemetry.LOST}, {system}", callers, figure("complete_traces"))
        yield Target(f"{system}: complete traces of 10,000 requests", 10_000, True, complete)


def _overload(found: Measurements) -> Iterator[Target]:
    for system in (ALL, FOUR):
        for name, share, limit in (
            ("goodput, of capacity", "goodput_of_capacity", 90.0),
            ("computed sequences that were answered in time", "wanted", 98.0),
        ):
            spread = found.spread(overload.SECTION, system, overload.CALLERS, figure(share, 100))
            yield Target(f"{system}, {overload.FACTOR:g} x capacity: {name}", limit, True, spread, " %")


def best_peer(found: Measurements, callers: int, value: Value, *, is_high: bool) -> str | None:
    """The peer, with its settings, of the best median; those that gave errors too, for an error costs them nothing."""
    ours = {of_dtype(ALL, dtype) for dtype in DTYPES}
    medians = {
        system: spread.median
        for system in found.systems(against_peers.SECTION)
        if system not in ours and (spread := found.spread(against_peers.SECTION, system, callers, value))
    }
    return (max if is_high else min)(medians, key=lambda system: medians[system]) if medians else None


def _named(best: str | None) -> str:
    return f"the best peer's ({best})" if best else "the best peer's"


def _percent(spread: Spread | None) -> Spread | None:
    return Spread(spread.median * 100, spread.low * 100, spread.high * 100, spread.rounds) if spread else None
