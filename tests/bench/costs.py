"""CPU time that requests cost servers, by kinds of requests that take turns."""

import argparse
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from neuronpipe.measure.machine import cpu_seconds
from tests.bench.load import send_all
from tests.bench.measurements import ratios, spread_text


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
    """A kind of requests: the processes that answer, and the function that sends the request of a number."""

    pids: Sequence[int]
    call: Callable[[int], Awaitable[Any]]


async def measure_costs(
    kinds: Mapping[str, Kind], requests: int, rounds: int, callers: int, unit: str = "request", units: int = 1
) -> None:
    """Prints the CPU time of each kind, its ratio to the first kind in the same rounds, and the time beyond that kind.

    `unit`: the thing whose cost is printed. `units`: their number in a request.
    """
    cpu_us: dict[str, list[float]] = {name: [] for name in kinds}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    for round, (name, kind) in itertools.product(range(rounds + 1), kinds.items()):
        before_s, began_s = cpu_seconds(kind.pids), time.perf_counter()
        await send_all(kind.call, range(requests), callers=callers)
        if round:  # the first one warms up
            cpu_us[name].append((cpu_seconds(kind.pids) - before_s) / (requests * units) * 1e6)
            rates[name].append(requests * units / (time.perf_counter() - began_s))
    first = next(iter(kinds))
    for name, found in cpu_us.items():
        beyond_us = statistics.median(found) - statistics.median(cpu_us[first])
        print(
            f"{name}: {spread_text(found, '.0f')} µs of CPU time a {unit}; to {first} "
            f"{spread_text(ratios(found, cpu_us[first]), '.3f')}, {beyond_us:.0f} µs beyond; "
            f"{spread_text(rates[name], '.0f')} {unit}s/s"
        )
