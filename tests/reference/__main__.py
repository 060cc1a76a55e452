"""`python -m tests.reference`: see the package."""

import difflib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.reference import api, cli, configuration, errors

_FOLDER = Path(__file__).parents[2] / "docs" / "reference"
_PAGES: Mapping[str, Callable[[], str]] = {
    "api.md": api.page,
    "cli.md": cli.page,
    "configuration.md": configuration.page,
    "errors.md": errors.page,
}


def _check() -> None:
    """Ends the process with what differs, where something does."""
    different: list[str] = []
    for name, page in _PAGES.items():
        file = _FOLDER / name
        before = file.read_text(encoding="utf-8") if file.is_file() else ""
        lines, right = before.splitlines(), page().splitlines()
        different += difflib.unified_diff(lines, right, str(file), "what the code says", lineterm="", n=0)
    if different:
        sys.exit("\n".join([*different, "docs/reference is not what the code says; run: make fix-docs"]))


def _write() -> None:
    _FOLDER.mkdir(exist_ok=True)
    for name, page in _PAGES.items():
        (_FOLDER / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        _check()
    else:
        _write()
