"""`neuronpipe health`: asks a server for its health."""

import argparse

from neuronpipe.cli.request import add_address, add_key, add_tls, parse_timeout_s, tls_files
from neuronpipe.cli.terminal import option

HELP = "ask a server for its health; exits with 0 if it is serving"
EXTRA = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_address(parser, "any of the services")
    add_tls(parser)
    add_key(parser)
    option(
        parser,
        "--service S",
        "full name of a gRPC service; '' is the process alone (default: InferenceService if the server has it)",
    )
    option(parser, "--timeout-s S", "seconds to wait (default: 3)", parse_timeout_s, default=3.0)


def run(options: argparse.Namespace) -> None:
    """Prints the serving service. Raises Unavailable and SetupError."""
    from neuronpipe.rpc.client import check_health

    service = check_health(options.target, options.service, options.timeout_s, tls_files(options))
    print(f"{options.target}: {service or 'the process'} is serving")
