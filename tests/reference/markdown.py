"""Tables and text of the reference pages."""

import re
from collections.abc import Iterator, Sequence

from tests.documentation.pages import ROOT

NOTE = "Made from {} by `make fix-docs`; do not edit."


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a table, with an empty one before it. Cells are Markdown, but for `|`."""
    yield from ("", f"| {' | '.join(head)} |", "|---" * len(head) + "|")
    for row in rows:
        cells = [cell.replace("|", "\\|") for cell in row]
        yield f"| {' | '.join(cells)} |"


def text(plain: str) -> str:
    """Text on one line, in which nothing but `code` is Markdown or HTML."""
    parts = re.split(r"(`[^`]+`)", " ".join(plain.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([<*\[\]])", _escape, part) for part in parts)


def _escape(found: re.Match[str]) -> str:
    return "&lt;" if found[0] == "<" else f"\\{found[0]}"


def code(word: object) -> str:
    """The word as code, or nothing for nothing."""
    return f"`{word}`" if str(word) else ""


def section_link(place: str) -> str:
    """A link to a page of docs/, or to one of its sections, with its heading."""
    page, _, anchor = place.partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    # As GitHub makes anchors; tests.links finds those that lead nowhere.
    named = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-"): heading for heading in headings}
    return f"[{named.get(anchor, anchor) if anchor else headings[0]}](../{place})"
