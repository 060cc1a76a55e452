"""Twice to sixteen times as many requests as can be answered, each worth nothing after its deadline."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from demo.processes import ServiceProcess, four_processes
from neuronpipe.measure.load.report import LoadResult
from neuronpipe.measure.load.request import LoadRequest
from neuronpipe.measure.load.run import run_load
from tests.bench.measurements import Measurement
from tests.bench.systems import ALL, FOUR, MODEL, NO_CACHE, find_repository

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


def measure_overload(texts: Path, rounds: int, seconds: float) -> Iterator[Measurement]:
    """A fresh system each time: how much it can do is measured, then it gets a multiple of that, then it is ended and
    tells what it computed.
    """
    repository = find_repository("float32")
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
                with _on_cpus(servers):
                    gateway, executor = _start(system, repository, stack)
                stack.enter_context(_on_cpus(generator))
                target = gateway.wait_until_ready().target
                yield _measure(name_of(system, factor), factor, round, target, executor, texts, seconds)


def _start(system: str, repository: Path, stack: ExitStack) -> tuple[ServiceProcess, ServiceProcess]:
    """The process that is called, and the one that computes."""
    if system == FOUR:
        processes = stack.enter_context(four_processes(repository, stage_options={"tokenizer": NO_CACHE}))
        return processes["gateway"], processes["neuron-executor"]
    process = stack.enter_context(ServiceProcess("all", "--repository", str(repository), *NO_CACHE))
    return process, process


@contextmanager
def _on_cpus(cpus: set[int]) -> Iterator[None]:
    """Where this thread runs, and the threads and processes that it starts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _measure(
    system: str, factor: int, round: int, target: str, executor: ServiceProcess, texts: Path, seconds: float
) -> Measurement:
    closed = [_run(target, texts, duration_s, concurrency=CALLERS) for duration_s in (_PREHEAT_S, seconds)]
    capacity_per_s = closed[-1].throughput_per_s
    if not capacity_per_s:
        raise RuntimeError(f"{system} answered none of {closed[-1].requests} requests: {closed[-1].errors}")
    # Other arrivals each round, the same for all systems.
    open_ = _run(target, texts, seconds, rate_per_s=factor * capacity_per_s, deadline_ms=DEADLINE_MS, seed=round + 1)
    executor.signal(signal.SIGTERM)
    executor.wait()
    counted = next(line for line in executor.events() if line["event"] == "computed")
    # Each loop counts all of its requests, for none has a warm-up: whoever waits in a closed loop gets an answer.
    computed = int(str(counted["sequences"])) - sum(one.answers for one in closed)
    figures = {
        "capacity_per_s": capacity_per_s,
        "offered_per_s": open_.offered_per_s or 0.0,
        "goodput_of_capacity": open_.goodput_per_s / capacity_per_s,
        "computed": computed,
        "answers_in_time": open_.answers_in_time,
        "wanted": open_.answers_in_time / computed if computed else 0.0,
        "left_while_computing": float(str(counted["unwanted"])),
        "generator_cpu": max(open_.cpu_shares),
        "send_lag_p99_ms": open_.send_lag_ms.p99 if open_.send_lag_ms else 0.0,
        "generator_warnings": sum(len(one.warnings) for one in (*closed, open_)),
    }
    latency = open_.latency_ms
    latencies_ms = {"p50": latency.p50, "p90": latency.p90, "p99": latency.p99} if latency else {}
    return Measurement(
        section=SECTION,
        system=system,
        callers=CALLERS,
        round=round,
        throughput_per_s=open_.goodput_per_s,
        # Of the closed loops: in the open one, errors are what is expected.
        errors=sum(sum(one.errors.values()) for one in closed),
        latencies_ms=latencies_ms,
        figures=figures,
    )


def _run(
    target: str,
    texts: Path,
    duration_s: float,
    *,
    concurrency: int | None = None,
    rate_per_s: float | None = None,
    deadline_ms: float | None = None,
    seed: int = 0,
) -> LoadResult:
    return run_load(
        LoadRequest(
            target=target,
            model=MODEL,
            concurrency=concurrency,
            rate_per_s=rate_per_s,
            deadline_ms=deadline_ms,
            duration_s=duration_s,
            warm_up_s=0,
            texts=texts,
            seed=seed,
        )
    )
