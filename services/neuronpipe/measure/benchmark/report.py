"""The report of a run: one page in HTML that needs nothing else, Markdown with its plots beside it, CSV and JSON."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.advice import UTILIZATION, advice_rows, advise
from neuronpipe.measure.benchmark.plots import draw_plots
from neuronpipe.measure.benchmark.results import Results, results_csv
from neuronpipe.measure.benchmark.tables import Costs, Table, cells_table, comparison_tables, costs_table, missing_table

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
