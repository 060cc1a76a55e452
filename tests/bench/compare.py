"""Two versions of the code in one run, in turns: throughput, CPU time a request and median latency of one to the other.

Ratios are geometric means over the rounds, with their bootstrap intervals of 95 %.

Run: python -m tests.bench.compare BEFORE AFTER [--repository DIR] [--callers 1,32] [--rounds 8] [--seconds 1.5]

BEFORE and AFTER are folders `services` of two checkouts. Both serve the same bundles, which the older must be able to
read. Repeat it with the two exchanged: the system that is started first is a little faster.
"""

import argparse
import math
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from neuronpipe.measure.figures import bootstrap, mean
from tests.bench.load import LoadProcess
from tests.bench.measurements import Measurement
from tests.bench.systems import ALL, FOUR, find_repository, make_request, make_texts, serving_all, serving_four

_VALUES: dict[str, Callable[[Measurement], float]] = {
    "throughput": lambda turn: turn.throughput_per_s,
    "CPU time a request": lambda turn: turn.figures["server_cpu_us"],
    "p50": lambda turn: turn.latencies_ms["p50"],
}


def main() -> None:
    """Prints a line for each system and number of callers."""
    options = _parse()
    repository = options.repository or find_repository("fake")
    texts = make_texts()
    found: dict[tuple[str, int, Path], list[Measurement]] = {}
    with ExitStack() as stack:
        systems = {
            (name, services): stack.enter_context(serving(repository, environment={"PYTHONPATH": str(services)}))
            for name, serving in ((ALL, serving_all), (FOUR, serving_four))
            for services in (options.before, options.after)
        }
        loop = stack.enter_context(LoadProcess.started([make_request(text) for text in texts]))
        for round in range(options.rounds):
            turns = list(systems.items())
            for callers in options.callers:
                for (name, services), system in reversed(turns) if round % 2 else turns:
                    found.setdefault((name, callers, services), []).append(
                        loop.measure(system, callers, options.seconds)
                    )
    for name, callers in dict.fromkeys((name, callers) for name, callers, _ in found):
        before, after = (found[name, callers, services] for services in (options.before, options.after))
        ratios = {
            what: bootstrap([math.log(value(new) / value(old)) for old, new in zip(before, after, strict=True)], mean)
            for what, value in _VALUES.items()
        }
        print(
            f"{name}, {callers} callers, after to before: "
            + ", ".join(
                f"{what} {math.exp(found.value):.3f} ({math.exp(found.low):.3f} to {math.exp(found.high):.3f})"
                for what, found in ratios.items()
            )
        )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.compare", description="Compares two versions in one run."
    )
    parser.add_argument("before", type=Path, help="folder services of the older checkout")
    parser.add_argument("after", type=Path, help="folder services of the newer checkout")
    parser.add_argument("--repository", type=Path, help="bundles with the benchmark's model (default: the fake one)")
    parser.add_argument(
        "--callers", type=lambda text: [int(word) for word in text.split(",")], default=[1, 32], help="default: 1,32"
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of each system (default: 8)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a turn (default: 1.5)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
