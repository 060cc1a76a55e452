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
from neuronpipe.cli.terminal import completed_by, milliseconds
from neuronpipe.core.errors import SetupError
from neuronpipe.measure.load import request as limits
from neuronpipe.measure.load.request import FORMS, PRIORITIES, GenerationLoad, Lengths, LoadRequest

HELP = "send load to a gateway and report latency, throughput and errors"
EXTRA = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `neuronpipe load`."""
    add_address(parser, "the gateway")
    add_tls(parser)
    add_key(parser)
    model = parser.add_argument("--model", required=True, metavar="M", help="the model's name")
    completed_by(model, complete_models)
    parser.add_argument("--version", default="", metavar="V", help="the model's version (default: the newest)")
    loop = parser.add_mutually_exclusive_group()
    loop.add_argument(
        "--concurrency",
        type=int,
        metavar="N",
        help=f"closed loop: callers that each wait for their answer, at most {limits.MAX_CONCURRENCY:,} (default: 1)",
    )
    loop.add_argument(
        "--rate",
        type=float,
        metavar="R",
        help=f"open loop: requests a second, sent without waiting for answers, at most {limits.MAX_RATE_PER_S:,}",
    )
    parser.add_argument(
        "--duration",
        type=float,
        default=10.0,
        metavar="S",
        help=f"seconds to measure, at most {limits.MAX_DURATION_S:,} (default: 10)",
    )
    parser.add_argument(
        "--warm-up",
        type=float,
        default=1.0,
        metavar="S",
        help=f"seconds of load before the measurement, at most {limits.MAX_WARM_UP_S:,} (default: 1)",
    )
    parser.add_argument(
        "--texts",
        type=Path,
        metavar="FILE",
        help="texts to send, one a line, UTF-8 (default: English, 33 tokens on average)",
    )
    parser.add_argument(
        "--deadline-ms",
        type=milliseconds,
        metavar="MS",
        help=f"deadline of each request, at most {limits.MAX_DEADLINE_MS:,}",
    )
    parser.add_argument("--priority", choices=PRIORITIES, help="priority of each request")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help=f"processes to send from, at most {limits.MAX_PROCESSES} (default: 1)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="seed of the arrival times and of the built-in texts (default: 0)",
    )
    _add_generation(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="write the figures as JSON; -: to standard output instead of the table"
    )


def run(options: argparse.Namespace) -> None:
    """Runs the load.

    Exit codes: 0 done, 1 no request was answered, 130 interrupted by Ctrl-C; the report is printed in all cases.
    """
    request = LoadRequest(
        target=options.target,
        model=options.model,
        version=options.version,
        concurrency=options.concurrency,
        rate_per_s=options.rate,
        duration_s=options.duration,
        warm_up_s=options.warm_up,
        texts=options.texts,
        deadline_ms=options.deadline_ms,
        priority=options.priority,
        processes=options.processes,
        seed=options.seed,
        tls=tls_files(options),
        generation=_read_generation(options),
    )
    _check_json(options.json)

    from neuronpipe.measure.load.report import table
    from neuronpipe.measure.load.run import run_load

    result = run_load(request, lambda line: print(line, file=sys.stderr, flush=True))
    figures = json.dumps(dataclasses.asdict(result), indent=2, allow_nan=False)
    print(table(result), file=sys.stderr if options.json == "-" else sys.stdout)
    if options.json == "-":
        print(figures)
    elif options.json is not None:
        _write(Path(options.json), figures + "\n")
    if result.is_broken_off:
        sys.exit(130)
    if not result.answers:
        sys.exit(1)


def _add_generation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "generated texts", f"Lengths in tokens are {FORMS}: all the same, uniform, or as those of real texts."
    )
    group.add_argument(
        "--generate", action="store_true", help="texts are generated and read as they come; these options are for it"
    )
    group.add_argument(
        "--prompt-tokens",
        metavar="LENGTHS",
        help="prompts of N tokens, made of random words of the texts (default: the texts as they are)",
    )
    group.add_argument("--output-tokens", metavar="LENGTHS", help="texts of exactly N tokens (default: 32)")
    group.add_argument(
        "--shared-prefix-tokens",
        type=int,
        metavar="N",
        help="N tokens before each prompt are the same in all (default: 0)",
    )
    group.add_argument(
        "--num-beams", type=int, metavar="N", help="beam search; of more than 1 texts come as a whole (default: 1)"
    )
    group.add_argument("--ttft-ms", type=milliseconds, metavar="MS", help="limit of goodput: time to first token")
    group.add_argument(
        "--itl-ms", type=milliseconds, metavar="MS", help="limit of goodput: time between a text's tokens, on average"
    )


def _read_generation(options: argparse.Namespace) -> GenerationLoad | None:
    """Raises SetupError."""
    fields: dict[str, Any] = {
        "prompt_tokens": _read_lengths(options.prompt_tokens, "--prompt-tokens"),
        "output_tokens": _read_lengths(options.output_tokens, "--output-tokens"),
        "shared_prefix_tokens": options.shared_prefix_tokens,
        "num_beams": options.num_beams,
        "first_token_limit_ms": options.ttft_ms,
        "token_limit_ms": options.itl_ms,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    if options.generate:
        return GenerationLoad(**given)
    if given:
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
    try:
        Path(file).open("a").close()
    except OSError as error:
        raise SetupError(f"--json {file}: {error.strerror}") from error


def _write(file: Path, content: str) -> None:
    try:
        file.write_text(content)
    except OSError as error:
        raise SetupError(f"--json {file}: {error.strerror}") from error
