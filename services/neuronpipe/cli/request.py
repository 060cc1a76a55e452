"""The options of commands that call a gateway: its address, and the request."""

import argparse
from typing import TYPE_CHECKING

from neuronpipe.cli.at_file import read_text
from neuronpipe.cli.credentials import add_key, add_tls
from neuronpipe.cli.input_flags import NEEDED, add_input_flags, choose_task, flag, make_inputs, read_fields
from neuronpipe.cli.parser import complete_models, completed_by
from neuronpipe.core.addresses import unix_path
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.api.v1.inference_pb2 import InferRequest
    from neuronpipe.api.v1.models_pb2 import Model
    from neuronpipe.client import Client

# A day. Far larger numbers overflow in gRPC and count as a deadline that has passed.
_MAX_TIMEOUT_S = 86_400
_LAST_PORT = 65_535


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds --target, --timeout-s, and the options of TLS and of the key."""
    parser.add_argument("--target", required=True, type=parse_target, metavar="HOST:PORT", help="the gateway")
    add_tls(parser)
    add_key(parser)
    parser.add_argument(
        "--timeout-s",
        type=parse_timeout_s,
        default=30.0,
        metavar="S",
        help=f"deadline in seconds, at most {_MAX_TIMEOUT_S:,} (default: 30)",
    )


def add_request(parser: argparse.ArgumentParser, *, is_required: bool = True) -> None:
    """Adds the options that read_requests reads."""
    model = parser.add_argument("--model", required=is_required, metavar="M", help="the model's name")
    completed_by(model, complete_models)
    parser.add_argument("--version", default="", metavar="V", help="the model's version (default: the newest)")
    parser.add_argument(
        "--task",
        choices=[task.replace("_", "-") for task in NEEDED],
        metavar="TASK",
        help="the task of the input (default: the first of the model's that takes these flags)",
    )
    parser.add_argument(
        "--json",
        metavar="INPUT",
        help="""in place of other flags: a TaskInput, as '{"sentence-embedding": {"text": "…"}}', or @FILE, or -""",
    )
    add_input_flags(parser)


def read_requests(options: argparse.Namespace, client: "Client") -> "list[InferRequest]":
    """The requests that add_request's options describe, all of one task.

    Asks the gateway for the model's tasks where the options do not say the task. Raises SetupError, and the errors of
    that call.
    """
    from neuronpipe.api.v1.inference_pb2 import InferRequest
    from neuronpipe.cli.task_json import read_task_input

    fields = read_fields(options)
    if options.json is not None:
        if fields or options.task:
            raise SetupError(f"--json: not with {flag(next(iter(fields), 'task'))}; the JSON has all of the input")
        text = read_text(options.json, "--json")
        try:
            inputs = [read_task_input(text)]
        except SetupError as error:
            raise SetupError(f"--json: is not a valid TaskInput: {error}") from error
    elif not fields:
        raise SetupError("there is no input: give its fields, such as --text, or --json")
    else:
        if options.task:
            tasks, whose = [options.task.replace("-", "_")], f"--task {options.task}"
        else:
            tasks, whose = tasks_of(client.get_model(options.model, options.version)), f"model {options.model!r}"
        inputs = make_inputs(choose_task(tasks, fields, whose), fields)
    return [InferRequest(model=options.model, version=options.version, input=input) for input in inputs]


def tasks_of(model: "Model") -> list[str]:
    """A model's tasks, with the one first that it was compiled for."""
    return list(dict.fromkeys([model.task, *model.tasks]))


def parse_target(text: str) -> str:
    """The type of --target: HOST:PORT, with or without a gRPC scheme, or unix:PATH."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    try:
        if unix_path(text):
            return text
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT):
        raise argparse.ArgumentTypeError(
            f"{text!r} does not end with a port from 1 to {_LAST_PORT}: give HOST:PORT, as localhost:50050, "
            "or unix:PATH"
        )
    return text


def parse_timeout_s(text: str) -> float:
    """The type of --timeout-s."""
    try:
        timeout_s = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < timeout_s <= _MAX_TIMEOUT_S:  # false for NaN too
        raise argparse.ArgumentTypeError(f"{text}: must be more than 0 and at most {_MAX_TIMEOUT_S:,}")
    return timeout_s
