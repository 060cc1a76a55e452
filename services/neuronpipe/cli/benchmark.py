"""`neuronpipe benchmark`: its options, and the request. Imports its dependencies only when it runs."""

import argparse
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuronpipe.cli.terminal import ending_on_sigterm, made, option, print_table, say, subcommand
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.measure.benchmark.costs import Costs, Goal
    from neuronpipe.measure.benchmark.run import RunRequest

HELP = "measure models over lengths, batches, dtypes and cores, and report latency, throughput and cost"
EXTRA = "benchmark"

# option → what it is without being given: in a whole run, and with --quick.
_DEFAULTS: Mapping[str, tuple[Any, Any]] = {
    "model": ((), ("distilbert-base-uncased", "vit-base-patch16-224")),
    "lengths": ((8, 16, 32, 64, 128, 256, 512), (8, 32, 128)),
    "batches": ((1, 2, 4, 8, 16, 32, 64), (1, 8)),
    "throughput_batches": ((1, 8), (1,)),
    "dtypes": (("float32", "bfloat16"), ("float32",)),
    "cell_seconds": (4.0, 1.0),
    "calls": (100, 20),
    "cold_starts": (3, 1),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options, and those of `compare`."""
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
    what = parser.add_argument_group("what is measured")
    option(
        what,
        "--model M",
        "a model's folder, or a published size with random weights, as bert-base-uncased; repeat it for others "
        "(default: six published sizes)",
        action="append",
    )
    option(what, "--repository DIR", "bundles to measure as they are", Path)
    option(what, "--task TASK", "of the folders (default: found in their configuration)", "")
    option(what, "--lengths N,…", "tokens (default: 8,16,32,64,128,256,512)", _numbers)
    option(what, "--batches N,…", "default: 1,2,4,8,16,32,64", _numbers)
    option(what, "--throughput-batches N,…", "of other dtypes and of mode throughput (default: 1,8)", _numbers)
    option(what, "--dtypes D,…", "the first is varied most (default: float32,bfloat16)", _words)
    option(what, "--backends B,…", "default: openvino", _words, default=("openvino",))
    option(what, "--cores N,…", "replicas that share the machine (default: 1 and one for each CPU)", _numbers)
    option(
        what,
        "--modes M,…",
        "latency: one caller; throughput: one for each core (default: both)",
        _words,
        default=("latency", "throughput"),
    )
    option(what, "--base-length N", "where batches, dtypes and cores vary (default: 128)", 128)
    option(what, "--product", "every combination (default: one thing is varied at a time)", dest="is_product")
    option(what, "--quick", "a look: two models, few cells, a second for each")
    how = parser.add_argument_group("how")
    option(how, "--cell-seconds S", "a cell ends after this long, with three calls at least (default: 4)", float)
    option(how, "--calls N", "fewest calls of a cell, if its time is enough (default: 100)", int)
    option(
        how,
        "--precision X",
        "measure until the interval of p95 is within this share on either side (default: 0.05)",
        0.05,
    )
    option(how, "--minutes M", "refuse to begin what takes longer (default: 60)", 60.0)
    option(how, "--cold-starts N", "starts of each model, 0 for none (default: 3)", int)
    option(how, "--fresh", "measure again what --out has from before", dest="is_fresh")
    option(
        how,
        "--cache DIR",
        "where compiled models are kept (default: ~/.cache/neuronpipe/benchmark)",
        Path("~/.cache/neuronpipe/benchmark"),
    )
    report = parser.add_argument_group("report")
    option(report, "--out DIR", "its folder; an interrupted run continues there", Path)
    option(report, "--prices FILE", "your prices, in the form of measure/benchmark/prices.json", Path)
    option(report, "--instance TYPE", "what this machine is (default: as it says itself)", "")
    option(report, "--p95-ms MS", "with --rate: name the cheapest way to meet both", float)
    option(report, "--rate R", "inputs a second", float)


def run(options: argparse.Namespace) -> None:
    """Measures. Raises SetupError.

    Exit codes: 0 done, 1 not one cell could be measured, 130 interrupted; the report is written in all cases."""
    for name, (usual, quick) in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    if options.repository and options.model == _DEFAULTS["model"][1]:
        options.model = ()
    costs, goal, request = _costs(options), _goal(options), _request(options)
    # Asked for before anything is measured: the report needs it.
    import matplotlib as _matplotlib  # noqa: F401

    from neuronpipe.measure.benchmark.costs import goal_table
    from neuronpipe.measure.benchmark.report import warnings_of, write_report
    from neuronpipe.measure.benchmark.run import Run

    run = Run(request, say)
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
    """Raises SetupError for options that are out of range."""
    from neuronpipe.measure.benchmark.matrix import MatrixRequest, find_models, make_matrix
    from neuronpipe.measure.benchmark.measuring import Effort
    from neuronpipe.measure.benchmark.run import RunRequest
    from neuronpipe.stages.neuron_executor.runtimes.host import available_cpus

    if options.out is None:
        raise SetupError("--out: is missing; give the folder of the report")
    limits = (
        ("cell_seconds", 0.01, 3600),
        ("calls", 2, 1_000_000),
        ("precision", 0.001, 1),
        ("minutes", 0.1, 100_000),
        ("cold_starts", 0, 100),
    )
    for name, low, high in limits:
        if not low <= getattr(options, name) <= high:  # false for NaN too
            raise SetupError(f"--{name.replace('_', '-')} {getattr(options, name):g}: must be from {low:g} to {high:g}")
    models = find_models(options.model, options.task.replace("-", "_"), options.repository)
    cores = options.cores or tuple(dict.fromkeys((1, available_cpus())))
    return made(
        RunRequest,
        options,
        matrix=make_matrix(made(MatrixRequest, options, models=models, cores=cores)),
        effort=made(Effort, options, seconds=options.cell_seconds),
        folder=options.out,
        cache=options.cache.expanduser(),
        command=shlex.join(["neuronpipe", *sys.argv[1:]]),
    )


def _costs(options: argparse.Namespace) -> "Costs":
    from neuronpipe.measure.benchmark.costs import DEFAULT_PRICES, THIS_MACHINE, Costs, read_prices
    from neuronpipe.measure.machine import instance_type
    from neuronpipe.stages.neuron_executor.runtimes.host import available_cpus

    prices = read_prices(options.prices or DEFAULT_PRICES)
    own = instance_type()
    if options.instance and options.instance not in prices.instances:
        say(f"WARNING: --instance {options.instance}: the prices of {prices.date} lack it; costs are left out")
    instance = options.instance or (own if own in prices.instances else "")
    return Costs(prices, prices.alike(available_cpus(), instance), instance or THIS_MACHINE)


def _goal(options: argparse.Namespace) -> "Goal | None":
    from neuronpipe.measure.benchmark.costs import Goal

    if (options.p95_ms is None) != (options.rate is None):
        raise SetupError("--p95-ms and --rate: give both, or neither")
    return None if options.p95_ms is None else Goal(options.p95_ms, options.rate)


def _compare(options: argparse.Namespace) -> None:
    """Exit codes: 0 nothing is worse, 1 something is, 2 the runs cannot be compared."""
    from neuronpipe.measure.benchmark.results import compare_results, compared_rows, differences, read_results

    if not 0 <= options.threshold < float("inf"):
        raise SetupError(f"--threshold {options.threshold:g}: must be 0 or more")
    before, after = read_results(options.before), read_results(options.after)
    compared = compare_results(before, after)
    for line in differences(before, after):
        say(f"WARNING: the runs differ in more than the code: {line}")
    print_table(compared_rows(compared, options.threshold))
    worse = [one.cell.name for one in compared if one.is_regression(options.threshold)]
    print(
        f"{len(compared)} cells compared, B to A: {len(worse)} worse by more than {options.threshold:.0%}, "
        f"{sum(one.is_improvement(options.threshold) for one in compared)} better"
    )
    if worse:
        sys.exit(1)


def _numbers(text: str) -> tuple[int, ...]:
    return _list_of(int, text)


def _words(text: str) -> tuple[str, ...]:
    return _list_of(str, text)


def _list_of(kind: Callable[[str], Any], text: str) -> tuple[Any, ...]:
    try:
        found = tuple(dict.fromkeys(kind(word.strip()) for word in text.split(",") if word.strip()))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers with commas") from None
    if not found:
        raise argparse.ArgumentTypeError("is empty")
    return found
