"""What it costs to cut the pipeline into processes: the same requests to every cut, in turns, with a model that takes
no time. CPU time a request is of all processes of a system; ratios are to `serve all` in the same round.

Run: python -m tests.bench.processes [--repository DIR] [--callers 1,32] [--rounds 8] [--seconds 1.5]
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from demo.processes import ServiceProcess
from tests.bench.closed_loop import ClosedLoop, Loop, System
from tests.bench.systems import NO_CACHE, find_repository, make_request, read_texts

_STAGES = {"tokenizer": "tokenizer", "executor": "neuron-executor", "postprocessor": "postprocessor"}
_NEAR = {"tokenizer", "postprocessor"}
# CPU time of the tokenizer's cache would hide the rest.
_OF_TOKENIZER = NO_CACHE
_VALUES: dict[str, Callable[[Loop], float]] = {
    "CPU time a request, µs": lambda loop: loop.figures["server_cpu_us"],
    "answers a second": lambda loop: loop.throughput_per_s,
    "p50, ms": lambda loop: loop.latencies_ms["p50"],
}


@contextmanager
def _services(
    repository: Path, name: str, near: set[str], *, has_unix_sockets: bool, executor: Sequence[str] = ()
) -> Iterator[System]:
    """A gateway with the near stages inside, and a process for each of the others."""
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory(prefix="np-"))

        def start(service: str, *options: str) -> ServiceProcess:
            address = f"unix:{folder}/{service}.sock" if has_unix_sockets else "127.0.0.1:0"
            arguments = ("--repository", str(repository), "--listen", address, *options)
            return stack.enter_context(ServiceProcess(service, *arguments))

        of_stages = {"tokenizer": _OF_TOKENIZER, "neuron-executor": executor}
        far = {
            target: start(service, *of_stages.get(service, ()))
            for target, service in _STAGES.items()
            if target not in near
        }
        targets = {target: far[target].target if target in far else "local" for target in _STAGES}
        options = [word for target, where in targets.items() for word in (f"--{target}-target", where)]
        gateway = start("gateway", *options, *(_OF_TOKENIZER if "tokenizer" in near else ()))
        for process in (*far.values(), gateway):
            process.wait_until_ready()
        gateway.wait_until_ready().wait_for("all stages reached")
        yield System(name, gateway.target, pids=tuple(process.pid for process in (*far.values(), gateway)))


@contextmanager
def _all(repository: Path, name: str, *options: str) -> Iterator[System]:
    with ServiceProcess("all", "--repository", str(repository), *NO_CACHE, *options) as process:
        yield System(name, process.wait_until_ready().target, pids=(process.pid,))


def measure(
    repository: Path, requests: Sequence[bytes], callers: Sequence[int], rounds: int, seconds: float, *engine: str
) -> dict[tuple[str, int], list[Loop]]:
    """The loops of each system and number of callers, by round. `engine`: options of the executor."""
    found: dict[tuple[str, int], list[Loop]] = {}
    with ExitStack() as stack:
        systems = [
            stack.enter_context(system)
            for system in (
                _all(repository, "serve all", *engine),
                _services(repository, "two processes, tcp", _NEAR, has_unix_sockets=False, executor=engine),
                _services(repository, "two processes, unix", _NEAR, has_unix_sockets=True, executor=engine),
                _services(repository, "four processes, tcp", set(), has_unix_sockets=False, executor=engine),
                _services(repository, "four processes, unix", set(), has_unix_sockets=True, executor=engine),
                _all(repository, "1 front process", "--front-processes", "1", *engine),
                _all(repository, "2 front processes", "--front-processes", "2", *engine),
            )
        ]
        loop = stack.enter_context(ClosedLoop.started(requests))
        for round in range(rounds):
            for count in callers:
                for system in reversed(systems) if round % 2 else systems:
                    found.setdefault((system.name, count), []).append(loop.measure(system, count, seconds))
    return found


def table(found: dict[tuple[str, int], list[Loop]], callers: int, value: Callable[[Loop], float]) -> Iterator[str]:
    """A line a system: the median, and the geometric mean of its ratios to the first system in the same rounds."""
    (first, *_), *_ = found
    for (name, count), loops in found.items():
        if count == callers:
            pairs = zip(loops, found[first, callers], strict=True)
            ratio = math.exp(statistics.fmean(math.log(value(one) / value(other)) for one, other in pairs))
            yield f"{name:24} {statistics.median(map(value, loops)):10.1f} {ratio:8.2f}"


def main() -> None:
    """Prints a table for each value and number of callers."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.processes", description=__doc__)
    parser.add_argument("--repository", type=Path, help="bundles with the benchmark's model (default: the fake one)")
    parser.add_argument(
        "--callers", type=lambda text: [int(word) for word in text.split(",")], default=[1, 32], help="default: 1,32"
    )
    parser.add_argument("--rounds", type=int, default=8, help="turns of each system (default: 8)")
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a turn (default: 1.5)")
    options = parser.parse_args()
    requests = [make_request(text) for text in read_texts()[1]]
    repository = options.repository or find_repository("fake")
    found = measure(repository, requests, options.callers, options.rounds, options.seconds)
    for callers in options.callers:
        for what, value in _VALUES.items():
            print(f"\n{callers} callers: {what}, and to serve all's", *table(found, callers, value), sep="\n")


if __name__ == "__main__":
    main()
