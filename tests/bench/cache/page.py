"""The page of the caches' figures."""

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from neuronpipe.measure.figures import markdown_table
from tests.bench.cache.serving import HANG_CALLERS, ZIPF_TEXTS

Rows = Sequence[dict[str, Any]]


def write_page(found: dict[str, Any]) -> str:
    """The page as Markdown, of the sections that were measured."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield "# Caches: what they cost and what they bring"
    yield ""
    yield (
        f"Written by `{found['command']}` (`make bench-cache`); all figures are in [cache.json](cache.json). "
        "Do not edit."
    )
    yield ""
    yield from _table(("machine", ""), found["machine"].items())
    if rows := found.get("ways"):
        yield "## The tokenize stage"
        yield ""
        yield (
            "In process, Redis on the loopback interface. CPU is this process's alone, a text; times are from "
            "asking to having."
        )
        yield ""
        yield from _ways(rows)
    if rows := found.get("hit-rates"):
        yield "## When asking Redis is worth it"
        yield ""
        yield (
            "Without memory, µs a text, by the share of texts that Redis has: tokenizing all, asking Redis for all "
            "(`always`), and asking "
            "where it is quicker (`auto`, the default). `asked` is how many of the texts `auto` asked for."
        )
        yield ""
        yield from _hit_rates(rows)
    if rows := found.get("known"):
        yield "## Throughput, token cache in memory"
        yield ""
        yield "Fake back end, 32 callers; requests a second, median of the rounds, off and on in the same round."
        yield ""
        yield from _serving(rows, pairs=True)
    if rows := found.get("hang"):
        yield "## Redis hangs"
        yield ""
        yield (
            f"`serve all`, fake back end, {HANG_CALLERS} callers, every text looked up in Redis, which is stopped "
            "(SIGSTOP) in the middle; "
            "milliseconds. `after` begins half a second after that."
        )
        yield ""
        yield from _hang(rows)
    if rows := found.get("zipf"):
        yield "## Repeated traffic"
        yield ""
        yield (
            f"`serve all`, MiniLM float32, 32 callers, texts by Zipf's law (exponent 1) from {ZIPF_TEXTS:,}, caches "
            "empty at the start."
        )
        yield ""
        yield from _serving(rows, pairs=False)


def _ways(rows: Rows) -> Iterator[str]:
    heads = ("tokens", "at a time", "way", "CPU µs", "p50 µs", "p99 µs")
    yield from _table(
        heads,
        (
            (row["tokens"], row["batch"], row["way"], *(_number(row[name]) for name in ("cpu_us", "p50_us", "p99_us")))
            for row in rows
        ),
    )


def _hit_rates(rows: Rows) -> Iterator[str]:
    by_case: dict[tuple[int, int, float], dict[str, Any]] = {}
    for row in rows:
        by_case.setdefault((row["tokens"], row["batch"], row["hit_rate"]), {})[row["way"]] = row
    lines = []
    for (tokens, batch, rate), ways in by_case.items():
        outcomes = ways["auto"]["outcomes"]
        asked = 1 - outcomes.get("BYPASS", 0) / sum(outcomes.values())
        times = [ways[way]["elapsed_us"] for way in ("off", "always", "auto")]
        lines.append((tokens, batch, f"{rate:.0%}", *map(_number, times), f"{asked:.0%}"))
    yield from _table(("tokens", "at a time", "in Redis", "off", "always", "auto", "asked"), lines)


def _serving(rows: Rows, *, pairs: bool) -> Iterator[str]:
    def median(way: str, system: str, name: str) -> float:
        return statistics.median(float(row[name]) for row in rows if (row["way"], row["system"]) == (way, system))

    def ratio(way: str, reference: str, system: str) -> float:
        rates = {(row["way"], row["round"]): row["throughput_per_s"] for row in rows if row["system"] == system}
        return statistics.median(
            float(rate / rates[reference, number]) for (name, number), rate in rates.items() if name == way
        )

    keys = dict.fromkeys((row["system"], row["way"]) for row in rows)
    lines = []
    for system, way in keys:
        reference = way.replace(", on", ", off") if pairs else rows[0]["way"]
        figures = (median(way, system, name) for name in ("throughput_per_s", "p50_ms", "p99_ms"))
        lines.append((system, way, *(_number(figure) for figure in figures), f"{ratio(way, reference, system):.2f}"))
    yield from _table(("system", "", "a second", "p50 ms", "p99 ms", "ratio"), lines)


def _hang(rows: Rows) -> Iterator[str]:
    heads = ("round", "p99 cache off", "p99 before", "p99 after", "after / off", "worst request", "breaker open after")
    lines = (
        (
            row["round"],
            *(_number(row[name]) for name in ("off_p99_ms", "before_p99_ms", "after_p99_ms")),
            f"{row['after_p99_ms'] / row['off_p99_ms']:.2f}",
            *(_number(row[name]) for name in ("worst_ms", "opened_after_ms")),
        )
        for row in rows
    )
    yield from _table(heads, lines)


def _table(heads: Sequence[str], lines: Any) -> Iterator[str]:
    yield from (*markdown_table(heads, lines), "")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"
