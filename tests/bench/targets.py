"""What the benchmark is to show, and whether it does."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench import against_peers, generation, like_for_like, models, overhead, overload, telemetry
from tests.bench.generation_alone import BART, LLAMA
from tests.bench.generation_peers import CTRANSLATE2, GENAI
from tests.bench.measurements import Measurements, Spread, Value, figure, p50, throughput
from tests.bench.models import CEILING, of_dtype
from tests.bench.systems import ALL, DTYPES, ECHO_SERVER, FOUR, OUR_ECHO, with_tls


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
    return [
        *_overhead(found),
        *_models(found),
        *_like_for_like(found),
        *_peers(found),
        *_overload(found),
        *_telemetry(found),
        *_generation(found),
    ]


def _overhead(found: Measurements) -> Iterator[Target]:
    def to_echo(system: str, callers: int, value: Value) -> Spread | None:
        return found.ratio(overhead.SECTION, system, overhead.reference_of(system), callers, value)

    for system, callers, limit in ((ALL, 32, 1.0), (FOUR, 32, 0.60), (FOUR, 64, 0.70)):
        name = f"{system}, no model, {callers} callers: throughput to that of {ECHO_SERVER}"
        yield Target(name, limit, True, to_echo(system, callers, throughput))
    for system, limit in ((ALL, 1.35), (FOUR, 3.3)):
        name = f"{system}, no model, 1 caller: p50 to that of {ECHO_SERVER}"
        yield Target(name, limit, False, to_echo(system, 1, p50))
    for system in (OUR_ECHO, with_tls(OUR_ECHO)):
        name = f"{system}, 32 callers: throughput to that of {overhead.reference_of(system)}"
        yield Target(name, 4.0, True, to_echo(system, 32, throughput))
    system, cpu = with_tls(OUR_ECHO), figure("server_cpu_us")
    name = f"{system}, 32 callers: CPU time of a call to that of {overhead.reference_of(system)}"
    yield Target(name, 0.25, False, to_echo(system, 32, cpu))
    refused = found.spread(overhead.SECTION, overhead.REFUSING, 32, figure("server_cpu_us", 1e-3))
    yield Target("a call that is refused, 32 callers: CPU time", 0.05, False, refused, " ms")


def _models(found: Measurements) -> Iterator[Target]:
    section, callers = models.SECTION, 32
    for system, limits in ((ALL, (85.0, 75.0, 63.0)), (FOUR, (80.0, 68.0, 57.0))):
        for dtype, limit in zip(DTYPES, limits, strict=True):
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
    for dtype, limit in zip(DTYPES, (2.3, 4.2, 5.6), strict=True):
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


def _like_for_like(found: Measurements) -> Iterator[Target]:
    section = like_for_like.SECTION
    for callers, value, is_high, limits in ((32, throughput, True, (1.8, 2.0, 2.2)), (1, p50, False, (0.6,) * 3)):
        for dtype, limit in zip(DTYPES, limits, strict=True):
            ours = of_dtype(ALL, dtype)
            best = best_peer(found, callers, value, is_high=is_high, section=section, dtype=dtype)
            ratio = found.ratio(section, ours, best, callers, value) if best else None
            what = "throughput" if is_high else "p50"
            name = f"{ours}, {callers} callers: {what} to the best peer's with the same graph"
            yield Target(f"{name} ({best or 'not measured'})", limit, is_high, ratio)


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


_GOODPUT = {
    ALL: (95.0, 90.0, 80.0, 65.0),
    overload.PINNED: (97.0, 97.0, 97.0, 97.0),
    FOUR: (90.0,),
}


def _overload(found: Measurements) -> Iterator[Target]:
    def share(system: str, factor: int, name: str) -> Spread | None:
        return found.spread(overload.SECTION, overload.name_of(system, factor), overload.CALLERS, figure(name, 100))

    for system, factors in overload.FACTORS.items():
        for factor, limit in zip(factors, _GOODPUT[system], strict=True):
            goodput = share(system, factor, "goodput_of_capacity")
            yield Target(
                f"{overload.name_of(system, factor)} capacity: goodput, of capacity", limit, True, goodput, " %"
            )
    for system in (ALL, FOUR):
        name = f"{overload.name_of(system, 2)} capacity: computed sequences that were answered in time"
        yield Target(name, 98.0, True, share(system, 2, "wanted"), " %")


def _generation(found: Measurements) -> Iterator[Target]:
    section = generation.SECTION

    def ratio(model: str, system: str, reference: str, callers: int) -> Spread | None:
        first, second = generation.of_model(model, system), generation.of_model(model, reference)
        return found.ratio(section, first, second, callers, throughput)

    for model, limits in (
        (LLAMA, zip(generation.LLAMA_CALLERS, (3.0, 3.5, 2.2), strict=True)),
        (BART, zip(generation.BART_CALLERS, (4.0, 2.5), strict=True)),
    ):
        for callers, limit in limits:
            name = f"{model}, {FOUR}, {callers} callers: new tokens/s to transformers' generate"
            yield Target(name, limit, True, ratio(model, FOUR, generation.TRANSFORMERS, callers))
    for model, every, peer, limit in (
        (LLAMA, generation.LLAMA_CALLERS, GENAI, 0.90),
        (BART, generation.BART_CALLERS, CTRANSLATE2, 1.0),
    ):
        for callers in every:
            name = f"{model}, {FOUR}, {callers} callers: new tokens/s to {peer}'s in process"
            yield Target(name, limit, True, ratio(model, FOUR, peer, callers))
    for callers in generation.LLAMA_CALLERS:
        name = f"{LLAMA}, {FOUR}, {callers} callers: new tokens/s with a schema to those without"
        yield Target(name, 0.9, True, ratio(LLAMA, generation.WITH_SCHEMA, FOUR, callers))
    callers = generation.LLAMA_CALLERS[-1]
    cost = ratio(LLAMA, generation.ENGINE, FOUR, callers)
    extra = _percent(Spread(cost.median - 1, cost.low - 1, cost.high - 1, cost.rounds)) if cost else None
    yield Target(f"llama, {FOUR}, {callers} callers: time a token beyond the engine's alone", 5.0, False, extra, " %")
    prefix = found.ratio(section, generation.PREFIX, generation.NO_PREFIX, 1, p50)
    yield Target("llama, shared prefix of 128 tokens: time to first token to that without", 0.3, False, prefix)
    gaps = found.spread(section, generation.LONG_PROMPTS, generation.GAP_CALLERS, figure("longest_to_median"))
    yield Target("llama, beside prompts of 2,000 tokens: longest gap between tokens to the median", 4.0, False, gaps)
    goodput = found.spread(section, generation.OVERLOAD, callers, figure("goodput_of_capacity", 100))
    yield Target(f"llama, {generation.FACTOR:g} x capacity: goodput, of capacity", 85.0, True, goodput, " %")


def best_peer(
    found: Measurements,
    callers: int,
    value: Value,
    *,
    is_high: bool,
    section: str = against_peers.SECTION,
    dtype: str = "",
) -> str | None:
    """The peer, with its settings, of the best median; those that gave errors too, for an error costs them nothing.

    `dtype`: that of the peers, where they have several.
    """
    ours = {of_dtype(system, dtype) for system in (ALL, FOUR) for dtype in DTYPES}
    medians = {
        system: spread.median
        for system in found.systems(section)
        if system not in ours and system.endswith(dtype) and (spread := found.spread(section, system, callers, value))
    }
    return (max if is_high else min)(medians, key=lambda system: medians[system]) if medians else None


def _named(best: str | None) -> str:
    return f"the best peer's ({best})" if best else "the best peer's"


def _percent(spread: Spread | None) -> Spread | None:
    return Spread(spread.median * 100, spread.low * 100, spread.high * 100, spread.rounds) if spread else None
