"""Draws a terminal as SVG, in the colours of a light or of a dark page: docs/terminal.svg shows the recorded waterfall
of docs/tracing.md, beside the recorded call of README.md.
"""

import re
from collections.abc import Iterator, Sequence
from html import escape

from tests.documentation.pages import ROOT, fences
from tests.documentation.printed import ELLIPSIS
from tests.documentation.recordings import refuse_slow

_COLUMN, _LINE, _MARGIN, _BAR = 7.7, 18, 16, 30
_MAX_COLUMNS = 118
_STYLE = """
text{font:12.8px ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;white-space:pre;fill:#24292f}
.window{fill:#f6f8fa;stroke:#d0d7de}.prompt{fill:#1a7f37;font-weight:bold}.time{fill:#8250df}.bar{fill:#0969da}
.wait{fill:#bf8700}
@media(prefers-color-scheme:dark){
text{fill:#e6edf3}.window{fill:#0d1117;stroke:#30363d}.prompt{fill:#3fb950}.time{fill:#d2a8ff}.bar{fill:#58a6ff}
.wait{fill:#d29922}}
"""
_BARS = re.compile(r"^(\s*\S+\s+\S+ \|)([█ ]+)\|(.*)$")
_TIMES = re.compile(r"\b\d[\d.]* (?:ms|%)")

PICTURE = ROOT / "docs" / "terminal.svg"


def terminal() -> str:
    """The picture of the recorded block. Raises TooSlowError for a request that took too long."""
    page = ROOT / "docs" / "tracing.md"
    call = next(fence for fence in fences(page) if fence.recorded == "call")
    refuse_slow(call.content, "docs/terminal.svg")
    lines = [line for line in call.content.splitlines() if line != ELLIPSIS]
    return "".join(f"{line}\n" for line in _svg(lines))


def _svg(lines: Sequence[str]) -> Iterator[str]:
    longest = max(map(len, lines))
    assert longest <= _MAX_COLUMNS, f"a line of {longest} columns, at most {_MAX_COLUMNS}"
    width, height = round(longest * _COLUMN) + 2 * _MARGIN, len(lines) * _LINE + _BAR + _MARGIN
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img">'
    )
    yield "<title>A terminal: the waterfall of neuronpipe trace, with the time of each stage</title>"
    yield f"<style>{_STYLE}</style>"
    yield f'<rect class="window" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>'
    for number, colour in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        yield f'<circle cx="{_MARGIN + 4 + 18 * number}" cy="16" r="5.5" fill="{colour}"/>'
    for number, line in enumerate(lines):
        yield from _line(line, _BAR + _LINE * (number + 0.75))
    yield "</svg>"


def _line(line: str, y: float) -> Iterator[str]:
    """A line of text; the bars of a waterfall are rectangles, which have no gaps between lines."""
    if drawn := _BARS.match(line):
        bars = drawn[2]
        begin = _MARGIN + (len(drawn[1]) + len(bars) - len(bars.lstrip())) * _COLUMN
        kind = "wait" if ".queue" in line else "bar"
        length = max(1.5, len(bars.strip()) * _COLUMN)
        yield f'<rect class="{kind}" x="{begin:.1f}" y="{y - 11:.1f}" width="{length:.1f}" height="14" rx="2"/>'
        line = f"{drawn[1][:-1]} {' ' * len(bars)} {drawn[3]}"
    shown = escape(line, quote=False)
    if line.startswith("$ "):
        shown = f'<tspan class="prompt">$</tspan>{shown[1:]}'
    else:
        shown = _TIMES.sub(lambda time: f'<tspan class="time">{time[0]}</tspan>', shown)
    if line.strip():
        yield (
            f'<text x="{_MARGIN}" y="{y:.1f}" textLength="{len(line) * _COLUMN:.1f}" lengthAdjust="spacingAndGlyphs" '
            f'xml:space="preserve">{shown}</text>'
        )
