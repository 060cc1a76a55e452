"""`neuronpipe accept`: its options, and the request. Imports its dependencies only when it runs."""

import argparse
import os
import sys
from pathlib import Path

from neuronpipe.cli.terminal import ending_on_sigterm
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.parts import BALANCES

HELP = "compile models, compare and measure them on this machine, and write a report"
EXTRA = "compile"

_SHAPES = ("1x128", "8x128")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="folders of models, or ids on the Hub: a small one and a base one"
    )
    parser.add_argument("--task", required=True, help="the task of all of them")
    parser.add_argument("--backend", required=True, choices=["neuronx", "openvino", "torch"])
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="the report's folder")
    parser.add_argument("--dtype", default="float32", help="default: float32")
    parser.add_argument(
        "--bucket",
        action="append",
        metavar="BATCHxTOKENS",
        help="shapes to measure, and to compile for neuronx (default: 1x128 and 8x128)",
    )
    parser.add_argument(
        "--pipeline-cores",
        type=int,
        default=1,
        metavar="N",
        help="cut each model into N parts, as when compiling",
    )
    parser.add_argument(
        "--pipeline-balance", default="time", choices=BALANCES, help="what is to be equal in all parts (default: time)"
    )
    parser.add_argument("--cores", default=argparse.SUPPRESS, help="how many cores, or which, as 0-1 (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, metavar="S", help="how long to measure each row (default: 10)"
    )
    parser.add_argument(
        "--price-per-hour",
        type=float,
        default=0.0,
        metavar="USD",
        help="price of this machine, for the cost of a million",
    )


def run(options: argparse.Namespace) -> None:
    """Prints the path of the report. Raises SetupError for invalid options; later failures are in the report."""
    from neuronpipe.core.settings import read_options
    from neuronpipe.measure.acceptance_process import AcceptSettings
    from neuronpipe.stages.neuron_executor.runtimes.neuron import runtime_environment

    if not 0 < options.seconds < float("inf"):
        raise SetupError(f"--seconds {options.seconds}: must be more than 0")
    if not 0 <= options.price_per_hour < float("inf"):
        raise SetupError(f"--price-per-hour {options.price_per_hour}: must be 0 or more")
    settings = read_options(AcceptSettings, vars(options))
    environment = runtime_environment(settings.cores, os.environ)
    from neuronpipe.bundles.buckets import parse_bucket
    from neuronpipe.bundles.repository import default_name
    from neuronpipe.compiler import NO_BUCKETS, BucketRequest, CompileRequest, PipelineOptions
    from neuronpipe.measure.acceptance import AcceptRequest, accept

    words = tuple(dict.fromkeys(options.bucket or _SHAPES))
    models = [
        CompileRequest(
            source=source,
            task=options.task.replace("-", "_"),
            repository=options.out / "repository",
            name=default_name(source),
            backend=options.backend,
            dtype=options.dtype,
            buckets=BucketRequest(words) if options.backend == "neuronx" else NO_BUCKETS,
            pipeline=PipelineOptions(options.pipeline_cores, options.pipeline_balance),
        )
        for source in options.sources
    ]
    request = AcceptRequest(
        models=models,
        shapes=[parse_bucket(word) for word in words],
        folder=options.out,
        cores=settings.core_count,
        environment=environment,
        seconds=options.seconds,
        price_per_hour=options.price_per_hour,
    )
    with ending_on_sigterm():
        print(accept(request, lambda line: print(line, file=sys.stderr, flush=True)))
