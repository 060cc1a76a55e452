"""A day in production, in half an hour: what it found, on a page with plots.

Run: python -m tests.day [--seconds N] [--seed N] [--out FOLDER]
"""

import argparse
import asyncio
import random
import sys
from pathlib import Path

from tests.day.report import write_report
from tests.day.run import live


def main() -> int:
    """The exit code: 1 where something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 20))
    parser.add_argument("--out", type=Path, default=Path("docs"))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    day = asyncio.run(live(given.seconds, given.seed))
    write_report(day, given.out)
    faults = day.faults
    for fault, count in faults.most_common():
        print(f"{count} x {fault}")
    print(f"{len(day.calls)} calls, {len(day.lost)} lost with killed processes, {day.jobs} jobs, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
