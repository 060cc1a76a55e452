"""CPU time that a request costs a server, by kinds of requests that take turns."""

import argparse
import itertools
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuronpipe.measure.machine import cpu_seconds
from tests.bench.load import send_all
from tests.bench.measurements import ratios, spread_text

_WARM_UP = 200


@dataclass(frozen=True)
class CostOptions:
    """The options of a benchmark of costs."""

    repository: Path
    model: str
    requests: int
    rounds: int
    callers: int


def parse_options(description: str | None) -> CostOptions:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("repository", type=Path)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--callers", type=int, default=8)
    return CostOptions(**vars(parser.parse_args()))


@dataclass(frozen=True)
class Kind:
    """A kind of requests: the process that answers, and the function that sends the request of a number."""

    pid: int
    call: Callable[[int], Awaitable[Any]]


async def measure_costs(kinds: Mapping[str, Kind], options: CostOptions) -> None:
    """Prints the costs of each kind, and their ratios to the first kind in the same rounds."""
    for kind in kinds.values():
        await send_all(kind.call, range(_WARM_UP), callers=options.callers)
    cpu_us: dict[str, list[float]] = {name: [] for name in kinds}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for _, (name, kind) in itertools.product(range(options.rounds), kinds.items()):
        before_s, began_s = cpu_seconds([kind.pid]), time.perf_counter()
        await send_all(kind.call, range(options.requests), callers=options.callers)
        cpu_us[name].append((cpu_seconds([kind.pid]) - before_s) / options.requests * 1e6)
        rates[name].append(options.requests / (time.perf_counter() - began_s))
    first = next(iter(kinds))
    for name, found in cpu_us.items():
        print(
            f"{name}: {spread_text(found, '.0f')} µs of CPU time a request; to {first} "
            f"{spread_text(ratios(found, cpu_us[first]), '.3f')}; {spread_text(rates[name], '.0f')} requests/s"
        )
