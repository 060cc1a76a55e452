"""What the benchmark is to show, and whether it does."""

from collections.abc import Iterator
from dataclasses import dataclass

from tests.bench import against_peers, generation, generation_realistic, models, overhead, overload, telemetry
from tests.bench.against_peers import LIKE_FOR_LIKE
from tests.bench.generation_alone import BART, LLAMA
from tests.bench.generation_peers import CTRANSLATE2, GENAI
from tests.bench.measurements import Measurements, Spread, Value, figure, p50, throughput
from tests.bench.models import CEILING
from tests.bench.systems import ALL, DTYPES, ECHO_SERVER, FOUR, OUR_ECHO, of_dtype, with_tls


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


def _least(name: str, limit: float, measured: Spread | None, unit: str = "") -> Target:
    return Target(name, limit, True, measured, unit)


def _most(name: str, limit: float, measured: Spread | None, unit: str = "") -> Target:
    return Target(name, limit, False, measured, unit)


def check_targets(found: Measurements) -> list[Target]:
    """All of them, in the order of the sections."""
    sections = (_overhead, _models, _like_for_like, _peers, _overload, _telemetry, _generation, _realistic)
    return [target for section in sections for target in section(found)]


def _overhead(found: Measurements) -> Iterator[Target]:
    section, cpu = overhead.SECTION, figure("server_cpu_us")

    def to_echo(system: str, callers: int, value: Value) -> Spread | None:
        return found.ratio(section, system, overhead.reference_of(system), callers, value)

    for system, callers, limit in ((ALL, 32, 1.2), (FOUR, 32, 0.75), (FOUR, 64, 0.85)):
        name = f"{system}, no model, {callers} callers: throughput to that of {ECHO_SERVER}"
        yield _least(name, limit, to_echo(system, callers, throughput))
    for system, limit in ((ALL, 1.2), (FOUR, 3.0)):
        yield _most(f"{system}, no model, 1 caller: p50 to that of {ECHO_SERVER}", limit, to_echo(system, 1, p50))
    for system in (OUR_ECHO, with_tls(OUR_ECHO)):
        name = f"{system}, 32 callers: throughput to that of {overhead.reference_of(system)}"
        yield _least(name, 4.0, to_echo(system, 32, throughput))
    name = f"{system}, 32 callers: CPU time of a call to that of {overhead.reference_of(system)}"
    yield _most(name, 0.25, to_echo(system, 32, cpu))
    refused = found.spread(section, overhead.REFUSING, 32, figure("server_cpu_us", 1e-3))
    yield _most("a call that is refused, 32 callers: CPU time", 0.04, refused, " ms")


def _models(found: Measurements) -> Iterator[Target]:
    section, callers = models.SECTION, 32
    for system, limits in ((ALL, (86.0, 78.0, 72.0)), (FOUR, (82.0, 74.0, 64.0))):
        for dtype, limit in zip(DTYPES, limits, strict=True):
            name = of_dtype(system, dtype)
            ratio = found.ratio(section, name, of_dtype(CEILING, dtype), callers, throughput, reference_callers=0)
            what = f"{name}, {callers} callers: throughput of the back end's alone"
            yield _least(what, limit, _percent(ratio), " %")
    for dtype in DTYPES:
        for name in (of_dtype(system, dtype) for system in (ALL, FOUR)):
            padding = found.spread(section, name, callers, figure("padding", 100))
            yield _most(f"{name}, {callers} callers: padding", 10.0, padding, " %")


def _peers(found: Measurements) -> Iterator[Target]:
    for callers, value, is_high, limits in ((32, throughput, True, (2.3, 4.2, 5.6)), (1, p50, False, (1 / 3,) * 3)):
        best = best_peer(found, callers, value, is_high=is_high)
        for dtype, limit in zip(DTYPES, limits, strict=True):
            ours = of_dtype(ALL, dtype)
            ratio = found.ratio(against_peers.SECTION, ours, best, callers, value) if best else None
            if is_high:
                name = f"{callers} callers: throughput to the best peer's ({best or 'not measured'})"
            else:
                name = f"1 caller: p50 to the best peer's{f' ({best})' if best else ''}"
            yield Target(f"{ours}, {name}", limit, is_high, ratio)


def _like_for_like(found: Measurements) -> Iterator[Target]:
    for callers, value, is_high, limits in ((32, throughput, True, (1.5, 1.6, 1.6)), (1, p50, False, (0.9, 0.8, 0.7))):
        for dtype, limit in zip(DTYPES, limits, strict=True):
            ours = of_dtype(ALL, dtype)
            best = best_peer(found, callers, value, is_high=is_high, section=LIKE_FOR_LIKE, dtype=dtype)
            ratio = found.ratio(LIKE_FOR_LIKE, ours, best, callers, value) if best else None
            what = "throughput" if is_high else "p50"
            name = f"{ours}, {callers} callers: {what} to the best peer's with the same graph"
            yield Target(f"{name} ({best or 'not measured'})", limit, is_high, ratio)


def _telemetry(found: Measurements) -> Iterator[Target]:
    section, callers = telemetry.SECTION, telemetry.CALLERS
    for system in (ALL, FOUR):
        for how, limit in ((telemetry.ONE_PERCENT, 98.0), (telemetry.EVERYTHING, 85.0)):
            off = f"{system}, float32, {telemetry.OFF}"
            ratio = found.ratio(section, f"{system}, float32, {how}", off, callers, throughput)
            name = f"{system}, MiniLM, {how} of requests traced: throughput to that without"
            yield _least(name, limit, _percent(ratio), " %")
        for covered_callers in telemetry.COVERAGE_CALLERS:
            for kind in telemetry.KINDS:
                traced = f"{system}, {kind}, {telemetry.EVERYTHING}"
                covered = found.spread(section, traced, covered_callers, figure("covered", 100))
                name = f"{system}, {kind}, {covered_callers} callers: stages, of a request's span"
                yield _least(name, 95.0, covered, " %")
        complete = found.spread(section, f"{telemetry.LOST}, {system}", callers, figure("complete_traces"))
        yield _least(f"{system}: complete traces of 10,000 requests", 10_000, complete)


_GOODPUT = {ALL: (95.0, 90.0, 80.0, 65.0), overload.PINNED: (97.0,) * 4, FOUR: (90.0,)}


def _overload(found: Measurements) -> Iterator[Target]:
    def share(system: str, factor: int, name: str) -> Spread | None:
        return found.spread(overload.SECTION, overload.name_of(system, factor), overload.CALLERS, figure(name, 100))

    for system, factors in overload.FACTORS.items():
        for factor, limit in zip(factors, _GOODPUT[system], strict=True):
            name = f"{overload.name_of(system, factor)} capacity: goodput, of capacity"
            yield _least(name, limit, share(system, factor, "goodput_of_capacity"), " %")
    for system in (ALL, FOUR):
        name = f"{overload.name_of(system, 2)} capacity: computed sequences that were answered in time"
        yield _least(name, 98.0, share(system, 2, "wanted"), " %")


def _generation(found: Measurements) -> Iterator[Target]:
    section = generation.SECTION

    def ratio(model: str, system: str, reference: str, callers: int) -> Spread | None:
        first, second = generation.of_model(model, system), generation.of_model(model, reference)
        return found.ratio(section, first, second, callers, throughput)

    of_models: tuple[tuple[str, tuple[int, ...], tuple[float, ...]], ...] = (
        (LLAMA, generation.LLAMA_CALLERS, (3.0, 3.5, 2.2)),
        (BART, generation.BART_CALLERS, (4.0, 2.5)),
    )
    for model, every, limits in of_models:
        for callers, limit in zip(every, limits, strict=True):
            name = f"{model}, {FOUR}, {callers} callers: new tokens/s to transformers' generate"
            yield _least(name, limit, ratio(model, FOUR, generation.TRANSFORMERS, callers))
    peers = ((GENAI, (0.80, 0.85, 0.85)), (CTRANSLATE2, (1.0, 1.0)))
    for (model, every, _), (peer, limits) in zip(of_models, peers, strict=True):
        for callers, limit in zip(every, limits, strict=True):
            name = f"{model}, {FOUR}, {callers} callers: new tokens/s to {peer}'s in process"
            yield _least(name, limit, ratio(model, FOUR, peer, callers))
    for callers in generation.LLAMA_CALLERS:
        name = f"{LLAMA}, {FOUR}, {callers} callers: new tokens/s with a schema to those without"
        yield _least(name, 0.9, ratio(LLAMA, generation.WITH_SCHEMA, FOUR, callers))
    callers = generation.LLAMA_CALLERS[-1]
    cost = ratio(LLAMA, generation.ENGINE, FOUR, callers)
    extra = _percent(Spread(cost.median - 1, cost.low - 1, cost.high - 1, cost.rounds)) if cost else None
    yield _most(f"llama, {FOUR}, {callers} callers: time a token beyond the engine's alone", 5.0, extra, " %")
    prefix = found.ratio(section, generation.PREFIX, generation.NO_PREFIX, 1, p50)
    yield _most("llama, shared prefix of 128 tokens: time to first token to that without", 0.3, prefix)
    gaps = found.spread(section, generation.LONG_PROMPTS, generation.GAP_CALLERS, figure("longest_to_median"))
    yield _most("llama, beside prompts of 2,000 tokens: longest gap between tokens to the median", 3.0, gaps)
    goodput = found.spread(section, generation.OVERLOAD, callers, figure("goodput_of_capacity", 100))
    yield _least(f"llama, {generation.FACTOR:g} x capacity: goodput, of capacity", 85.0, goodput, " %")


def _realistic(found: Measurements) -> Iterator[Target]:
    for dtype in generation_realistic.DTYPES:
        model = of_dtype(generation_realistic.QWEN, dtype)
        for callers in generation_realistic.CALLERS:
            ours, theirs = (generation.of_model(model, system) for system in (FOUR, GENAI))
            ratio = found.ratio(generation_realistic.SECTION, ours, theirs, callers, throughput)
            yield _least(f"{model}, {FOUR}, {callers} callers: new tokens/s to {GENAI}'s in process", 0.95, ratio)


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


def _percent(spread: Spread | None) -> Spread | None:
    return Spread(spread.median * 100, spread.low * 100, spread.high * 100, spread.rounds) if spread else None
