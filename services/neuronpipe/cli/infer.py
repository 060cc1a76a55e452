"""`neuronpipe infer`: runs inputs and prints their results."""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from neuronpipe.cli.credentials import tls_files
from neuronpipe.cli.input_flags import EXAMPLES, example_of, has_inputs_in_texts
from neuronpipe.cli.request import add_request, add_target, read_requests
from neuronpipe.cli.terminal import print_table

if TYPE_CHECKING:
    from neuronpipe.api.v1.inference_pb2 import InferOutcome, InferRequest
    from neuronpipe.client import Client

HELP = "run one input or several, and print the results"
EXTRA = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_target(parser)
    add_request(parser)
    parser.add_argument(
        "--output",
        choices=("table", "json"),
        help="default: a table on a terminal, otherwise the response as JSON, of several inputs one a line",
    )
    parser.add_argument(
        "--example", action=_ShowExample, metavar="TASK", help="print an input of that task for --json, and end"
    )


def run(options: argparse.Namespace) -> None:
    """Prints the results; exits with 1 where one of several inputs failed. Raises SetupError, and the call's error."""
    from neuronpipe.api.v1.inference_pb2 import InferOutcome
    from neuronpipe.client import Client

    output = options.output or ("table" if sys.stdout.isatty() else "json")
    with Client(options.target, timeout_s=options.timeout_s, tls=tls_files(options)) as client:
        requests = read_requests(options, client)
        if len(requests) == 1 and not has_inputs_in_texts(options):
            outcomes, indent = iter([InferOutcome(response=client.infer(requests[0]))]), 2
        else:
            outcomes, indent = _outcomes(client, requests, options.timeout_s), None
        errors = _print_table(requests, outcomes) if output == "table" else _print_json(outcomes, indent)
    for error in errors:
        print(f"neuronpipe: {error}", file=sys.stderr)
    if errors:
        sys.exit(1)


def _outcomes(client: "Client", requests: "Sequence[InferRequest]", timeout_s: float) -> "Iterator[InferOutcome]":
    """What became of each request, in their order, as soon as it is known of all before."""
    early: dict[str, InferOutcome] = {}
    number = 0
    for answer in client.infer_stream(requests, timeout_s=timeout_s):
        early[answer.request_id] = answer.outcome
        while outcome := early.pop(str(number), None):
            number += 1
            yield outcome


def _print_json(outcomes: "Iterable[InferOutcome]", indent: int | None) -> list[str]:
    """Prints each as it comes; without an indent, on a line. Returns what to say of errors."""
    from google.protobuf import json_format

    errors = []
    for number, outcome in enumerate(outcomes, 1):
        if outcome.HasField("error"):
            errors.append(_failure(number, outcome))
        text = json_format.MessageToJson(
            outcome if outcome.HasField("error") else outcome.response,
            preserving_proto_field_name=True,
            ensure_ascii=False,
            always_print_fields_with_no_presence=True,
            indent=indent,
        )
        print(text, flush=True)
    return errors


def _print_table(requests: "Sequence[InferRequest]", outcomes: "Iterable[InferOutcome]") -> list[str]:
    """Prints a table of all. Returns what to say of errors."""
    from neuronpipe.cli.result_rows import result_rows

    found = list(outcomes)
    results = [None if outcome.HasField("error") else outcome.response.result for outcome in found]
    print_table(result_rows([request.input for request in requests], results))
    return [_failure(number, outcome) for number, outcome in enumerate(found, 1) if outcome.HasField("error")]


def _failure(number: int, outcome: "InferOutcome") -> str:
    return f"input {number}: {outcome.error.message}"


class _ShowExample(argparse.Action):
    """Ends the command like --help, so that no other option is required."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        task = str(values).replace("-", "_")
        if task not in EXAMPLES:
            parser.error(
                f"argument --example: there is no task {values!r} (there are: {', '.join(EXAMPLES).replace('_', '-')})"
            )
        print(example_of(task))
        parser.exit()
