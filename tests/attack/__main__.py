"""Writes docs/attacks.md from the figures in docs/attacks.json, which `make attack` measures: --page prints it."""

import json
import sys

from tests.attack.cases import CASES
from tests.attack.frame import Case
from tests.pages import ROOT

RECORD, PAGE = ROOT / "docs" / "attacks.json", ROOT / "docs" / "attacks.md"
_HEAD = """# Attacks

`make attack` attacks a server over loopback while another tenant calls it 50 times a second. The figures are of that
tenant, without the attack and during it; server, attacker and tenant share two virtual CPUs. In each case:

- The tenant loses no call.
- Its p99 is at most 1.5 times that without the attack, or 30 ms more.
- The server's memory grows by at most 64 MiB and four times the attack's largest request, decompressed.

[Abuse](security.md#abuse) names the limits behind them.

| Attack | Calls lost | p50 | p99 | Longest | Memory |
|---|---:|---:|---:|---:|---:|
"""


def page() -> str:
    """The page."""
    record = json.loads(RECORD.read_text())
    return _HEAD + "".join(_row(case, record[name]) for name, case in CASES.items() if name in record)


def _row(case: Case, figures: dict[str, float]) -> str:
    def pair(name: str) -> str:
        return f"{figures[f'{name}_before_ms']:.0f} → {figures[f'{name}_ms']:.0f} ms"

    lost = sum(dict(figures["failures"]).values()) if figures["failures"] else 0  # type: ignore[call-overload]
    cells = (case.text, f"{lost} of {figures['calls']}", pair("p50"), pair("p99"), f"{figures['max_ms']:.0f} ms")
    return f"| {' | '.join(cells)} | +{figures['grown_mib']:.0f} MiB |\n"


if __name__ == "__main__":
    if sys.argv[1:] == ["--page"]:
        print(page(), end="")
    else:
        PAGE.write_text(page())
