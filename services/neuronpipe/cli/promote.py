"""`neuronpipe registry promote`: its options, and how it reaches the gateways' metrics."""

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from neuronpipe.cli.request import tls_files
from neuronpipe.cli.terminal import ending_on_sigterm, seconds
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.bundles.registry import Operation, Registry, Signed
    from neuronpipe.measure.promotion import Numbers

# Between two looks at the metrics: front processes report once a second.
_LOOKS, _SHORTEST_LOOK_S, _LONGEST_LOOK_S = 20, 1.0, 10.0


def add_promotion(parser: argparse.ArgumentParser) -> None:
    """The options that `promote` reads."""
    parser.add_argument("version", metavar="TARGET", help="the alias or version to promote, as canary")
    parser.add_argument(
        "--guard",
        action="append",
        required=True,
        metavar="NAME=LIMIT",
        help="p99=1.2: answers take at most 1.2 times as long as stable's; p99=300ms: at most that long with either "
        "version; errors=0.1%%: at most that share of requests more fails; agreement=0.99: copies of requests agree "
        "so far; can be repeated",
    )
    parser.add_argument(
        "--metrics",
        action="append",
        required=True,
        metavar="URL",
        help="the page of the metrics of a gateway, as http://127.0.0.1:9464/metrics; repeated for each gateway",
    )
    parser.add_argument(
        "--steps", default="5,25,50,100", metavar="PERCENT,…", help="percentages of the requests (default: 5,25,50,100)"
    )
    parser.add_argument(
        "--for", dest="step_s", type=seconds, default="10m", metavar="TIME", help="of each step (default: 10m)"
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=100,
        metavar="N",
        help="a step continues until each version has answered N requests (default: 100)",
    )


def promote(
    options: argparse.Namespace,
    registry: "Registry",
    change: "Callable[[Operation, Signed], Registry]",
    signed: "Signed",
) -> None:
    """Promotes a version, or exits with 1 where a guard failed. Raises SetupError."""
    from neuronpipe.measure.promotion import INSTRUMENTS, Guard, GuardFailed, Plan, Promotion
    from neuronpipe.platform.telemetry.prometheus import scrape
    from neuronpipe.platform.tls import watched_tls
    from neuronpipe.rpc.client import key_metadata

    if options.requests < 1:
        raise SetupError("--requests: must be 1 or more")
    plan = Plan(
        model=options.model,
        target=options.version,
        guards=[Guard.parse(text) for text in options.guard],
        steps=_percentages(options.steps),
        step_s=options.step_s,
        least=options.requests,
        look_s=min(_LONGEST_LOOK_S, max(_SHORTEST_LOOK_S, options.step_s / _LOOKS)),
    )
    plain = [urlsplit(url).netloc for url in options.metrics if not url.startswith("https:")]
    files, key = tls_files(options), key_metadata(target=",".join(plain), is_encrypted=not plain)
    tls = watched_tls(files, "client").value.context if files else None

    def read() -> "list[Numbers]":
        return [scrape(url, INSTRUMENTS, key, tls) for url in options.metrics]

    read()  # before anything changes
    run = Promotion(plan, change, read, lambda line: print(line, flush=True), signed)
    with ending_on_sigterm():
        try:
            run.run(registry)
        except GuardFailed as failure:
            print(f"neuronpipe: {options.version} is moved back: {failure}", file=sys.stderr)
            sys.exit(1)


def _percentages(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError:
        raise SetupError(f"--steps {text!r}: must be percentages with commas, as in 5,25,50,100") from None
