"""Writes docs/telemetry.md from the names in core/names.py: `python -m tests.contract.telemetry_page`."""

import sys
from collections.abc import Iterator

from neuronpipe.core.names import Attributes, Events, Instrument, Spans, instruments, names_in
from neuronpipe.platform.telemetry.prometheus import series_names

_GROUPS = {"Spans": Spans, "Attributes": Attributes, "Events": Events}


def document() -> str:
    """The page."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield "# Names in traces and metrics"
    yield ""
    yield "Made from `core/names.py` by `make fix-telemetry`; do not edit."
    yield "How to use them: [observability](observability.md), [tracing](tracing.md)."
    for title, group in _GROUPS.items():
        yield from ("", f"## {title}", "", "| name | what it is |", "|---|---|")
        for name in names_in(group):
            yield f"| `{name}` | {name.text} |"
    yield from ("", "## Metrics", "", "Of each, its name in OTLP, and its series on the Prometheus port.", "")
    yield from ("| name | kind | unit | labels | what it is | series |", "|---|---|---|---|---|---|")
    yield from map(_row, instruments())


def _row(instrument: Instrument) -> str:
    labels = ", ".join(f"`{label}`" for label in instrument.labels)
    series = ", ".join(f"`{name}`" for name in series_names(instrument))
    return f"| `{instrument.name}` | {instrument.kind} | {instrument.unit} | {labels} | {instrument.text} | {series} |"


if __name__ == "__main__":
    sys.stdout.write(document())
