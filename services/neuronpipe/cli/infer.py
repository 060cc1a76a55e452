"""`neuronpipe infer`: runs one input and prints the response."""

import argparse

from neuronpipe.cli.examples import EXAMPLES, example_of
from neuronpipe.cli.request import add_request, add_target, read_request

HELP = "run one input and print the response as JSON"
EXTRA = ""


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_target(parser)
    add_request(parser)
    parser.add_argument("--example", action=_ShowExample, metavar="TASK", help="print an input of that task for --json, and end")


def run(options: argparse.Namespace) -> None:
    """Prints the response. Raises SetupError, and the request's error."""
    from google.protobuf import json_format

    from neuronpipe.client import Client

    request = read_request(options)
    with Client(options.target, timeout_s=options.timeout_s) as client:
        response = client.infer(request)
    print(
        json_format.MessageToJson(response, preserving_proto_field_name=True, ensure_ascii=False, always_print_fields_with_no_presence=True)
    )


class _ShowExample(argparse.Action):
    """Ends the command like --help, so that no other option is required."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: object, option_string: str | None = None
    ) -> None:
        task = str(values).replace("-", "_")
        if task not in EXAMPLES:
            parser.error(f"argument --example: there is no task {values!r} (there are: {', '.join(EXAMPLES).replace('_', '-')})")
        print(example_of(task))
        parser.exit()
