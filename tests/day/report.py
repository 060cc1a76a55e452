"""The page of a day: what happened, what came of it, and memory and latency over time."""

import datetime
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from neuronpipe.measure.machine import describe_machine
from tests.day.run import Day
from tests.documentation.plots import new_plot, save_plot

_MEMORY_TITLE, _LATENCY_TITLE = "memory of each process over time", "p99 over time"
_WINDOW_S = 10.0
_TEXT = """# A day in production

`make day` runs a whole system for half an hour: three stages with TLS, two gateways behind HAProxy, two workers of
jobs, and Redis with a replica. Its models are an encoder in int8, a reranker in float32 and a small generator. Callers
of three tenants use jobs, gRPC, and the protocols of OpenAI, TEI and Open Inference, with texts of 2 to 350 words.
Some leave early, do not read, or exceed their quotas. Timers are short, so that connections and leases end often.

Meanwhile each process stops for seconds, is killed, and is replaced, one after the other, in random order. So does
Redis, which also fails over. A canary becomes stable and is rolled back, certificates change, and at times there are no
calls.

The day passes when:

- the only lost calls are calls that a killed process was handling, and each text has the same answer every time,
- each job ends once,
- the memory of each process stays within [the formula](deployment.md#memory),
- every process is healthy while nothing happens to it, and no log has an error,
- no request or job is left once all callers have stopped.

A day that passes means: whichever process stops, a caller loses only the calls that a killed process had, and can
repeat them. Answers are slow meanwhile, as the remaining processes share two CPUs: plan a spare process of each service
where the p99 matters.
"""


def write_report(day: Day, folder: Path) -> None:
    """Writes day.md and its two plots."""
    folder.mkdir(parents=True, exist_ok=True)
    _plot_memory(day, folder / "day-memory.svg")
    _plot_latency(day, folder / "day-latency.svg")
    (folder / "day.md").write_text("\n".join(_page(day)) + "\n")


def _page(day: Day) -> Iterator[str]:
    yield from (_TEXT, "## Results", "")
    command = f"python -m tests.day --seconds {day.seconds:g} --seed {day.seed}"
    machine = describe_machine()
    described = f"{machine['CPU']}, {machine['CPUs to use']} CPUs, {machine['instructions']}; {machine['memory']}"
    yield f"{datetime.date.today()}, `{command}`: {described}."
    faults = day.faults
    yield from ("", f"**{'Passed' if not faults else f'Failed, with {len(faults)} kinds of faults'}.**", "")
    yield from (f"- {fault} ({count} times)" for fault, count in faults.most_common())
    yield from ("", "| | |", "|---|---:|")
    yield f"| events | {len(day.timeline.events)} |"
    yield f"| calls that were answered | {sum(not call.problem for call in day.calls):,} |"
    yield f"| calls lost with {len(day.timeline.kills)} killed processes | {len(day.lost):,} |"
    yield f"| calls whose callers left | {day.left:,} |"
    yield f"| jobs, each ended once | {day.jobs:,} |"
    yield f"| health checks | {day.health_checks:,} |"
    yield from ("", "| Door | Calls | p50 ms | p99 ms |", "|---|---:|---:|---:|")
    doors: dict[str, list[float]] = defaultdict(list)
    for call in day.calls:
        if not call.problem:
            doors[call.door].append((call.ended_s - call.began_s) * 1e3)
    for door, times in doors.items():
        p50, p99 = np.percentile(times, (50, 99))
        yield f"| {door} | {len(times):,} | {p50:.0f} | {p99:.0f} |"
    yield from (
        "",
        "## Memory",
        "",
        "| Process | At the start, MiB | Most | At the end | Limit |",
        "|---|---:|---:|---:|---:|",
    )
    for name, samples in day.memory.items():
        sizes = [size for _, size in samples]
        yield f"| {name} | {sizes[0]:.0f} | {max(sizes):.0f} | {sizes[-1]:.0f} | {day.limits_mib[name]:.0f} |"
    yield from ("", f"![{_MEMORY_TITLE}](day-memory.svg)", "", "## Latency", "")
    yield f"p99 of calls in windows of {_WINDOW_S:g} s. Gray: a process stops or a fault begins. Red: a process is"
    yield "killed. Calls are held while the only process of a stage starts again."
    yield from ("", f"![{_LATENCY_TITLE}](day-latency.svg)")


def _plot_memory(day: Day, path: Path) -> None:
    figure, axes = new_plot()
    for name, samples in day.memory.items():
        # One point for each window: the page need not be large.
        points = _windows([(at_s - day.began_s, size) for at_s, size in samples])
        axes.plot([at_s / 60 for at_s, _ in points], [max(sizes) for _, sizes in points], label=name, linewidth=1)
    axes.set(xlabel="minutes", ylabel="MiB", ylim=(0, None), title="resident memory")
    save_plot(figure, axes, path, _MEMORY_TITLE)


def _plot_latency(day: Day, path: Path) -> None:
    figure, axes = new_plot()
    for began_s, ended_s, _ in day.timeline.events:
        axes.axvspan((began_s - day.began_s) / 60, (ended_s - day.began_s) / 60, color="0.92", linewidth=0)
    for killed_s, _ in day.timeline.kills:
        axes.axvline((killed_s - day.began_s) / 60, color="red", linewidth=0.4)
    groups = {"gRPC Infer": "gRPC Infer", "OpenAI embeddings": "OpenAI embeddings", "OpenAI chat": "OpenAI chat"}
    for door, label in groups.items():
        calls = [
            (call.ended_s - day.began_s, (call.ended_s - call.began_s) * 1e3)
            for call in day.calls
            if call.door == door and not call.problem
        ]
        points = _windows(calls)
        values = [float(np.percentile(times, 99)) for _, times in points]
        axes.plot([at_s / 60 for at_s, _ in points], values, label=label, linewidth=1)
    axes.set(xlabel="minutes", ylabel="p99, ms", yscale="log")
    save_plot(figure, axes, path, _LATENCY_TITLE)


def _windows(points: Sequence[tuple[float, float]]) -> list[tuple[float, list[float]]]:
    windows: dict[int, list[float]] = defaultdict(list)
    for at_s, value in points:
        windows[int(at_s / _WINDOW_S)].append(value)
    return [(_WINDOW_S * number, windows[number]) for number in sorted(windows)]
