"""The Markdown pages of this repository: README.md and its neighbours, and docs/."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
_MARK = re.compile(r"\s*<!-- not run here: (.+?) -->\s*", re.DOTALL)
_RECORDED = re.compile(r"\s*<!-- recorded: (\w+) -->\s*")
_OTHER_MODEL = re.compile(r"\s*<!-- output of another model: .+? -->\s*", re.DOTALL)
_ENVIRONMENT = re.compile(r"\s*<!-- run in (\.venv-[\w-]+) -->\s*")
_HTML_COMMENT = re.compile(r"\s*<!--.*?-->\s*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block of a page. The comment right before it may say why it is not run (`reason`), or in which virtual
    environment it is (`environment`), or in which step recordings.py writes its output (`recorded`); all are empty
    without one. `of_another_model`: it says that the output is of a model that no test has.
    """

    page: Path
    line: int
    language: str
    content: str
    reason: str
    environment: str = ""
    recorded: str = ""
    of_another_model: bool = False

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True, slots=True)
class Link:
    """A link or an image of a page."""

    page: Path
    line: int
    target: str


def all_pages() -> list[Path]:
    """The pages, sorted."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def fences(page: Path) -> Iterator[Fence]:
    """The fenced blocks of a page, in their order."""
    reason = environment = recorded = ""
    is_other = False
    # A table begins as a paragraph does, and what stands within the blocks does not matter: both take most of the time.
    for token in MarkdownIt("commonmark").disable("inline").parse(page.read_text(encoding="utf-8")):
        if token.type == "html_block":
            if mark := _MARK.fullmatch(token.content):
                reason = mark[1]
            elif mark := _ENVIRONMENT.fullmatch(token.content):
                environment = mark[1]
            elif mark := _RECORDED.fullmatch(token.content):
                recorded, reason = mark[1], "test_recordings.py runs it"
            elif _OTHER_MODEL.fullmatch(token.content):
                is_other = True
            elif not _HTML_COMMENT.fullmatch(token.content):
                reason = environment = recorded = ""
                is_other = False
        elif token.type == "fence":
            assert token.map
            place = page, token.map[0] + 1
            yield Fence(*place, token.info.strip(), token.content, reason, environment, recorded, is_other)
            reason = environment = recorded = ""
            is_other = False
        elif token.nesting >= 0:  # a block that begins, or is complete
            reason = environment = recorded = ""
            is_other = False


def links(page: Path) -> Iterator[Link]:
    """The links and images of a page."""
    for token in blocks(page):
        for child in token.children or ():
            target = child.attrs.get("href" if child.type == "link_open" else "src")
            if target is not None and token.map:
                yield Link(page, token.map[0] + 1, str(target))


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as GitHub makes them; mkdocs.yml has the same rule for the site."""
    found: list[str] = []
    for begin, heading in pairwise(blocks(page)):
        if begin.type == "heading_open":
            title = "".join(child.content for child in heading.children or () if child.type in ("text", "code_inline"))
            anchor = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
            before = sum(re.fullmatch(rf"{re.escape(anchor)}(-\d+)?", earlier) is not None for earlier in found)
            found.append(f"{anchor}-{before}" if anchor in found else anchor)
    return frozenset(found)


def blocks(page: Path) -> list[Token]:
    """The blocks of a page, as tokens of markdown-it."""
    return MarkdownIt("commonmark").enable("table").parse(page.read_text(encoding="utf-8"))
