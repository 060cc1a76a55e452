"""`neuronpipe trace`: sends one sampled request and shows where its time went."""

import argparse
from pathlib import Path

from neuronpipe.cli.request import add_request, add_target, read_request

HELP = "send one request and show its trace; the server needs --kept-traces"
EXTRA = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_target(parser)
    add_request(parser)
    parser.add_argument("--warm-up", type=int, default=3, metavar="N", help="requests sent before the one that is shown (default: 3)")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the waterfall as a page")
    parser.add_argument("--otlp", type=Path, metavar="FILE", help="write the spans as OTLP JSON, which Jaeger's page can load")


def run(options: argparse.Namespace) -> None:
    """Prints the waterfall. Raises SetupError, and the request's error once its trace is shown."""
    from neuronpipe.waterfall.sampling import sample

    sample(
        read_request(options), options.target, timeout_s=options.timeout_s, warm_up=options.warm_up, html=options.html, otlp=options.otlp
    )
