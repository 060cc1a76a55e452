"""Twice as many requests as can be answered, each worth nothing after its deadline."""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from demo.processes import ServiceProcess, four_processes
from neuronpipe.load.figures import LoadResult
from neuronpipe.load.request import LoadRequest
from neuronpipe.load.run import run_load
from tests.bench.measurements import Measurement
from tests.bench.systems import ALL, FOUR, MODEL, NO_CACHE, find_repository

SECTION = "overload"
CALLERS = 32
FACTOR = 2.0
DEADLINE_MS = 300.0
_PREHEAT_S = 1.0


def measure_overload(texts: Path, rounds: int, seconds: float) -> Iterator[Measurement]:
    """A fresh system each time: how much it can do is measured, then it gets twice that, then it is ended and tells
    what it computed.
    """
    repository = find_repository("float32")
    for round in range(rounds):
        for system in (ALL, FOUR):
            with ExitStack() as stack:
                if system == ALL:
                    gateway = executor = stack.enter_context(
                        ServiceProcess("all", "--repository", str(repository), *NO_CACHE)
                    )
                else:
                    processes = stack.enter_context(four_processes(repository, stage_options={"tokenizer": NO_CACHE}))
                    gateway, executor = processes["gateway"], processes["neuron-executor"]
                yield _measure(system, round, gateway.wait_until_ready().target, executor, texts, seconds)


def _measure(
    system: str, round: int, target: str, executor: ServiceProcess, texts: Path, seconds: float
) -> Measurement:
    closed = [_run(target, texts, duration_s, concurrency=CALLERS) for duration_s in (_PREHEAT_S, seconds)]
    capacity_per_s = closed[-1].throughput_per_s
    if not capacity_per_s:
        raise RuntimeError(f"{system} answered none of {closed[-1].requests} requests: {closed[-1].errors}")
    # Other arrivals each round, the same for both systems.
    open_ = _run(target, texts, seconds, rate_per_s=FACTOR * capacity_per_s, deadline_ms=DEADLINE_MS, seed=round + 1)
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
