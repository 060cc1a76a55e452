"""`neuronpipe load`: its options, and the output of its report.

The load generator is imported only when the command runs, because every command builds the parsers of all.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from neuronpipe.cli.request import add_address, add_key, add_tls, complete_models, tls_files
from neuronpipe.cli.terminal import completed_by, made, milliseconds, option, report
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import reporting_os_errors
from neuronpipe.measure.load import request as limits
from neuronpipe.measure.load.request import FORMS, PRIORITIES, GenerationLoad, Lengths, LoadRequest

HELP = "send load to a gateway and report latency, throughput and errors"
EXTRA = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    add_address(parser, "the gateway")
    add_tls(parser)
    add_key(parser)
    model = option(parser, "--model M", "the model's name", required=True)
    completed_by(model, complete_models)
    option(parser, "--version V", "the model's version (default: the newest)", "")
    loop = parser.add_mutually_exclusive_group()
    option(
        loop,
        "--concurrency N",
        f"closed loop: callers that each wait for their answer, at most {limits.MAX_CONCURRENCY:,} (default: 1)",
        int,
    )
    option(
        loop,
        "--rate R",
        f"open loop: requests a second, sent without waiting for answers, at most {limits.MAX_RATE_PER_S:,}",
        float,
        dest="rate_per_s",
    )
    option(
        parser,
        "--duration S",
        f"seconds to measure, at most {limits.MAX_DURATION_S:,} (default: 10)",
        10.0,
        dest="duration_s",
    )
    option(
        parser,
        "--warm-up S",
        f"seconds of load before the measurement, at most {limits.MAX_WARM_UP_S:,} (default: 1)",
        1.0,
        dest="warm_up_s",
    )
    option(parser, "--texts FILE", "texts to send, one a line, UTF-8 (default: English, 33 tokens on average)", Path)
    option(parser, "--deadline-ms MS", f"deadline of each request, at most {limits.MAX_DEADLINE_MS:,}", milliseconds)
    option(parser, "--priority", "priority of each request", choices=PRIORITIES)
    option(parser, "--processes N", f"processes to send from, at most {limits.MAX_PROCESSES} (default: 1)", 1)
    option(parser, "--seed N", "seed of the arrival times and of the built-in texts (default: 0)", 0)
    _add_generation(parser)
    option(parser, "--json FILE", "write the figures as JSON; -: to standard output instead of the table")


def run(options: argparse.Namespace) -> None:
    """Runs the load.

    Exit codes: 0 done, 1 no request was answered, 130 interrupted by Ctrl-C; the report is printed in all cases.
    """
    request = made(LoadRequest, options, tls=tls_files(options), generation=_read_generation(options))
    _check_json(options.json)

    from neuronpipe.measure.load.report import table
    from neuronpipe.measure.load.run import run_load

    result = run_load(request, report)
    figures = json.dumps(dataclasses.asdict(result), indent=2, allow_nan=False)
    print(table(result), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json == "-":
        print(figures)
    elif options.json is not None:
        with reporting_os_errors(f"--json {options.json}"):
            Path(options.json).write_text(figures + "\n")
    if result.is_broken_off:
        sys.exit(130)
    if not result.answers:
        sys.exit(1)


def _add_generation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "generated texts", f"Lengths in tokens are {FORMS}: all the same, uniform, or as those of real texts."
    )
    option(group, "--generate", "generate texts and read them in parts; the options below need it")
    option(
        group,
        "--prompt-tokens LENGTHS",
        "prompts of N tokens, made of random words of the texts (default: the texts as they are)",
    )
    option(group, "--output-tokens LENGTHS", "texts of exactly N tokens (default: 32)")
    option(group, "--shared-prefix-tokens N", "N tokens begin all prompts (default: 0)", int)
    option(group, "--num-beams N", "beams of the search; more than 1: texts come as a whole (default: 1)", int)
    option(group, "--ttft-ms MS", "limit of goodput: time to first token", milliseconds)
    option(group, "--itl-ms MS", "limit of goodput: time between a text's tokens, on average", milliseconds)


def _read_generation(options: argparse.Namespace) -> GenerationLoad | None:
    """Returns the load of generated texts; None for whole answers. Raises SetupError."""
    fields: dict[str, Any] = {
        "prompt_tokens": _read_lengths(options.prompt_tokens, "--prompt-tokens"),
        "output_tokens": _read_lengths(options.output_tokens, "--output-tokens"),
        "shared_prefix_tokens": options.shared_prefix_tokens,
        "num_beams": options.num_beams,
        "first_token_limit_ms": options.ttft_ms,
        "token_limit_ms": options.itl_ms,
    }
    set_fields = {name: value for name, value in fields.items() if value is not None}
    if options.generate:
        return GenerationLoad(**set_fields)
    if set_fields:
        raise SetupError(
            "--prompt-tokens, --output-tokens, --shared-prefix-tokens, --num-beams, --ttft-ms and --itl-ms are for "
            "--generate"
        )
    return None


def _read_lengths(text: str | None, option: str) -> Lengths | None:
    return None if text is None else Lengths.parse(text, option)


def _check_json(file: str | None) -> None:
    """Checks before the run that its figures can be written."""
    if file is None or file == "-":
        return
    if not file:
        raise SetupError("--json: the filename is empty")
    with reporting_os_errors(f"--json {file}"):
        Path(file).open("a").close()
