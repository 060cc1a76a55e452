"""What everything but the model costs: a fake back end that takes no time, against a gRPC server that only answers."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from tests.bench.closed_loop import ClosedLoop
from tests.bench.measurements import Measurement
from tests.bench.systems import find_repository, make_request, serving_all, serving_echo, serving_four

SECTION = "overhead"
CALLERS = (1, 8, 32, 64)


def measure_overhead(texts: Sequence[str], rounds: int, seconds: float) -> Iterator[Measurement]:
    """The systems take turns."""
    repository = find_repository("fake")
    with ExitStack() as stack:
        systems = [
            stack.enter_context(one) for one in (serving_echo(), serving_all(repository), serving_four(repository))
        ]
        loop = stack.enter_context(ClosedLoop.started([make_request(text) for text in texts]))
        for round in range(rounds):
            for callers in CALLERS:
                for system in systems:
                    found = loop.measure(system, callers, seconds)
                    yield Measurement(section=SECTION, system=system.name, callers=callers, round=round, **vars(found))
