"""Four cores that hold BERT-large in one pipeline, in two, or as four replicas, in simulated time.

Run: python -m tests.bench.pipeline_simulated [--requests 100000] [--transfer-ms 0.1]

A core's time for a batch of texts of 128 tokens is from AWS's figures for inf2.xlarge, which has two cores: 2.694 ms
for one text, and 950 texts a second in batches of 4. A pipeline's parts have equal shares of it. What one part hands to
the next is in the next one after --transfer-ms, an assumption. Requests come at random moments (Poisson), and wait in
one queue. A pipeline takes up to four that wait as soon as its first part is free; its parts work on different batches.
"""

import argparse
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

_CORES, _LARGEST_BATCH = 4, 4
# Milliseconds of a core for a batch; between the two, on a line.
_ONE_MS, _FOUR_MS = 2.694, 1000 * 2 * 4 / 950
_CAPACITY_PER_MS = _CORES * _LARGEST_BATCH / _FOUR_MS
_LOADS = (0.1, 0.5, 0.8, 0.95)
_SEED = 20261123


def simulate(requests: int, load: float, parts: int, transfer_ms: float) -> Sequence[float]:
    """The time of each request from its arrival to its answer, in ms. `load`: of what four replicas can do."""
    generator = np.random.default_rng(_SEED)
    arrivals = np.cumsum(generator.exponential(1 / (load * _CAPACITY_PER_MS), requests)).tolist()
    free_ms = [[0.0] * parts for _ in range(_CORES // parts)]
    taken, latencies = 0, []
    while taken < requests:
        pipeline = min(free_ms, key=lambda one: one[0])
        now = max(pipeline[0], arrivals[taken])
        batch = 1
        while batch < _LARGEST_BATCH and taken + batch < requests and arrivals[taken + batch] <= now:
            batch += 1
        part_ms = _batch_ms(batch) / parts
        for part in range(parts):
            now = max(now, pipeline[part]) + part_ms
            pipeline[part] = now
            now += transfer_ms if part < parts - 1 else 0
        latencies += [now - arrival for arrival in arrivals[taken : taken + batch]]
        taken += batch
    return latencies


def _batch_ms(texts: int) -> float:
    return _ONE_MS + (texts - 1) * (_FOUR_MS - _ONE_MS) / (_LARGEST_BATCH - 1)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--transfer-ms", type=float, default=0.1)
    options = parser.parse_args()
    shapes = [(1, 4), (2, 2), (4, 1)]
    print("| Requests /s | " + " | ".join(f"{one} x {parts}: p50, p99 ms" for one, parts in shapes) + " |")
    print("|---|" + "---|" * len(shapes))
    for load in _LOADS:
        cells = []
        for _, parts in shapes:
            latencies = simulate(options.requests, load, parts, options.transfer_ms)
            halves = np.array_split(np.array(latencies), 2)
            # Where requests come faster than they are answered, the second half waits ever longer.
            is_steady = all(other.mean() < 2 * one.mean() for one, other in pairwise(halves))
            p50, p99 = np.percentile(latencies, [50, 99])
            cells.append(f"{p50:.1f}, {p99:.1f}" if is_steady else "grows without end")
        print(f"| {1000 * load * _CAPACITY_PER_MS:.0f} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
