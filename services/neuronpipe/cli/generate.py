"""`neuronpipe generate`: continues a prompt or a chat, and prints the text as it comes."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from neuronpipe.cli.at_file import read_text
from neuronpipe.cli.completers import complete_at_file, complete_models, completed_by
from neuronpipe.cli.request import add_target
from neuronpipe.cli.tls import tls_files

if TYPE_CHECKING:
    from neuronpipe.api.v1.inference_pb2 import InferResponse

HELP = "continue a text, and print it as it comes"
EXTRA = ""

_NUMBERS = {
    "max_new_tokens": (int, "most tokens to generate (default: the model's own, or 256)"),
    "min_new_tokens": (int, "so many tokens before one may end the text"),
    "temperature": (float, "with --do-sample: logits are divided by it"),
    "top_k": (int, "with --do-sample: draw from so many tokens; 0 for all"),
    "top_p": (float, "with --do-sample: draw from the most probable tokens that reach this together"),
    "min_p": (float, "with --do-sample: draw from tokens at least this share as probable as the best"),
    "seed": (int, "with --do-sample: the same seed gives the same text"),
    "repetition_penalty": (float, "makes tokens less probable that are there already; 1 changes nothing"),
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_target(parser)
    completed_by(parser.add_argument("--model", required=True, metavar="M", help="the model's name"), complete_models)
    parser.add_argument("--version", default="", metavar="V", help="the model's version (default: the newest)")
    given = parser.add_mutually_exclusive_group(required=True)
    prompt = given.add_argument(
        "--prompt", metavar="TEXT", help="the text to continue, or @FILE, or - for standard input"
    )
    completed_by(prompt, complete_at_file)
    given.add_argument(
        "--message",
        action="append",
        nargs=2,
        metavar=("ROLE", "TEXT"),
        help="in place of a prompt, a message of a chat (roles: system, user, assistant), or @FILE; several in their "
        "order",
    )
    parser.add_argument("--do-sample", action="store_true", default=None, help="draw tokens at random")
    for name, (kind, text) in _NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "X", help=text)
    parser.add_argument(
        "--stop-strings", action="extend", nargs="+", metavar="TEXT", help="end the text before one of these"
    )
    parser.add_argument(
        "--stop-token-ids", type=int, action="extend", nargs="+", metavar="ID", help="tokens that end the text, too"
    )
    parser.add_argument(
        "--truncation",
        choices=("error", "right", "left"),
        default="error",
        help="what happens to a prompt that is too long",
    )
    parser.add_argument("--output", choices=("text", "json"), default="text", help="json: each message, one a line")


def run(options: argparse.Namespace) -> None:
    """Prints the text, and on standard error what it took. Raises SetupError, and the call's error."""
    from google.protobuf import json_format

    from neuronpipe.api.v1.tasks_pb2 import Truncation
    from neuronpipe.client import Client

    names = ("do_sample", *_NUMBERS, "stop_strings", "stop_token_ids")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    prompt = None if options.prompt is None else read_text(options.prompt, "--prompt")
    messages = options.message and [
        {"role": role, "content": read_text(text, "--message")} for role, text in options.message
    ]
    truncation = Truncation.Value(f"TRUNCATION_{options.truncation.upper()}")
    with Client(options.target, timeout_s=options.timeout_s, tls=tls_files(options)) as client:
        events = client.generate(
            options.model, prompt, messages=messages, truncation=truncation, version=options.version, **given
        )
        for event in events:
            if options.output == "json":
                print(json_format.MessageToJson(event, preserving_proto_field_name=True, indent=None), flush=True)
            elif event.HasField("response"):
                print()
                print(_summary(event.response), file=sys.stderr)
            else:
                print(_printable(event.chunk.text), end="", flush=True)


def _printable(text: str) -> str:
    """Text for a terminal: of control characters only line breaks and tabs."""
    return "".join(one if one.isprintable() or one in "\n\t" else " " for one in text)


def _summary(response: "InferResponse") -> str:
    from neuronpipe.api.v1.tasks_pb2 import FinishReason

    timings, usage = response.timings, response.usage
    text = response.result.text_generation.sequences[0]
    reason = FinishReason.Name(text.finish_reason).removeprefix("FINISH_REASON_").replace("_", " ").lower()
    later = max(1, usage.generated_tokens - 1)
    return (
        f"{usage.tokens} + {usage.generated_tokens} tokens, the first after {timings.first_token_ns / 1e6:.1f} ms, "
        f"{timings.decode_ns / later / 1e6:.1f} ms a token; ended by: {reason}"
    )
