"""Finds links that lead nowhere: `python -m tests.links`. Links to other hosts are not followed.

Besides the links of pages, it reads sources: help texts and comments name files of docs/.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.documentation.pages import ROOT, Link, all_pages, anchors, links

_FOLDERS = ("services", "tests", "demo", "docker", "deploy")
_TYPES = (".py", ".proto", ".yaml", ".mk", "")
_NOT_OURS = {"node_modules", "__pycache__"}
_MENTION = re.compile(r"(?<![\w/.])docs/[\w./-]*\w")
_OTHER_HOST = re.compile(r"[a-z]+:", re.IGNORECASE)


def dead_links(pages: Sequence[Path]) -> Iterator[str]:
    """The links of pages to files or headings that are not there, each with its place."""
    for link in (link for page in pages for link in links(page)):
        if not _OTHER_HOST.match(link.target) and not _leads_somewhere(link):
            yield f"{link.page.relative_to(ROOT)}:{link.line}: {link.target}"


def _leads_somewhere(link: Link) -> bool:
    path, _, anchor = link.target.partition("#")
    target = (link.page.parent / path).resolve() if path else link.page
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or target.suffix != ".md" or anchor in anchors(target)


def dead_mentions(files: Sequence[Path]) -> Iterator[str]:
    """The files of docs/ that sources name and that are not there; `docs/decisions/0011` is the one that begins so."""
    for file in files:
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            for name in _MENTION.findall(line):
                if not (ROOT / name).exists() and not list(ROOT.glob(f"{name}*")):
                    yield f"{file.relative_to(ROOT)}:{number}: {name}"


def sources() -> Sequence[Path]:
    """The files that may name files of docs/."""
    found = [file for folder in _FOLDERS for file in sorted((ROOT / folder).rglob("*")) if file.suffix in _TYPES]
    ours = [file for file in found if file.is_file() and not _NOT_OURS & set(file.parts)]
    return [ROOT / "Makefile", ROOT / "mkdocs.yml", *ours]


if __name__ == "__main__":
    if dead := [*dead_links(all_pages()), *dead_mentions(sources())]:
        sys.exit("\n".join(["these lead nowhere:", *dead]))
