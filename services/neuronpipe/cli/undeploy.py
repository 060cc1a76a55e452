"""`neuronpipe undeploy`: deletes an endpoint of `neuronpipe deploy`."""

import argparse

from neuronpipe.cli.deploy import add_place
from neuronpipe.cli.terminal import option, report

HELP = "delete an endpoint that `neuronpipe deploy` made, with everything that belongs to it"
EXTRA = "deploy"


def add_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "name NAME", "name of the endpoint")
    add_place(parser)


def run(options: argparse.Namespace) -> None:
    """Deletes the endpoint. Raises SetupError."""
    from neuronpipe.deploy.endpoint import take
    from neuronpipe.deploy.model import undeploying

    take(undeploying(options.to, options.name), report, is_dry=options.dry_run)
