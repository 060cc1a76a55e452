"""Writes docs/attacks.md from the figures in docs/attacks.json, which `make attack` measures: --page prints it."""

import json
import sys
from typing import Any

from tests.attack.cases import CASES
from tests.attack.frame import Case, Figures
from tests.documentation.pages import ROOT

RECORD, PAGE = ROOT / "docs" / "attacks.json", ROOT / "docs" / "attacks.md"
_HEAD = """# Attacks

`make attack` attacks a server over loopback while another tenant calls it 50 times a second. The figures are of that
tenant, without the attack and during it; server, attacker and tenant share two virtual CPUs. Figures beyond a limit are
bold:

- The tenant loses no call.
- Its p99 is at most 1.5 times the p99 without the attack, or 30 ms more.
- The server's memory grows by at most 64 MiB (448 MiB where a text has many tokens) and four times the attack's largest
  request, decompressed.

{lost} calls of the tenant were lost in all; the slowest p99 was {slowest:.0f} ms. An operator whose callers are not
trusted plans for such answers while an attack lasts, and limits texts and tenants: [Abuse](security.md#abuse) and
[quotas](security.md#quotas).

| Attack | Calls lost | p50 | p99 | Longest | Memory |
|---|---:|---:|---:|---:|---:|
"""


def page() -> str:
    """The page."""
    record = json.loads(RECORD.read_text())
    figures = [Figures(**record[name]) for name in CASES if name in record]
    lost = sum(sum(one.failures.values()) for one in figures)
    head = _HEAD.format(lost=lost, slowest=max(one.p99_ms for one in figures))
    return head + "".join(_row(case, record[name]) for name, case in CASES.items() if name in record)


def _row(case: Case, record: dict[str, Any]) -> str:
    figures = Figures(**record)
    lost, grown = sum(figures.failures.values()), f"+{figures.grown_mib:.0f} MiB"
    p99 = f"{figures.p99_before_ms:.0f} → {figures.p99_ms:.0f} ms"
    cells = (
        case.text,
        _shown(f"{lost} of {figures.calls}", is_missed=lost > 0),
        f"{figures.p50_before_ms:.0f} → {figures.p50_ms:.0f} ms",
        _shown(p99, is_missed=figures.is_late),
        f"{figures.max_ms:.0f} ms",
        _shown(grown, is_missed=figures.grown_mib > case.limit_mib),
    )
    return f"| {' | '.join(cells)} |\n"


def _shown(text: str, *, is_missed: bool) -> str:
    return f"**{text}**" if is_missed else text


if __name__ == "__main__":
    if sys.argv[1:] == ["--page"]:
        print(page(), end="")
    else:
        PAGE.write_text(page())
