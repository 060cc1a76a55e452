"""What the caches cost and bring: `make bench-cache`. Writes docs/benchmarks/cache.md and cache.json.

Run: python -m tests.bench.cache [--rounds N] [--seconds S] [--only ways,hit-rates,known,hang,zipf] [--out FOLDER]
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import uvloop

from neuronpipe.bundles.repository import Bundle
from neuronpipe.measure.machine import describe_machine
from tests.bench.cache.page import write_page
from tests.bench.cache.serving import measure_hang, measure_known_texts, measure_zipf
from tests.bench.cache.stage import bundle_for_long_texts, measure_hit_rates, measure_ways
from tests.bench.systems import find_repository
from tests.servers.redis import redis_server

_SECTIONS = ("ways", "hit-rates", "known", "hang", "zipf")


def main() -> None:
    """Measures, and writes the page after every section."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.cache", description="Measures the caches and writes a page."
    )
    parser.add_argument("--rounds", type=int, default=3, help="turns of each system (default: 3)")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn (default: 3)")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=_SECTIONS, help=f"some of {','.join(_SECTIONS)}"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("docs/benchmarks"), help="folder to write to (default: docs/benchmarks)"
    )
    options = parser.parse_args()
    found: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "tests.bench.cache", *sys.argv[1:]]),
        "machine": describe_machine(),
    }
    turns = (options.rounds, options.seconds)
    measure: dict[str, Callable[[], list[dict[str, Any]]]] = {
        "ways": lambda: _stage(measure_ways),
        "hit-rates": lambda: _stage(measure_hit_rates),
        "known": lambda: list(measure_known_texts(*turns)),
        "hang": lambda: list(measure_hang(*turns)),
        "zipf": lambda: list(measure_zipf(*turns)),
    }
    for section in options.only:
        print(section, file=sys.stderr, flush=True)
        found[section] = measure[section]()
        page = write_page(found)
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "cache.json").write_text(json.dumps(found, indent=1) + "\n")
        (options.out / "cache.md").write_text(page)
    print(page)


def _stage(measurement: Callable[[Bundle, str], AsyncIterator[dict[str, Any]]]) -> list[dict[str, Any]]:
    async def collect(folder: str, url: str) -> list[dict[str, Any]]:
        bundle = bundle_for_long_texts(find_repository("fake"), Path(folder))
        return [figures async for figures in measurement(bundle, url)]

    with tempfile.TemporaryDirectory() as folder, redis_server() as redis:
        rows: list[dict[str, Any]] = uvloop.run(collect(folder, redis.url))
        return rows


if __name__ == "__main__":
    main()
