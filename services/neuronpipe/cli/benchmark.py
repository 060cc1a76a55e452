"""`neuronpipe benchmark`: its options, and the request. Imports its dependencies only when it runs."""

import argparse
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuronpipe.cli.terminal import ending_on_sigterm, made, option, print_table, say, subcommand, whole_numbers, words
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.measure.benchmark.costs import Costs, Goal
    from neuronpipe.measure.benchmark.run import RunRequest

HELP = "measure models over lengths, batches, dtypes and cores, and report latency, throughput and cost"
EXTRA = "benchmark"

# option → its default in a whole run, and with --quick
_DEFAULTS: Mapping[str, tuple[Any, Any]] = {
    "model": ((), ("distilbert-base-uncased", "vit-base-patch16-224")),
    "lengths": ((8, 16, 32, 64, 128, 256, 512), (8, 32, 128)),
    "batches": ((1, 2, 4, 8, 16, 32, 64), (1, 8)),
    "throughput_batches": ((1, 8), (1,)),
    "dtypes": (("float32", "bfloat16"), ("float32",)),
    "cell_seconds": (4.0, 1.0),
    "calls": (100, 20),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    compare = subcommand(commands, "compare", _compare, "two runs side by side; exit code 1 where the second is worse")
    option(compare, "before A", "the folder of a run, or its results.json", Path)
    option(compare, "after B", "the run to compare with it", Path)
    option(
        compare,
        "--threshold X",
        "a regression is worse by more than this share, with its whole interval (default: 0.05)",
        0.05,
    )
    measured = parser.add_argument_group("what is measured")
    option(
        measured,
        "--model M",
        "a model's folder, or a published size with random weights, as bert-base-uncased; repeat it for others "
        "(default: six published sizes)",
        action="append",
    )
    option(measured, "--repository DIR", "bundles to measure as they are", Path)
    option(measured, "--task TASK", "task of the folders (default: found in their configuration)", "")
    option(measured, "--lengths N,…", "tokens (default: 8,16,32,64,128,256,512)", whole_numbers)
    option(measured, "--batches N,…", "batch sizes (default: 1,2,4,8,16,32,64)", whole_numbers)
    option(
        measured,
        "--throughput-batches N,…",
        "batch sizes of other dtypes and of mode throughput (default: 1,8)",
        whole_numbers,
    )
    option(measured, "--dtypes D,…", "dtypes; the first is varied most (default: float32,bfloat16)", words)
    option(measured, "--backends B,…", "back ends (default: openvino)", words, default=("openvino",))
    option(measured, "--cores N,…", "replicas that share the machine (default: 1 and one for each CPU)", whole_numbers)
    option(
        measured,
        "--modes M,…",
        "latency: one caller; throughput: a caller for each core (default: both)",
        words,
        default=("latency", "throughput"),
    )
    option(measured, "--base-length N", "length at which batches, dtypes and cores vary (default: 128)", 128)
    option(measured, "--product", "measure every combination (default: vary one value at a time)", dest="is_product")
    option(measured, "--quick", "measure two models, with few cells, a second for each")
    effort = parser.add_argument_group("how")
    option(effort, "--cell-seconds S", "seconds for a cell, with at least three calls (default: 4)", float)
    option(effort, "--calls N", "minimum number of calls per cell, within --cell-seconds (default: 100)", int)
    option(
        effort,
        "--precision X",
        "measure until the interval of p95 is within this share on either side (default: 0.05)",
        0.05,
    )
    option(effort, "--minutes M", "refuse a matrix that takes longer, in minutes (default: 60)", 60.0)
    option(effort, "--fresh", "measure again the cells that --out already contains", dest="is_fresh")
    option(
        effort,
        "--cache DIR",
        "folder of compiled models (default: ~/.cache/neuronpipe/benchmark)",
        Path("~/.cache/neuronpipe/benchmark"),
    )
    report = parser.add_argument_group("report")
    option(report, "--out DIR", "folder of the report; an interrupted run continues there", Path)
    option(report, "--prices FILE", "your prices, in the form of measure/benchmark/prices.json", Path)
    option(report, "--instance TYPE", "instance type of this machine (default: its own description)", "")
    option(report, "--p95-ms MS", "p95 latency to reach at --rate; the report names the cheapest way", float)
    option(report, "--rate R", "inputs per second to reach with --p95-ms", float)


def run(options: argparse.Namespace) -> None:
    """Measures. Raises SetupError.

    Exit codes: 0 done, 1 no cell could be measured, 130 interrupted; the report is written in all cases.
    """
    for name, (usual, quick) in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    if options.repository and options.model == _DEFAULTS["model"][1]:
        options.model = ()
    costs, goal, request = _costs(options), _goal(options), _request(options)
    # Imported before anything is measured: the report needs it.
    import matplotlib as _matplotlib  # noqa: F401

    from neuronpipe.measure.benchmark.costs import goal_table
    from neuronpipe.measure.benchmark.report import warnings_of, write_report
    from neuronpipe.measure.benchmark.run import BenchmarkRun

    run = BenchmarkRun(request, say)
    code = 0
    with ending_on_sigterm():
        try:
            run.run()
        except KeyboardInterrupt:
            say(f"interrupted; the same command continues from {len(run.results.cells)} cells")
            code = 130
        finally:
            if run.results.cells:
                page = write_report(run.results, costs, request.folder, goal)
                for warning in warnings_of(run.results):
                    say(f"WARNING: {warning}")
                print(page)
    if goal:
        table = goal_table(run.results, costs, goal)
        print_table([table.columns, *table.rows])
    if code or not run.results.measured:
        sys.exit(code or 1)


def _request(options: argparse.Namespace) -> "RunRequest":
    """Makes the request. Raises SetupError if an option is out of range."""
    from neuronpipe.measure.benchmark.matrix import MatrixRequest, find_models, make_matrix
    from neuronpipe.measure.benchmark.measuring import CellEffort
    from neuronpipe.measure.benchmark.run import RunRequest
    from neuronpipe.stages.neuron_executor.runtimes.host import available_cpus

    if options.out is None:
        raise SetupError("--out: is missing; give the folder of the report")
    limits = (
        ("cell_seconds", 0.01, 3600),
        ("calls", 2, 1_000_000),
        ("precision", 0.001, 1),
        ("minutes", 0.1, 100_000),
    )
    for name, low, high in limits:
        if not low <= getattr(options, name) <= high:  # also false for NaN
            raise SetupError(f"--{name.replace('_', '-')} {getattr(options, name):g}: must be from {low:g} to {high:g}")
    models = find_models(options.model, options.task.replace("-", "_"), options.repository)
    cores = options.cores or tuple(dict.fromkeys((1, available_cpus())))
    return made(
        RunRequest,
        options,
        matrix=make_matrix(made(MatrixRequest, options, models=models, cores=cores)),
        effort=made(CellEffort, options, seconds=options.cell_seconds),
        folder=options.out,
        cache=options.cache.expanduser(),
        command=shlex.join(["neuronpipe", *sys.argv[1:]]),
    )


def _costs(options: argparse.Namespace) -> "Costs":
    from neuronpipe.measure.benchmark.costs import DEFAULT_PRICES, THIS_MACHINE, Costs, read_prices
    from neuronpipe.measure.machine import instance_type
    from neuronpipe.stages.neuron_executor.runtimes.host import available_cpus

    prices = read_prices(options.prices or DEFAULT_PRICES)
    this_instance = instance_type()
    if options.instance and options.instance not in prices.instances:
        say(f"WARNING: --instance {options.instance}: the prices of {prices.date} lack it; costs are left out")
    instance = options.instance or (this_instance if this_instance in prices.instances else "")
    return Costs(prices, prices.alike(available_cpus(), instance), instance or THIS_MACHINE)


def _goal(options: argparse.Namespace) -> "Goal | None":
    from neuronpipe.measure.benchmark.costs import Goal

    if (options.p95_ms is None) != (options.rate is None):
        raise SetupError("--p95-ms and --rate: give both, or neither")
    return None if options.p95_ms is None else Goal(options.p95_ms, options.rate)


def _compare(options: argparse.Namespace) -> None:
    """Compares two runs. Exit codes: 0 nothing is worse, 1 a cell is worse, 2 the runs cannot be compared."""
    from neuronpipe.measure.benchmark.results import compare_results, compared_rows, differences, read_results

    if not 0 <= options.threshold < float("inf"):
        raise SetupError(f"--threshold {options.threshold:g}: must be 0 or more")
    before, after = read_results(options.before), read_results(options.after)
    compared = compare_results(before, after)
    for line in differences(before, after):
        say(f"WARNING: the runs differ in more than the code: {line}")
    print_table(compared_rows(compared, options.threshold))
    worse = [cell.cell.name for cell in compared if cell.is_regression(options.threshold)]
    print(
        f"{len(compared)} cells compared, B to A: {len(worse)} worse by more than {options.threshold:.0%}, "
        f"{sum(cell.is_improvement(options.threshold) for cell in compared)} better"
    )
    if worse:
        sys.exit(1)
