"""Twice to sixteen times as many requests as can be answered, each worth nothing after its deadline.

They come from the light client of the closed loops. `neuronpipe load` takes 0.26 ms of CPU time a request (2026-11-23):
at sixteen times, most of a CPU, which the servers would not have.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from demo.processes import ServiceProcess, four_processes
from neuronpipe.core.errors import DeadlineExceeded
from neuronpipe.measure.load.generator import UNANSWERED
from tests.bench.load import LoadProcess, System
from tests.bench.measurements import Measurement
from tests.bench.systems import ALL, FOUR, NO_CACHE, find_repository, make_request

SECTION = "overload"
CALLERS = 32
PINNED = f"{ALL}, on one CPU"
# How many times its capacity each system gets.
FACTORS = {ALL: (2, 4, 8, 16), PINNED: (2, 4, 8, 16), FOUR: (2,)}
DEADLINE_MS = 300.0
_PREHEAT_S = 1.0


def name_of(system: str, factor: int) -> str:
    """A system at a multiple of its capacity, as the tables name it."""
    return f"{system}, {factor} x"


def measure_overload(texts: Sequence[str], rounds: int, seconds: float) -> Iterator[Measurement]:
    """A fresh system each time: how much it can do is measured, then it gets a multiple of that, then it is ended and
    tells what it computed.
    """
    repository = find_repository("float32")
    requests = [make_request(text) for text in texts]
    cpus = sorted(os.sched_getaffinity(0))
    turns = [
        (system, factor)
        for system, factors in FACTORS.items()
        if system != PINNED or len(cpus) > 1
        for factor in factors
    ]
    for round in range(rounds):
        for system, factor in turns:
            servers, generator = ({cpus[0]}, set(cpus[1:])) if system == PINNED else (set(cpus), set(cpus))
            with ExitStack() as stack:
                with on_cpus(servers):
                    gateway, executor = _start(system, repository, stack)
                stack.enter_context(on_cpus(generator))
                target = gateway.wait_until_ready().target
                loop = stack.enter_context(LoadProcess.started(requests))
                yield _measure(System(name_of(system, factor), target), loop, factor, round, executor, seconds)


def _start(system: str, repository: Path, stack: ExitStack) -> tuple[ServiceProcess, ServiceProcess]:
    """The process that is called, and the one that computes."""
    if system == FOUR:
        processes = stack.enter_context(four_processes(repository, stage_options={"tokenizer": NO_CACHE}))
        return processes["gateway"], processes["neuron-executor"]
    process = stack.enter_context(ServiceProcess("all", "--repository", str(repository), *NO_CACHE))
    return process, process


@contextmanager
def on_cpus(cpus: set[int]) -> Iterator[None]:
    """Where this thread runs, and the threads and processes that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _measure(
    system: System, loop: LoadProcess, factor: int, round: int, executor: ServiceProcess, seconds: float
) -> Measurement:
    closed = [loop.measure(system, CALLERS, duration_s) for duration_s in (_PREHEAT_S, seconds)]
    capacity_per_s = closed[-1].throughput_per_s
    if not capacity_per_s:
        raise RuntimeError(f"{system.name} answered no request, with {closed[-1].errors} errors")
    # Other arrivals each round, the same for all systems.
    offered = loop.offer(system, factor * capacity_per_s, seconds, DEADLINE_MS, seed=round + 1)
    executor.signal(signal.SIGTERM)
    executor.wait()
    counted = next(line for line in executor.events() if line["event"] == "computed")
    computed = int(str(counted["sequences"])) - sum(int(turn.figures["answered"]) for turn in closed)
    in_time_per_s = offered.answers_in_time / seconds
    given_up = (DeadlineExceeded.reason, UNANSWERED)
    figures = {
        "capacity_per_s": capacity_per_s,
        "offered_per_s": offered.offered_per_s or 0.0,
        "goodput_of_capacity": in_time_per_s / capacity_per_s,
        "computed": computed,
        "answers_in_time": offered.answers_in_time,
        "wanted": offered.answers_in_time / computed if computed else 0.0,
        "left_while_computing": float(str(counted["unwanted"])),
        "refused": sum(count for outcome, count in offered.errors.items() if outcome not in given_up),
        "generator_cpu": offered.cpu_shares[0],
        "send_lag_p99_ms": offered.send_lag_ms.p99 if offered.send_lag_ms else 0.0,
    }
    measured = Measurement.of(offered, SECTION, system.name, CALLERS, round, figures)
    # Errors of the closed loops: in the open one, errors are expected.
    return replace(measured, throughput_per_s=in_time_per_s, errors=sum(turn.errors for turn in closed))
