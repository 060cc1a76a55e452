"""`python -m tests.reference`: see the package."""

import difflib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from tests.reference import alerts, api, cli, configuration, errors, parts, telemetry

_DOCS = Path(__file__).parents[2] / "docs"


def _with_parts(page: str) -> str:
    return parts.filled(page, (_DOCS / page).read_text(encoding="utf-8"))


_COMPONENT = "../deploy/components/prometheus-operator"
_PAGES: Mapping[str, Callable[[], str]] = {
    f"{_COMPONENT}/dashboard.yaml": alerts.dashboard,
    f"{_COMPONENT}/rules.yaml": alerts.prometheus_rule,
    "reference/alerts.md": alerts.page,
    "reference/api.md": api.page,
    "reference/cli.md": cli.page,
    "reference/configuration.md": configuration.page,
    "reference/errors.md": errors.page,
    "telemetry.md": telemetry.page,
    **{page: partial(_with_parts, page) for page in parts.PARTS},
}


def _check() -> None:
    """Ends the process with what differs, and with what is named and not declared."""
    different: list[str] = []
    for name, page in _PAGES.items():
        file = _DOCS / name
        before = file.read_text(encoding="utf-8") if file.is_file() else ""
        lines, right = before.splitlines(), page().splitlines()
        different += difflib.unified_diff(lines, right, str(file), "what the code says", lineterm="", n=0)
    if different:
        sys.exit("\n".join([*different, "docs/ is not what the code says; run: make fix-docs"]))
    if faults := [*telemetry.faults()]:
        sys.exit("\n".join(faults))


def _write() -> None:
    (_DOCS / "reference").mkdir(exist_ok=True)
    for name, page in _PAGES.items():
        (_DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        _check()
    else:
        _write()
