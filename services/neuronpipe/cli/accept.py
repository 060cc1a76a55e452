"""`neuronpipe accept`: its options, and the request. Imports its dependencies only when it runs."""

import argparse
import os
from pathlib import Path

from neuronpipe.cli.terminal import ending_on_sigterm, made, option, report
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.parts import BALANCES

HELP = "compile models, compare and measure them on this machine, and write a report"
EXTRA = "compile"

_SHAPES = ("1x128", "8x128")


def add_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "sources SOURCE", "folders of models, or ids on the Hub: a small and a base model", nargs="+")
    option(parser, "--task TASK", "task of all models", required=True)
    option(parser, "--backend", "back end to measure", required=True, choices=["neuronx", "openvino", "torch"])
    option(parser, "--out DIR", "the report's folder", Path, required=True)
    option(parser, "--dtype DTYPE", "dtype to compile for (default: float32)", "float32")
    option(
        parser,
        "--bucket BATCHxTOKENS",
        "shapes to measure, and to compile for neuronx (default: 1x128 and 8x128)",
        action="append",
    )
    option(parser, "--pipeline-cores N", "cut each model into N parts, as when compiling", 1)
    option(parser, "--pipeline-balance", "quantity that parts share equally (default: time)", "time", choices=BALANCES)
    option(parser, "--cores CORES", "number of cores, or a range such as 0-1 (default: all)", argparse.SUPPRESS)
    option(parser, "--seconds S", "seconds to measure each row (default: 10)", 10.0)
    option(parser, "--price-per-hour USD", "price of this machine, for the cost of a million", 0.0)


def run(options: argparse.Namespace) -> None:
    """Prints the path of the report. Raises SetupError if an option is invalid; later failures are in the report."""
    from neuronpipe.core.settings import read_options
    from neuronpipe.measure.acceptance_process import AcceptSettings
    from neuronpipe.stages.neuron_executor.runtimes.neuron import runtime_environment

    if not 0 < options.seconds < float("inf"):
        raise SetupError(f"--seconds {options.seconds}: must be more than 0")
    if not 0 <= options.price_per_hour < float("inf"):
        raise SetupError(f"--price-per-hour {options.price_per_hour}: must be 0 or more")
    executor = read_options(AcceptSettings, vars(options)).executor
    environment = runtime_environment(executor.cores, os.environ)
    from neuronpipe.bundles.buckets import parse_bucket
    from neuronpipe.bundles.writing import default_name
    from neuronpipe.compiler import NO_BUCKETS, BucketRequest, CompileRequest, PipelineOptions
    from neuronpipe.measure.acceptance import AcceptRequest, accept

    words = tuple(dict.fromkeys(options.bucket or _SHAPES))
    models = [
        made(
            CompileRequest,
            options,
            source=source,
            task=options.task.replace("-", "_"),
            repository=options.out / "repository",
            name=default_name(source),
            buckets=BucketRequest(words) if options.backend == "neuronx" else NO_BUCKETS,
            pipeline=PipelineOptions(options.pipeline_cores, options.pipeline_balance),
        )
        for source in options.sources
    ]
    request = made(
        AcceptRequest,
        options,
        models=models,
        shapes=[parse_bucket(word) for word in words],
        folder=options.out,
        cores=executor.core_count,
        environment=environment,
    )
    with ending_on_sigterm():
        print(accept(request, report))
