"""The report of a run: one page in HTML that needs nothing else, Markdown with its plots beside it, CSV and JSON.

Plots are SVG, drawn by matplotlib. Text and axes have the page's colour, so that they suit light and dark pages.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.advice import UTILIZATION, advice_rows, advise
from neuronpipe.measure.benchmark.matrix import LATENCY
from neuronpipe.measure.benchmark.results import CellResult, Results, results_csv
from neuronpipe.measure.benchmark.tables import Costs, Table, cells_table, comparison_tables, costs_table, missing_table

# Replaced by the page's own colour; used for nothing else.
_INK = "#010203"
_LINES = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d755d", "#72b7b2", "#eeca3b")
_STYLE = "<style>svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#e4e4e4}}</style>"

_DASHES = ("-", "--", ":", "-.")

# A line: its name, and its points.
Lines = Mapping[str, Sequence[tuple[float, float]]]


def draw_plots(results: Results) -> dict[str, str]:
    """SVG by file name, of those that there are points for."""
    alone = [one for one in results.measured if one.cell.mode == LATENCY]
    wanted: dict[str, tuple[Lines, tuple[str, str], bool]] = {
        "latency-by-length.svg": (
            _lines([one for one in alone if one.cell.batch == 1 and one.cell.length], _length, _p95),
            ("tokens", "p95 latency, ms"),
            True,
        ),
        "throughput-by-batch.svg": (
            _lines(results.at_base_length, _batch, _throughput),
            ("batch", "inputs a second"),
            True,
        ),
        "latency-throughput.svg": (
            _lines(results.at_base_length, _throughput, _p95, by=_batch),
            ("inputs a second, a point for each batch", "p95 latency, ms"),
            False,
        ),
    }
    drawn = {name: _draw(*one) for name, one in wanted.items() if any(len(points) > 1 for points in one[0].values())}
    if single := [one for one in results.at_base_length if one.cell.mode == LATENCY and one.cell.batch == 1]:
        drawn["parts.svg"] = _draw_parts(single)
    return drawn


def _length(one: CellResult) -> float:
    return one.cell.length


def _batch(one: CellResult) -> float:
    return one.cell.batch


def _throughput(one: CellResult) -> float:
    return one.throughput_per_s


def _p95(one: CellResult) -> float:
    return one.percentile_ms(95)


def _lines(
    cells: Sequence[CellResult],
    x: Callable[[CellResult], float],
    y: Callable[[CellResult], float],
    by: Callable[[CellResult], float] | None = None,
) -> Lines:
    """A line for each variant and mode, with its points in the order of `by`."""
    found: dict[str, list[CellResult]] = {}
    for one in cells:
        found.setdefault(_name(one), []).append(one)
    return {name: [(x(one), y(one)) for one in sorted(line, key=by or x)] for name, line in found.items()}


def _name(one: CellResult) -> str:
    variant = one.cell.variant
    cores = "" if one.cell.mode == LATENCY else f", {variant.cores} cores"
    return f"{variant.model}, {variant.dtype}{cores}"


def _draw(lines: Lines, labels: tuple[str, str], has_powers: bool) -> str:
    """Both axes are logarithmic. `has_powers`: of two, on the axis of x."""
    from matplotlib import ticker

    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8.5, 4.4))
    # A colour for each model, a dash for each of its variants.
    models = list(dict.fromkeys(name.partition(",")[0] for name in lines))
    variants = list(dict.fromkeys(name.partition(",")[2] for name in lines))
    for name, points in lines.items():
        model, _, variant = name.partition(",")
        marker, style = "o" if len(points) > 1 else "s", _DASHES[variants.index(variant) % len(_DASHES)]
        colour = _LINES[models.index(model) % len(_LINES)]
        xs, ys = zip(*points, strict=True)
        axes.plot(xs, ys, marker=marker, markersize=4, linestyle=style, color=colour, label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=10)
    for axis in (axes.yaxis,) if has_powers else (axes.xaxis, axes.yaxis):  # ticks also within a power of ten
        axis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.grid(visible=True, which="major", alpha=0.25)
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return _svg(figure)


def _draw_parts(cells: Sequence[CellResult]) -> str:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8.5, 0.8 + 0.36 * len(cells)))
    names = [_name(one) for one in cells]
    left = [0.0] * len(cells)
    for number, (title, field) in enumerate(
        (("pre-process", "preprocess_ms"), ("prediction", "predict_ms"), ("post-process", "postprocess_ms"))
    ):
        widths = [100 * getattr(one, field) / one.mean_ms for one in cells]
        axes.barh(names, widths, left=left, color=_LINES[(1, 2, 4)[number]], label=title)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="% of the mean latency", xlim=(0, 100))
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    return _svg(figure)


def _pyplot() -> Any:
    """matplotlib, with ink in place of black. Raises ModuleNotFoundError where it is not installed."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "neuronpipe", "svg.fonttype": "none", "font.size": 9}
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    mpl.rcParams |= dict.fromkeys(inked, _INK)
    from matplotlib import pyplot

    return pyplot


def _svg(figure: Any) -> str:
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    _pyplot().close(figure)
    drawn = file.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(_INK, "currentColor")
    return re.sub(r"(<svg[^>]*>)", lambda found: found.group(1) + _STYLE, drawn, count=1)


_PLOTS = {
    "latency-by-length.svg": "Latency by length, batch 1",
    "throughput-by-batch.svg": "Throughput by batch, at the base length",
    "latency-throughput.svg": "Latency against throughput, at the base length",
    "parts.svg": "Where the time goes, batch 1, at the base length",
}
# Shares of the CPUs' time, on average over the cells, above which a report warns.
_MAX_STEAL, _MAX_OTHERS = 0.02, 0.05
_CSS = (
    ":root{color-scheme:light dark;--paper:#fff;--ink:#222;--rule:#ddd;--soft:#f5f5f5;--warn:#fff3cd;--theirs:#eef3fa}"
    "@media(prefers-color-scheme:dark){:root{--paper:#15171a;--ink:#e4e4e4;--rule:#3a3f45;--soft:#1e2126;"
    "--warn:#4a3c10;--theirs:#1b2638}}"
    "body{font:15px/1.5 system-ui,sans-serif;margin:0 auto;padding:1.5em;max-width:88em;color:var(--ink);"
    "background:var(--paper)}"
    ".wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;font-variant-numeric:tabular-nums}"
    "th,td{padding:3px 8px;border-bottom:1px solid var(--rule);text-align:left;vertical-align:top;"
    "white-space:nowrap}th,td:last-child{white-space:normal}"
    "th{background:var(--soft)}.theirs table{background:var(--theirs)}"
    ".warning{background:var(--warn);padding:.6em 1em}svg{max-width:100%;height:auto}code{font-size:90%}"
)


@dataclass(frozen=True, slots=True)
class Goal:
    """What `--p95-ms` and `--rate` ask."""

    p95_ms: float
    rate_per_s: float


@dataclass(frozen=True, slots=True)
class _Page:
    """What both forms of the report show, in order."""

    facts: Sequence[str]
    warnings: Sequence[str]
    tables: Sequence[Table]
    plots: Mapping[str, str]


def write_report(results: Results, costs: Costs, folder: Path, goal: Goal | None = None) -> Path:
    """Writes report.html, README.md with its plots, and results.csv beside results.json; returns the HTML's path.

    Raises SetupError where the folder cannot be written to.
    """
    page = _page(results, costs, goal)
    files = {
        "report.html": _html(page),
        "README.md": _markdown(page),
        "results.csv": results_csv(results),
        **page.plots,
    }
    try:
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{folder}: cannot be written: {error.strerror}; see --out") from error
    return folder / "report.html"


def warnings_of(results: Results) -> Iterator[str]:
    """What makes the figures worth less."""
    if not results.is_complete:
        yield f"The run is not complete: {len(results.cells)} of {results.planned} cells."
    if measured := results.measured:
        steal, others = _taken(results)
        if steal > _MAX_STEAL:
            yield f"The hypervisor took {steal:.1%} of the CPUs' time for other machines (steal)."
        if others > _MAX_OTHERS:
            yield f"Other processes took {others:.1%} of the CPUs' time: the machine was busy."
        precision = float(results.effort["precision"])
        wide = sum(one.p95_interval.relative_width > precision for one in measured)
        if wide:
            yield (
                f"{wide} of {len(measured)} cells reached their time before their p95 was known to ± {precision:.0%}; "
                "their intervals are in the table of all cells."
            )


def _taken(results: Results) -> tuple[float, float]:
    """Shares of the CPUs' time, on average over the cells: of other machines, and of other processes."""
    shares = [(one.steal, one.others) for one in results.measured] or [(0.0, 0.0)]
    steal, others = (sum(share) / len(shares) for share in zip(*shares, strict=True))
    return steal, others


def _page(results: Results, costs: Costs, goal: Goal | None) -> _Page:
    effort = results.effort
    random = [name for name, model in results.models.items() if model["weights"] == "random"]
    facts = [
        f"Written by `{results.command}` in {results.minutes:.0f} minutes: {len(results.measured)} cells measured of "
        f"{results.planned}, each through the whole pipeline in one process (pre-process, prediction, post-process).",
        f"A cell has {effort['warm_up_calls']:g} warm-up calls, then calls until there are {effort['calls']:g} and the "
        f"bootstrap interval of 95 % of its p95 is within ± {effort['precision']:.0%}, or {effort['seconds']:g} s "
        f"have passed with {effort['least_calls']:g} calls at least. Throughput is that of callers who wait for their "
        "answer.",
    ]
    if random:
        facts.append(f"Random weights of the published sizes, which take as long as trained ones: {', '.join(random)}.")
    tables = list(comparison_tables(results, costs))
    tables.append(costs_table(results, costs))
    if goal:
        tables.insert(0, _goal_table(results, costs, goal))
    tables += [cells_table(results), missing_table(results)]
    steal, others = _taken(results)
    busy = ("CPU time taken while measuring", f"{steal:.1%} by the hypervisor (steal), {others:.1%} by other processes")
    tables.append(Table("Machine", "What the figures depend on.", ("", ""), [*results.machine.items(), busy]))
    return _Page(facts, list(warnings_of(results)), tables, draw_plots(results))


def _goal_table(results: Results, costs: Costs, goal: Goal) -> Table:
    head, *rows = advice_rows(advise(results, goal.p95_ms, goal.rate_per_s, costs.instances))
    return Table(
        f"The cheapest way to {goal.rate_per_s:g} inputs of {results.base_length} tokens a second with p95 of at "
        f"most {goal.p95_ms:g} ms",
        f"Replicas at {UTILIZATION:.0%} of their measured throughput, so that those who come at random times seldom "
        "queue. A batch above 1 needs callers who send as many at once.",
        head,
        rows,
    )


def _markdown(page: _Page) -> str:
    lines = ["# Models: latency, throughput and cost", ""]
    for fact in page.facts:
        lines += [fact, ""]
    lines += [f"**Warning:** {warning}\n" for warning in page.warnings]
    for name in page.plots:
        lines += [f"## {_PLOTS[name]}", "", f"![{_PLOTS[name]}]({name})", ""]
    for table in page.tables:
        lines += [f"## {table.title}", "", table.note, ""]
        if not table.rows:
            lines += ["None.", ""]
            continue
        lines += [_row(table.columns), _row(["---"] * len(table.columns)), *map(_row, table.rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def _html(page: _Page) -> str:
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width"><title>neuronpipe benchmark</title>',
        f"<style>{_CSS}</style></head><body><h1>Models: latency, throughput and cost</h1>",
        *(f"<p>{_code(fact)}</p>" for fact in page.facts),
        *(f'<p class="warning">{escape(warning)}</p>' for warning in page.warnings),
        *(f"<h2>{_PLOTS[name]}</h2>{svg}" for name, svg in page.plots.items()),
    ]
    for table in page.tables:
        parts.append(f"<h2>{escape(table.title)}</h2><p>{_code(table.note)}</p>")
        rows = "".join(_cells("td", row) for row in table.rows)
        kind = "wide theirs" if table.is_published else "wide"
        parts.append(
            f'<div class="{kind}"><table>{_cells("th", table.columns)}{rows}</table></div>' if rows else "<p>None.</p>"
        )
    return "\n".join([*parts, "</body></html>"]) + "\n"


def _cells(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _code(text: str) -> str:
    """Escaped, with what is between backticks as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if place % 2 else part for place, part in enumerate(parts))
