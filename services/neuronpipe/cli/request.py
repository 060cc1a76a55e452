"""The options of commands that call a gateway: its address, and the request."""

import argparse
import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.api.v1.inference_pb2 import InferRequest

# A day. Far larger numbers overflow in gRPC and count as a deadline that has passed.
_MAX_TIMEOUT_S = 86_400
_LAST_PORT = 65_535


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds --target and --timeout-s."""
    parser.add_argument("--target", required=True, type=parse_target, metavar="HOST:PORT", help="the gateway")
    parser.add_argument(
        "--timeout-s",
        type=parse_timeout_s,
        default=30.0,
        metavar="S",
        help=f"deadline in seconds, at most {_MAX_TIMEOUT_S:,} (default: 30)",
    )


def add_request(parser: argparse.ArgumentParser) -> None:
    """Adds the options that read_request reads."""
    parser.add_argument("--model", required=True, metavar="M", help="the model's name")
    parser.add_argument("--version", default="", metavar="V", help="the model's version (default: the newest)")
    input = parser.add_mutually_exclusive_group(required=True)
    input.add_argument("--json", metavar="INPUT", help="""a TaskInput, as '{"sentence-embedding": {"text": "…"}}'""")
    input.add_argument("--image", type=Path, metavar="FILE", help="a JPEG, PNG or WebP file to classify")


def read_request(options: argparse.Namespace) -> "InferRequest":
    """The request that add_request's options describe. Raises SetupError."""
    from neuronpipe.api.v1.inference_pb2 import InferRequest
    from neuronpipe.api.v1.tasks_pb2 import ImageClassificationInput, TaskInput
    from neuronpipe.cli.task_json import read_task_input

    try:
        if options.image:
            input = TaskInput(image_classification=ImageClassificationInput(image=options.image.read_bytes()))
        else:
            input = read_task_input(options.json)
    except SetupError as error:
        raise SetupError(f"--json: is not a valid TaskInput: {error}") from error
    except OSError as error:
        raise SetupError(f"--image {options.image}: cannot be read: {os.strerror(error.errno or errno.EIO)}") from error
    return InferRequest(model=options.model, version=options.version, input=input)


def parse_target(text: str) -> str:
    """The type of --target: HOST:PORT, with or without a gRPC scheme, or unix:PATH."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    host, _, port = text.rpartition(":")
    if not text.startswith("unix") and not (host and port.isascii() and port.isdigit() and 0 < int(port) <= _LAST_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} does not end with a port from 1 to {_LAST_PORT}: give HOST:PORT, as localhost:50050")
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
