"""The reading list of docs/architecture.md: the main path is there, and can be read in an hour."""

import re
from pathlib import Path

_DOCS = Path(__file__).parents[2] / "docs"
_MAX_LINES = 1600


def _section() -> str:
    page = (_DOCS / "architecture.md").read_text(encoding="utf-8")
    return page.partition("## Read the code in an hour")[2].partition("\n## ")[0]


def _files(markdown: str) -> list[Path]:
    return [_DOCS / link for link in re.findall(r"\]\(([^)#]+)\)", markdown)]


def test_every_file_of_the_reading_list_is_there() -> None:
    files = _files(_section())
    assert files
    assert [str(file) for file in files if not file.exists()] == []


def test_the_main_path_has_at_most_sixteen_hundred_lines() -> None:
    main_path = [file for file in _files(_section().partition("Beside it")[0]) if file.suffix == ".py"]
    assert len(main_path) > 10
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in main_path) <= _MAX_LINES
