"""Capacity on more CPUs than this machine has: a model made of the CPU time that a request takes in each process.

The model is the bottleneck law of closed queueing networks (Denning and Buzen, The operational analysis of queueing
network models, ACM Computing Surveys 10(3), 1978, section 5): no resource is busy for more than all of the time. The
resources are the CPUs together, and each event loop, which uses one CPU at most. CPU times are measured on one CPU and
on two of this machine; the check compares the capacity that the model foretells for them with the measured one.

The model leaves out: waiting of a loop for its threads, work of worker threads that holds the interpreter's lock, the
bandwidth of the memory, and the network. The model is an upper bound, and the check says by how much.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass

import psutil

from tests.bench.load import LoadProcess, System
from tests.bench.measurements import Measurement
from tests.bench.overload import on_cpus
from tests.bench.systems import ALL, FOUR, NO_CACHE, find_repository, make_request, serving_all, serving_four

SECTION = "scaling"
FRONTS = "front processes"
ARRANGEMENTS = (ALL, FRONTS, FOUR)
DTYPE = "int8"
CALLERS = 32
CHECKED_CPUS = (1, 2)
CPUS = (4, 16, 64)
# The front processes of the measured arrangement; the model has as many as help.
_MEASURED_FRONTS = 2
_LOOP, THREADS, GENERATOR = "loop_us: ", "threads_us", "generator_cpu_us"
_STAGES = ("tokenizer", "executor", "postprocessor", "gateway")
FRONT = "front"


@dataclass(frozen=True)
class Costs:
    """The CPU time of a request in µs: of the event loop of each kind of process, and of all other threads."""

    loops_us: Mapping[str, float]
    threads_us: float

    @classmethod
    def of(cls, figures: Mapping[str, float]) -> "Costs":
        """The costs among the figures of a turn."""
        loops = {name.removeprefix(_LOOP): us for name, us in figures.items() if name.startswith(_LOOP)}
        return cls(loops, figures[THREADS])

    @property
    def total_us(self) -> float:
        """The CPU time of all processes."""
        return sum(self.loops_us.values()) + self.threads_us


@dataclass(frozen=True)
class Capacity:
    """Answers a second, and the resource that is busy all of the time: `CPUs`, or the loop of a kind of process."""

    per_s: float
    limit: str
    fronts: int = 1


def capacity(costs: Costs, cpus: int, shared_us: float = 0.0) -> Capacity:
    """The capacity on a number of CPUs. `shared_us`: the CPU time of a request that others take from the same CPUs.

    Front processes are as many as help: each has a loop.
    """
    of_cpus = cpus * 1e6 / (costs.total_us + shared_us)
    loops = {name: 1e6 / us for name, us in costs.loops_us.items() if us > 0}
    front = loops.pop(FRONT, None)
    limits = {"CPUs": of_cpus, **loops}
    limit = min(limits, key=lambda name: limits[name])
    fronts = 1
    if front is not None:
        while fronts < cpus and fronts * front < limits[limit]:
            fronts += 1
        if fronts * front < limits[limit]:
            return Capacity(fronts * front, FRONT, fronts)
    return Capacity(limits[limit], limit, fronts)


def measure_scaling(texts: Sequence[str], rounds: int, seconds: float) -> Iterator[Measurement]:
    """Turns of each arrangement on one CPU, with the generator on the others, and on two that the generator shares."""
    repository, available = find_repository(DTYPE), sorted(os.sched_getaffinity(0))
    requests = [make_request(text) for text in texts]
    starts = {
        ALL: lambda: serving_all(repository, ALL),
        FRONTS: lambda: serving_all(repository, FRONTS, (*NO_CACHE, "--front-processes", str(_MEASURED_FRONTS))),
        FOUR: lambda: serving_four(repository, FOUR),
    }
    for round in range(rounds):
        for cpus in (cpus for cpus in CHECKED_CPUS if cpus <= len(available)):
            servers = set(available[:cpus])
            for name in ARRANGEMENTS:
                with ExitStack() as stack:
                    system = _start(stack, starts[name](), servers)
                    with on_cpus(set(available) - servers or servers):
                        loop = stack.enter_context(LoadProcess.started(requests))
                    yield _measure(loop, system, cpus, round, seconds)


def _start(stack: ExitStack, start: AbstractContextManager[System], cpus: set[int]) -> System:
    with on_cpus(cpus):
        return stack.enter_context(start)


def name_of(arrangement: str, cpus: int) -> str:
    """An arrangement on a number of CPUs, as the measurements name it."""
    return f"{arrangement}, {cpus} CPU{'s' if cpus > 1 else ''}"


def _measure(loop: LoadProcess, system: System, cpus: int, round: int, seconds: float) -> Measurement:
    # OpenVINO prepares for each shape of a batch when it first meets it.
    loop.measure(system, CALLERS, seconds)
    named = System(name_of(system.name, cpus), system.target, system.method, system.pids)
    before = _thread_seconds(system)
    turn = loop.measure(named, CALLERS, seconds, SECTION, round)
    after = _thread_seconds(system)
    answered = turn.figures["answered"]
    if not answered:
        raise RuntimeError(f"{named.name} answered no request, with {turn.errors} errors")
    for name, seconds_taken in after.items():
        turn.figures[name] = (seconds_taken - before.get(name, 0.0)) / answered * 1e6
    return turn


def _thread_seconds(system: System) -> dict[str, float]:
    """CPU time so far: of the main thread of each kind of process, which runs its event loop, and of other threads."""
    taken_s = {THREADS: 0.0}
    for number, pid in enumerate(system.pids):
        parent = psutil.Process(pid)
        children = parent.children(recursive=True)
        for process in (parent, *children):
            if system.name == FOUR:
                kind = _STAGES[number]
            elif process is not parent:
                kind = FRONT
            else:
                kind = "executor" if system.name == FRONTS else ALL
            for thread in process.threads():
                name = f"{_LOOP}{kind}" if thread.id == process.pid else THREADS
                taken_s[name] = taken_s.get(name, 0.0) + thread.user_time + thread.system_time
    return taken_s
