"""Plots as SVG, drawn by matplotlib. Text and axes have the page's colour, so that they suit light and dark pages."""

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from neuronpipe.measure.benchmark.matrix import LATENCY
from neuronpipe.measure.benchmark.results import CellResult, Results

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
