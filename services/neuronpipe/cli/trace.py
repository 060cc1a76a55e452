"""`neuronpipe trace`: sends one sampled request and shows where its time went."""

import argparse
from pathlib import Path

from neuronpipe.cli.request import add_request, add_target, connected, read_requests, tls_files
from neuronpipe.cli.terminal import option
from neuronpipe.core.errors import SetupError

HELP = "send one request and show its trace; the server needs --kept-traces"
EXTRA = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the command's options."""
    add_target(parser)
    add_request(parser)
    option(parser, "--warm-up N", "requests to send before the shown request (default: 3)", 3)
    option(parser, "--otlp FILE", "write the spans as OTLP JSON, which Jaeger's page can load", Path)


def run(options: argparse.Namespace) -> None:
    from neuronpipe.measure.waterfall import sample

    with connected(options) as client:
        requests = read_requests(options, client)
    if len(requests) > 1:
        raise SetupError(f"a trace is of one input, not of {len(requests)}")
    sample(
        requests[0],
        options.target,
        timeout_s=options.timeout_s,
        warm_up=options.warm_up,
        otlp=options.otlp,
        tls=tls_files(options),
    )
