"""`neuronpipe check-deployment`: finds faults of a service's deployment before the service starts."""

import argparse

from neuronpipe.cli.serve import SERVICES, read_arguments
from neuronpipe.cli.terminal import option
from neuronpipe.core.errors import SetupError

HELP = "check settings, models, devices and limits of a service before it starts; exits with 2 where it could not run"
EXTRA = "server"


def add_options(parser: argparse.ArgumentParser) -> None:
    option(parser, "--model NAME[/VERSION]", "required model; repeatable", default=[], action="append", dest="models")
    option(parser, "service SERVICE", ", ".join(SERVICES), choices=SERVICES)
    option(parser, "settings ...", "options of `neuronpipe serve SERVICE`; see its --help", nargs=argparse.REMAINDER)


def run(options: argparse.Namespace) -> None:
    """Logs each problem, or that there is none. Raises SetupError with all problems."""
    _, _, options.extra = SERVICES[options.service]
    settings = read_arguments(options.service, options.settings, "check-deployment")
    from neuronpipe.core.logs import log, log_warning, start_logging
    from neuronpipe.deploy.checks import check_deployment

    start_logging(options.service)
    findings = check_deployment(settings, options.models)
    for problem in findings.problems:
        log_warning("the deployment is wrong", problem=problem)
    for warning in findings.warnings:
        log_warning("the deployment may fail later", problem=warning)
    if findings.problems:
        raise SetupError("; ".join(findings.problems))
    log("the deployment is right", models=[f"{key.name}/{key.version}" for key in findings.models])
