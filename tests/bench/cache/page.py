"""The page of the caches' figures."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from neuronpipe.measure.figures import markdown_table
from tests.bench.cache.serving import HANG_CALLERS, ZIPF_TEXTS
from tests.bench.measurements import ratios

Rows: TypeAlias = Sequence[dict[str, Any]]
_Table: TypeAlias = tuple[Sequence[str], Sequence[Sequence[object]]]


def write_page(found: dict[str, Any]) -> str:
    """The page as Markdown, of the sections that were measured."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield from ("# Caches: what they cost and what they bring", "")
    yield (
        f"Written by `{found['command']}` (`make bench-cache`); all figures are in [cache.json](cache.json). "
        "Do not edit."
    )
    yield from ("", *markdown_table(("machine", ""), found["machine"].items()), "")
    for section, (title, text, table) in _SECTIONS.items():
        if rows := found.get(section):
            yield from (f"## {title}", "", text, "", *markdown_table(*table(rows)), "")


def _ways(rows: Rows) -> _Table:
    names = ("cpu_us", "p50_us", "p99_us")
    lines = [(row["tokens"], row["batch"], row["way"], *(_number(row[name]) for name in names)) for row in rows]
    return ("tokens", "at a time", "way", "CPU µs", "p50 µs", "p99 µs"), lines


def _hit_rates(rows: Rows) -> _Table:
    by_case: dict[tuple[int, int, float], dict[str, Any]] = {}
    for row in rows:
        by_case.setdefault((row["tokens"], row["batch"], row["hit_rate"]), {})[row["way"]] = row
    lines = []
    for (tokens, batch, rate), ways in by_case.items():
        outcomes = ways["auto"]["outcomes"]
        asked = 1 - outcomes.get("BYPASS", 0) / sum(outcomes.values())
        times = [ways[way]["elapsed_us"] for way in ("off", "always", "auto")]
        lines.append((tokens, batch, f"{rate:.0%}", *map(_number, times), f"{asked:.0%}"))
    return ("tokens", "at a time", "in Redis", "off", "always", "auto", "asked"), lines


def _known(rows: Rows) -> _Table:
    return _serving(rows, lambda way: way.replace(", on", ", off"))


def _zipf(rows: Rows) -> _Table:
    return _serving(rows, lambda way: rows[0]["way"])


def _serving(rows: Rows, reference_of: Any) -> _Table:
    def values(system: str, way: str, name: str) -> list[float]:
        """By round."""
        return [row[name] for row in rows if (row["system"], row["way"]) == (system, way)]

    lines = []
    for system, way in dict.fromkeys((row["system"], row["way"]) for row in rows):
        found = [values(system, way, name) for name in ("throughput_per_s", "p50_ms", "p99_ms")]
        ratio = statistics.median(ratios(found[0], values(system, reference_of(way), "throughput_per_s")))
        lines.append((system, way, *(_number(statistics.median(each)) for each in found), f"{ratio:.2f}"))
    return ("system", "", "a second", "p50 ms", "p99 ms", "ratio"), lines


def _hang(rows: Rows) -> _Table:
    names = ("off_p99_ms", "before_p99_ms", "after_p99_ms", "worst_ms", "opened_after_ms")
    lines = []
    for row in rows:
        off, before, after, *others = (_number(row[name]) for name in names)
        lines.append((row["round"], off, before, after, f"{row['after_p99_ms'] / row['off_p99_ms']:.2f}", *others))
    heads = ("p99 cache off", "p99 before", "p99 after", "after / off", "worst request", "breaker open after")
    return ("round", *heads), lines


_SECTIONS = {
    "ways": (
        "The tokenize stage",
        "In process, Redis on the loopback interface. CPU is this process's alone, a text; times are from asking to "
        "having.",
        _ways,
    ),
    "hit-rates": (
        "When asking Redis is worth it",
        "Without memory, µs a text, by the share of texts that Redis has: tokenizing all, asking Redis for all "
        "(`always`), and asking where it is quicker (`auto`, the default). `asked` is how many of the texts `auto` "
        "asked for.",
        _hit_rates,
    ),
    "known": (
        "Throughput, token cache in memory",
        "Fake back end, 32 callers; requests a second, median of the rounds, off and on in the same round.",
        _known,
    ),
    "hang": (
        "Redis hangs",
        f"`serve all`, fake back end, {HANG_CALLERS} callers, every text looked up in Redis, which is stopped "
        "(SIGSTOP) in the middle; milliseconds. `after` begins half a second after that.",
        _hang,
    ),
    "zipf": (
        "Repeated traffic",
        f"`serve all`, MiniLM float32, 32 callers, texts by Zipf's law (exponent 1) from {ZIPF_TEXTS:,}, caches "
        "empty at the start.",
        _zipf,
    ),
}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
