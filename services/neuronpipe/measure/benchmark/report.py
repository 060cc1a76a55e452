"""The report of a run: Markdown with its plots, CSV and JSON.

Plots are SVG, drawn by matplotlib. Text and axes have the page's colour, so that they suit light and dark pages.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, TypeAlias

from neuronpipe.core.files import reporting_os_errors
from neuronpipe.measure.benchmark.costs import Costs, Goal, costs_table, goal_table
from neuronpipe.measure.benchmark.matrix import LATENCY
from neuronpipe.measure.benchmark.results import CellResult, Results, results_csv
from neuronpipe.measure.benchmark.tables import cells_table, figure_tables, missing_table
from neuronpipe.measure.figures import Table

PAGE_FILE = "README.md"
# Replaced by the page's own colour; used for nothing else.
_INK = "#010203"
_LINES = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#b279a2", "#9d755d", "#72b7b2", "#eeca3b")
_STYLE = "<style>svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#e4e4e4}}</style>"
_DASHES = ("-", "--", ":", "-.")

# Lines by name, each with its points.
Lines: TypeAlias = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Plot:
    """A file of SVG."""

    file: str
    title: str
    svg: str


# The value of a cell on an axis, and the axis's label.
Axis: TypeAlias = tuple[Callable[[CellResult], float], str]
_LENGTH: Axis = (lambda result: result.cell.length, "tokens")
_BATCH: Axis = (lambda result: result.cell.batch, "batch")
_THROUGHPUT: Axis = (lambda result: result.throughput_per_s, "inputs a second")
_P95: Axis = (lambda result: result.percentile_ms(95), "p95 latency, ms")


def draw_plots(results: Results) -> Iterator[Plot]:
    """Draws the plots for which there are points."""
    alone = [result for result in results.measured if result.cell.mode == LATENCY]
    at_base, single = results.at_base_length, [result for result in alone if result.cell.batch == 1]
    for file, title, cells, (x, x_label), (y, y_label) in (
        (
            "latency-by-length.svg",
            "Latency by length, batch 1",
            [result for result in single if result.cell.length],
            _LENGTH,
            _P95,
        ),
        ("throughput-by-batch.svg", "Throughput by batch, at the base length", at_base, _BATCH, _THROUGHPUT),
        ("latency-throughput.svg", "Latency against throughput, at the base length", at_base, _THROUGHPUT, _P95),
    ):
        lines: dict[str, list[tuple[float, float]]] = {}
        for result in sorted(cells, key=lambda result: (result.cell.length, result.cell.batch)):
            lines.setdefault(_name(result), []).append((x(result), y(result)))
        if any(len(points) > 1 for points in lines.values()):
            yield _plot(file, title, _draw(lines, x_label, y_label, has_powers=x is not _THROUGHPUT[0]))
    if split := [result for result in at_base if result in single]:
        yield _plot("parts.svg", "Where the time goes, batch 1, at the base length", _draw_parts(split))


def _plot(file: str, title: str, drawn: str) -> Plot:
    """Returns a plot that has its title for screen readers, and the page's colours."""
    head = f' role="img">{_STYLE}<title>{escape(title)}</title>'
    return Plot(file, title, re.sub(r"(<svg[^>]*)>", lambda tag: tag.group(1) + head, drawn, count=1))


def _name(result: CellResult) -> str:
    variant = result.cell.variant
    cores = "" if result.cell.mode == LATENCY else f", {variant.cores} cores"
    return f"{variant.model}, {variant.dtype}{cores}"


def _draw(lines: Lines, x_label: str, y_label: str, *, has_powers: bool) -> str:
    """Draws lines on logarithmic axes. `has_powers`: the x axis has ticks at powers of two."""
    from matplotlib import ticker

    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8.5, 4.4))
    # A colour for each model, a dash style for each of its variants.
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
    axes.set(xlabel=x_label, ylabel=y_label)
    axes.grid(visible=True, which="major", alpha=0.25)
    return _svg(figure, axes)


def _draw_parts(cells: Sequence[CellResult]) -> str:
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(figsize=(8.5, 0.8 + 0.36 * len(cells)))
    names, starts = [_name(result) for result in cells], [0.0] * len(cells)
    for title, field, colour in (
        ("pre-process", "preprocess_ms", _LINES[1]),
        ("prediction", "predict_ms", _LINES[2]),
        ("post-process", "postprocess_ms", _LINES[4]),
    ):
        widths = [100 * getattr(result, field) / result.mean_ms for result in cells]
        axes.barh(names, widths, left=starts, color=colour, label=title)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="% of the mean latency", xlim=(0, 100))
    return _svg(figure, axes)


def _pyplot() -> Any:
    """Returns matplotlib's pyplot, with ink instead of black. Raises ModuleNotFoundError if it is not installed."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "neuronpipe", "svg.fonttype": "none", "font.size": 9}
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
    mpl.rcParams |= dict.fromkeys(inked, _INK)
    from matplotlib import pyplot

    return pyplot


def _svg(figure: Any, axes: Any) -> str:
    axes.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    file = io.StringIO()
    figure.savefig(file, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    _pyplot().close(figure)
    drawn = file.getvalue()
    return drawn[drawn.index("<svg") :].replace(_INK, "currentColor")


# Shares of the CPUs' time, on average over the cells, above which a report warns.
_MAX_STEAL, _MAX_OTHERS = 0.02, 0.05


def write_report(results: Results, costs: Costs, folder: Path, goal: Goal | None = None) -> Path:
    """Writes README.md, its plots and results.csv beside results.json, and returns the path of README.md.

    Raises SetupError if the folder cannot be written to.
    """
    plots = list(draw_plots(results))
    page = "\n".join(_markdown(results, costs, goal, plots)).rstrip() + "\n"
    files = {PAGE_FILE: page, "results.csv": results_csv(results), **{plot.file: plot.svg for plot in plots}}
    with reporting_os_errors(f"{folder}: cannot be written", "; see --out"):
        for name, content in files.items():
            (folder / name).write_text(content, encoding="utf-8")
    return folder / PAGE_FILE


def warnings_of(results: Results) -> Iterator[str]:
    """Yields the reasons to distrust the figures."""
    if not results.is_complete:
        yield f"The run is not complete: {len(results.cells)} of {results.planned} cells."
    if measured := results.measured:
        steal, others = _taken(results)
        if steal > _MAX_STEAL:
            yield f"The hypervisor took {steal:.1%} of the CPUs' time for other machines (steal)."
        if others > _MAX_OTHERS:
            yield f"Other processes took {others:.1%} of the CPUs' time: the machine was busy."
        precision = float(results.effort["precision"])
        wide = sum(result.p95_interval.relative_width > precision for result in measured)
        if wide:
            yield (
                f"{wide} of {len(measured)} cells reached their time before their p95 was known to ± {precision:.0%}; "
                "their intervals are in the table of all cells."
            )


def _taken(results: Results) -> tuple[float, float]:
    """Returns the mean shares of the CPUs' time that other machines and other processes took during the cells."""
    shares = [(result.steal, result.others) for result in results.measured] or [(0.0, 0.0)]
    steal, others = (sum(share) / len(shares) for share in zip(*shares, strict=True))
    return steal, others


def _markdown(results: Results, costs: Costs, goal: Goal | None, plots: Sequence[Plot]) -> Iterator[str]:
    effort = results.effort
    yield from ("# Models: latency, throughput and cost", "")
    yield (
        f"Written by `{results.command}` in {results.minutes:.0f} minutes: {len(results.measured)} cells measured of "
        f"{results.planned}, each through the whole pipeline in one process (pre-process, prediction, post-process).\n"
    )
    yield (
        f"A cell has {effort['warm_up_calls']:g} warm-up calls, then calls until there are {effort['calls']:g} and the "
        f"bootstrap interval of 95 % of its p95 is within ± {effort['precision']:.0%}, or {effort['seconds']:g} s "
        f"have passed with {effort['least_calls']:g} calls at least. Throughput is that of callers who wait for their "
        "answer.\n"
    )
    if random := [name for name, model in results.models.items() if model["weights"] == "random"]:
        yield f"Random weights of the published sizes, which take as long as trained ones: {', '.join(random)}.\n"
    yield from (f"**Warning:** {warning}\n" for warning in warnings_of(results))
    for plot in plots:
        yield from (f"## {plot.title}", "", f"![{plot.title}]({plot.file})", "")
    for table in _tables(results, costs, goal):
        yield from table.section()


def _tables(results: Results, costs: Costs, goal: Goal | None) -> Iterator[Table]:
    if goal:
        yield goal_table(results, costs, goal)
    yield from figure_tables(results, costs)
    yield costs_table(results, costs)
    yield cells_table(results)
    yield missing_table(results)
    steal, others = _taken(results)
    taken_row = (
        "CPU time taken while measuring",
        f"{steal:.1%} by the hypervisor (steal), {others:.1%} by other processes",
    )
    yield Table("Machine", "The figures depend on it.", ("", ""), [*results.machine.items(), taken_row])
