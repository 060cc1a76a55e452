"""docs/telemetry.md, from the names in core/names.py; and what else names metrics: the dashboard, alerts, manifests,
pages and the console.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from neuronpipe.core.names import Attributes, Events, Instrument, Name, Spans, instruments
from neuronpipe.platform.telemetry.prometheus import prometheus_name, series_names
from tests.documentation.pages import ROOT, all_pages
from tests.reference.markdown import NOTE


def names_in(group: type) -> list[Name]:
    """The names of a group, in order."""
    return [value for value in vars(group).values() if isinstance(value, Name)]


_GROUPS = {"Spans": Spans, "Attributes": Attributes, "Events": Events}
_SERIES = {name: instrument for instrument in instruments() for name in series_names(instrument)}
_LABELS = {label.replace(".", "_") for instrument in instruments() for label in instrument.labels}
# Of the scraper, and of a histogram's buckets.
_OTHER_LABELS = {"job", "instance", "le"}
_NAMES = {str(name) for group in _GROUPS.values() for name in names_in(group)} | {
    instrument.name for instrument in instruments()
}
# The first words of names, which tell them from packages.
_FIRST = "|".join(sorted({name.split(".")[1] for name in _NAMES if name.startswith("neuronpipe.")}))
# Series that rules of Prometheus on this page derive from ours.
_DERIVED = re.compile(r"as: \"?(\w+)")
_DERIVING = ROOT / "docs" / "autoscaling.md"


def page() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Names in traces and metrics"
    yield ""
    yield NOTE.format("`core/names.py`")
    yield ""
    yield "How to use them: [observability](observability.md), [tracing](tracing.md)."
    for title, group in _GROUPS.items():
        yield from ("", f"## {title}", "", "| name | what it is |", "|---|---|")
        for name in names_in(group):
            yield f"| `{name}` | {name.text} |"
    yield from ("", "## Metrics", "", "For each metric: the OTLP name and the Prometheus series.", "")
    yield from ("| name | kind | unit | labels | what it is | series |", "|---|---|---|---|---|---|")
    yield from map(_row, instruments())


def queries() -> Mapping[str, str]:
    """Every query of docs/grafana.json and docs/alerts.yaml, by where it stands."""
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    found = {f"{panel['title']} {target['refId']}": target["expr"] for panel in panels for target in panel["targets"]}
    groups = yaml.safe_load((ROOT / "docs" / "alerts.yaml").read_text())["groups"]
    return found | {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def faults() -> Iterator[str]:
    """What is named and not declared, faults of queries, and metrics that no query shows."""
    for where, query in queries().items():
        yield from (f"docs: {where}: {fault}" for fault in faults_of_query(query))
    shown = " ".join(queries().values())
    for instrument in instruments():
        if not re.search(rf"\b{prometheus_name(instrument)}(_total|_bucket|_count|_sum)?\b", shown):
            yield f"docs: {instrument.name} is neither in grafana.json nor in alerts.yaml"
    derived = set(_DERIVED.findall(_DERIVING.read_text()))
    known = {*_SERIES, *_LABELS, *derived, *map(prometheus_name, instruments())}
    for file in _files():
        text = file.read_text(errors="replace")
        unknown = [name for name in re.findall(r"\bneuronpipe_[a-z]\w*\w(?!\w*\*)", text) if name not in known]
        quote = "`" if file.suffix == ".md" else '"'
        words = re.findall(rf"{quote}(neuronpipe\.(?:{_FIRST})\.[a-z_.]+){quote}", text)
        unknown += [name for name in words if name not in _NAMES]
        yield from (
            f"{file.relative_to(ROOT)}: {name} is not declared in core/names.py" for name in dict.fromkeys(unknown)
        )


def faults_of_query(query: str) -> Iterator[str]:
    """Series that are not declared, and labels that none of the query's series has."""
    groups = re.findall(r"(?:by|ignoring|on) \(([^)]*)\)", query)
    labels = {label for group in groups for label in re.split(r", *", group)}
    labels |= set(re.findall(r"[{,] *(\w+) *(?:=~|!=|!~|=)", query))
    names = set(re.findall(r"\bneuronpipe_\w+", query)) - labels
    yield from (f"{name} is no series" for name in sorted(names - _SERIES.keys()))
    of_series = {label.replace(".", "_") for name in names & _SERIES.keys() for label in _SERIES[name].labels}
    yield from (f"{label} is no label of its series" for label in sorted(labels - of_series - _OTHER_LABELS))
    if not names and "up{job" not in query:  # the series of Prometheus itself
        yield "names no series"


def _files() -> Iterator[Path]:
    yield from (page for page in all_pages() if "decisions" not in page.parts and page.name != "CHANGELOG.md")
    for folder in ("deploy", "docker"):
        yield from (ROOT / folder).rglob("*.yaml")
    yield from (ROOT / "services/neuronpipe/doors/http/console/static").glob("*.js")


def _row(instrument: Instrument) -> str:
    labels = ", ".join(f"`{label}`" for label in instrument.labels)
    series = ", ".join(f"`{name}`" for name in series_names(instrument))
    return f"| `{instrument.name}` | {instrument.kind} | {instrument.unit} | {labels} | {instrument.text} | {series} |"
