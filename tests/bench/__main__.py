"""The benchmark: every section that is asked for, one page.

Run: python -m tests.bench [--rounds N] [--seconds S] [--only overhead,models [--add]] [--peers litserve] [--out FOLDER]
"""

import argparse
import itertools
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from neuronpipe.measure.machine import describe_machine
from tests.bench.against_peers import ALL_PEERS, measure_like_for_like, measure_peers
from tests.bench.embedding_peers import measure_embeddings
from tests.bench.generation import measure_generation
from tests.bench.generation_realistic import measure_realistic
from tests.bench.measurements import Measurement
from tests.bench.models import measure_models
from tests.bench.overhead import measure_overhead
from tests.bench.overload import measure_overload
from tests.bench.report import Run, keep_sections, write_report
from tests.bench.scaling import measure_scaling
from tests.bench.startup import measure_starts
from tests.bench.systems import make_texts
from tests.bench.telemetry import measure_telemetry

_SECTIONS = (
    "start",
    "overhead",
    "models",
    "peers",
    "embeddings",
    "overload",
    "scaling",
    "telemetry",
    "generation",
    "realistic",
)
# The queue has to fill before an open loop says anything.
_OVERLOAD_FACTOR = 2
_NONE = "none"


def main() -> None:
    """Measures, and writes the page after every section, and of one that is broken off what there is."""
    options = _parse()
    # The blocks below end what they started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    began_s = time.monotonic()
    command = shlex.join(["python", "-m", "tests.bench", *sys.argv[1:]])
    run = Run(command=command, machine=describe_machine(), rounds=options.rounds, seconds=options.seconds)
    texts, turns = make_texts(), (options.rounds, options.seconds)
    peers = (options.peers, texts, *turns, run.unavailable)
    sections: dict[str, Callable[[], Iterator[Measurement]]] = {
        "overhead": lambda: measure_overhead(texts, *turns),
        "models": lambda: itertools.chain(measure_models(texts, *turns), measure_like_for_like(*peers)),
        "peers": lambda: measure_peers(*peers),
        "embeddings": lambda: measure_embeddings(texts, *turns, run.unavailable),
        "scaling": lambda: measure_scaling(texts, *turns),
        "telemetry": lambda: measure_telemetry(texts, *turns),
        "generation": lambda: measure_generation(*turns, run.unavailable),
        "realistic": lambda: measure_realistic(*turns, run.unavailable),
        "overload": lambda: measure_overload(texts, options.rounds, options.seconds * _OVERLOAD_FACTOR),
    }
    if options.add:
        keep_sections(run, options.out, options.only)
    page = ""
    for section in options.only:
        machine = describe_machine()
        print(f"{section}: after {time.monotonic() - began_s:.0f} s", file=sys.stderr)
        try:
            if section == "start":
                run.starts.extend(measure_starts(options.rounds))
            for turn in sections[section]() if section in sections else ():
                run.measurements.append(turn)
                system = f"{turn.section}, round {turn.round}, {turn.system}, {turn.callers} callers"
                print(f"{system}: {turn.throughput_per_s:.1f}/s", file=sys.stderr)
        finally:
            run.sections[section] = (
                f"{machine['date']}, commit {machine['commit']}, load before {machine['load before']}; "
                f"{options.rounds} rounds, turns of {options.seconds:g} s"
            )
            page = write_report(run, options.out)
    print(page)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Measures and writes a page.")
    parser.add_argument("--rounds", type=_positive(int), default=5, help="turns of each system (default: 5)")
    parser.add_argument("--seconds", type=_positive(float), default=3.0, help="length of a turn (default: 3)")
    parser.add_argument("--only", type=_names_of(_SECTIONS), default=_SECTIONS, help=f"some of {','.join(_SECTIONS)}")
    parser.add_argument("--add", action="store_true", help="keep the page's other sections")
    some = f"{_NONE}, or some of {','.join(ALL_PEERS)}"
    parser.add_argument("--peers", type=_names_of(ALL_PEERS), default=ALL_PEERS, help=some)
    out = Path("docs/benchmarks") / cpu_kind()
    parser.add_argument("--out", type=Path, default=out, help=f"folder to write to (here {out}, by the kind of CPU)")
    return parser.parse_args()


def cpu_kind() -> str:
    """The name of the page for CPUs like this one: by the instructions that decide about int8 and bfloat16."""
    instructions = describe_machine()["instructions"].split(", ")
    names = [name.lower() for name in ("VNNI", "bfloat16", "AMX") if f"{name} yes" in instructions]
    return f"with-{'-'.join(names)}" if names else "without-vnni"


def _positive(kind: type[int] | type[float]) -> Callable[[str], float]:
    def parse(text: str) -> float:
        number = kind(text)
        if not number > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return number

    return parse


def _names_of(allowed: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = () if text == _NONE else tuple(text.split(","))
        if unknown := set(names) - set(allowed):
            raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: not among {', '.join(allowed)}")
        return names

    return parse


if __name__ == "__main__":
    main()
