"""MiniLM with a two-label head in every dtype: the back end alone, `serve all`, four processes."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from tests.bench.ceiling import running_ceiling
from tests.bench.load import LoadProcess
from tests.bench.measurements import Measurement
from tests.bench.systems import computed_dtypes, find_repository, make_request, of_dtype, serving_both, take_turns

SECTION = "models"
CALLERS = (1, 32)
CEILING = "back end alone"


def measure_models(texts: Sequence[str], rounds: int, seconds: float) -> Iterator[Measurement]:
    """The systems take turns; one that waits for its turn costs nothing.

    The ceiling has no callers. It stands under 0 callers, with the padded tokens of a batch as its figure.
    """
    with ExitStack() as stack:
        repositories = {dtype: find_repository(dtype) for dtype in computed_dtypes()}
        ceilings = {
            dtype: stack.enter_context(running_ceiling(repository, texts)) for dtype, repository in repositories.items()
        }
        systems = {dtype: serving_both(stack, repository, dtype) for dtype, repository in repositories.items()}
        loop = stack.enter_context(LoadProcess.started([make_request(text) for text in texts]))
        for round in range(rounds):
            for dtype, ceiling in ceilings.items():
                yield Measurement(
                    section=SECTION,
                    system=of_dtype(CEILING, dtype),
                    callers=0,
                    round=round,
                    throughput_per_s=ceiling.measure(seconds),
                    figures={"batch_tokens": ceiling.batch_tokens},
                )
                turns = [(callers, system) for callers in reversed(CALLERS) for system in systems[dtype]]
                yield from take_turns(SECTION, loop, turns, [round], seconds)
