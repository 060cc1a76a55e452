"""Draws the chart of servers as SVG, in the colours of a light or of a dark page: a row for each server, with a bar for
its throughput and a bar for its latency. It is narrow, so that its text can be read on a phone.
"""

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _SCALE = 416, 1.25
_MARGIN, _ROW, _BAR = 10, 20, 14
_STYLE = """
text{font:13px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#24292f}.note{fill:#57606a;font-size:12px}
.title{font-weight:600}.ours{fill:#0969da}.peer{fill:#afb8c1}.axis{stroke:#d0d7de}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.note{fill:#9198a1}.ours{fill:#58a6ff}.peer{fill:#565e67}
.axis{stroke:#30363d}}
"""
# What a screen reader says.
_TITLE = "Texts per second with 32 callers, and p50 with one caller, of each server in each dtype"
# Widths of a character of 13 and of 12 pixels in DejaVu Sans, the widest of the usual fonts.
_CHARACTER, _NOTE_CHARACTER = 7.0, 6.4


@dataclass(frozen=True, slots=True)
class Server:
    """A row: a server's texts per second with many callers, and its p50 with one."""

    name: str
    per_s: float
    p50_ms: float
    is_ours: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """The servers that are compared with each other, and what they have in common."""

    title: str
    remark: str
    servers: Sequence[Server]


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of bars: `length` is the longest bar's."""

    title: str
    remark: str
    left: int
    length: int


_THROUGHPUT = _Column("Texts/s, 32 callers", "more is better", 138, 104)
_LATENCY = _Column("p50 ms, 1 caller", "less is better", 288, 84)


# Where the names of servers end.
_NAMES_END = _THROUGHPUT.left - 6


def chart(groups: Sequence[Group], notes: Sequence[str]) -> str:
    """The chart of the groups, one below the other, with notes at its foot."""
    return "".join(f"{line}\n" for line in _svg(groups, notes))


def rounded(figure: float) -> str:
    """Three digits, as on the pages."""
    return f"{figure:.0f}" if figure >= 100 else f"{figure:.1f}"


def _svg(groups: Sequence[Group], notes: Sequence[str]) -> Iterator[str]:
    lines = [line for note in notes for line in textwrap.wrap(note, int((_WIDTH - 2 * _MARGIN) / _NOTE_CHARACTER))]
    rows = sum(len(group.servers) for group in groups)
    height = 48 + rows * _ROW + len(groups) * 32 + 12 + len(lines) * 17
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH * _SCALE:.0f}" '
        f'height="{height * _SCALE:.0f}" role="img">'
    )
    yield f"<title>{_TITLE}</title>"
    yield f"<style>{_STYLE}</style>"
    most = max(server.per_s for group in groups for server in group.servers)
    longest = max(server.p50_ms for group in groups for server in group.servers)
    for column in (_THROUGHPUT, _LATENCY):
        yield _text(column.left, 18, column.title, "title")
        yield _text(column.left, 34, column.remark, "note")
    y = 44
    for group in groups:
        yield f'<line class="axis" x1="{_MARGIN}" x2="{_WIDTH - _MARGIN}" y1="{y}" y2="{y}"/>'
        yield _text(_MARGIN, y + 20, group.title, "title")
        yield _text(_THROUGHPUT.left, y + 20, group.remark, "note")
        y += 28
        fastest = max(server.per_s for server in group.servers)
        soonest = min(server.p50_ms for server in group.servers)
        for server in group.servers:
            yield _text(_MARGIN, y + 12, server.name, "title" if server.is_ours else "", _NAMES_END)
            yield from _bar(_THROUGHPUT, server.per_s, most, y, server, is_best=server.per_s == fastest)
            yield from _bar(_LATENCY, server.p50_ms, longest, y, server, is_best=server.p50_ms == soonest)
            y += _ROW
        y += 4
    for number, line in enumerate(lines):
        yield _text(_MARGIN, y + 18 + 17 * number, line, "note")
    yield "</svg>"


def _bar(column: _Column, figure: float, largest: float, y: int, server: Server, *, is_best: bool) -> Iterator[str]:
    """A bar with its figure behind it, which is bold if it is the best of its group."""
    length = column.length * figure / largest
    kind = "ours" if server.is_ours else "peer"
    yield f'<rect class="{kind}" x="{column.left}" y="{y}" width="{length:.1f}" height="{_BAR}" rx="2"/>'
    yield _text(column.left + length + 5, y + 12, rounded(figure), "title" if is_best else "")


def _text(x: float, y: float, text: str, kind: str, end: float = _WIDTH) -> str:
    """A line of text; one that would go beyond `end` is squeezed."""
    width = len(text) * (_NOTE_CHARACTER if kind == "note" else _CHARACTER)
    attributes = f' class="{kind}"' if kind else ""
    if x + width > end:
        attributes += f' textLength="{end - x:.5g}" lengthAdjust="spacingAndGlyphs"'
    return f'<text{attributes} x="{x:.5g}" y="{y}">{escape(text)}</text>'
