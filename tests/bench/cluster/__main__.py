"""`python -m tests.bench.cluster`: see the package."""

import argparse
import datetime
import os
import re
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.bench.cluster.check import compared
from tests.bench.cluster.scenarios import DEVICE, FIXED, LARGE, RULES, SCENARIOS, Run, Scenario, run
from tests.documentation.plots import new_plot, save_plot

_RESULTS = Path(__file__).parents[3] / "docs" / "benchmarks"
_MARKS = re.compile(
    r"(?<=<!-- simulation: written by make simulate-cluster -->\n).*?(?=<!-- /simulation -->)", re.DOTALL
)
_ALL = (*RULES, FIXED)
_OF_LARGE = ("CPU 70 %", "queue 0.2 s or busy 70 %")


def _runs() -> dict[str, dict[str, Run]]:
    wanted = [(LARGE.name, rule) for rule in _OF_LARGE]
    wanted += [(scenario.name, rule) for scenario in SCENARIOS for rule in _ALL]
    found: dict[str, dict[str, Run]] = {}
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for (name, rule), made in zip(wanted, pool.map(_run, *zip(*wanted, strict=True)), strict=True):
            found.setdefault(name, {})[rule] = made
            print(f"{name}, {rule}", file=sys.stderr, flush=True)
    return found


def _run(name: str, rule: str) -> Run:
    [scenario] = [known for known in (*SCENARIOS, LARGE) if known.name == name]
    return run(scenario, rule)


def _table(scenario: Scenario, runs: Mapping[str, Run]) -> Iterator[str]:
    yield from (f"**{scenario.name}**: {scenario.text}.", "")
    yield "| Rule | p50 ms | p99 ms | refused or too late | executors, mean |"
    yield "|---|---:|---:|---:|---:|"
    for rule, found in runs.items():
        times = f"{found.p50_s * 1e3:.0f} | {found.p99_s * 1e3:.0f}"
        yield f"| {rule} | {times} | {found.shed_share:.2%} | {found.pods:.1f} |"
    yield ""


def _page(runs: Mapping[str, Mapping[str, Run]]) -> Iterator[str]:
    most = f"{DEVICE.requests_per_s:.0f} requests a second"
    yield from (f"Simulated on {datetime.date.today()}; an executor answers {most} at most.", "")
    for scenario in SCENARIOS:
        yield from _table(scenario, runs[scenario.name])
        yield from (f"![{_plot_title(scenario)}]({_plot_name(scenario)})", "")
    yield from _table(LARGE, runs[LARGE.name])


def _plot_name(scenario: Scenario) -> str:
    return f"autoscaling-{re.sub('[^a-z]+', '-', scenario.name)}.svg"


def _plot_title(scenario: Scenario) -> str:
    return f"executors over time: {scenario.name}"


def _plot(scenario: Scenario, runs: Mapping[str, Run]) -> None:
    figure, axes = new_plot()
    for rule, found in runs.items():
        if rule != FIXED:
            minutes, sizes = zip(*((at_s / 60, size) for at_s, size in found.sizes), strict=True)
            axes.step(minutes, sizes, where="post", label=rule)
    times = [second / 60 for second in range(0, int(scenario.seconds), 5)]
    needed = [scenario.rate_at(minute * 60) / DEVICE.requests_per_s for minute in times]
    axes.fill_between(times, needed, color="0.85", label="load, in executors that compute all the time")
    axes.set(xlabel="minutes", ylabel="executors", title=f"{scenario.name}: {scenario.text}")
    save_plot(figure, axes, _RESULTS / _plot_name(scenario), _plot_title(scenario))


def _check() -> None:
    print("| Executors | Load | p50 ms, simulated | real | p99 ms, simulated | real |")
    print("|---:|---:|---:|---:|---:|---:|")
    for count, load, model, real in compared():
        cells = (f"{seconds * 1e3:.0f}" for pair in zip(model, real, strict=True) for seconds in pair)
        print(f"| {count} | {load:.0%} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Writes figures and plots into docs/benchmarks, or prints how the model compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the model with real executors, and write nothing")
    if parser.parse_args().check:
        return _check()
    runs = _runs()
    for scenario in SCENARIOS:
        _plot(scenario, runs[scenario.name])
    page = _RESULTS / "autoscaling.md"
    text, count = _MARKS.subn(lambda found: "\n".join(_page(runs)), page.read_text())
    if count != 1:
        sys.exit(f"{page}: has no place for the simulation")
    page.write_text(text)
    return None


if __name__ == "__main__":
    main()
