"""`neuronpipe generate`: continues a prompt or a chat, summarizes or translates, and prints the text in parts."""

import argparse
import json
import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from neuronpipe.cli.request import add_target, complete_models, connected, flag, tasks_of
from neuronpipe.cli.terminal import complete_at_file, completed_by, option, print_table, read_text
from neuronpipe.core.errors import SetupError
from neuronpipe.core.generation_options import EARLY_STOPPING_WORDS, OPTIONS, OptionKind
from neuronpipe.core.task_inputs import GENERATING, SAMPLES

if TYPE_CHECKING:
    from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
    from neuronpipe.api.v1.tasks_pb2 import GeneratedText, TokenLogprob
    from neuronpipe.client import Client

HELP = "continue a text or a chat, summarize or translate, and print the text as it comes"
EXTRA = ""

_IDS = {"type": int, "nargs": "+", "metavar": "ID"}
# Kind of an option → arguments of its flag.
_VALUES: Mapping[OptionKind, Mapping[str, Any]] = {
    "int": {"type": int, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    "bool": {"action": argparse.BooleanOptionalAction},
    "words": {"choices": EARLY_STOPPING_WORDS},
    "token": {"type": int, "metavar": "ID"},
    "text": {"metavar": "TEXT"},
    "json": {"metavar": "JSON"},
    "texts": {"action": "extend", "nargs": "+", "metavar": "TEXT"},
    "tokens": {**_IDS, "action": "extend"},
    "sequences": {**_IDS, "action": "append"},
    "biases": {"type": json.loads, "metavar": "JSON"},
}
# Options whose text may come from a file.
_OF_FILES = tuple(name for name, entry in OPTIONS.items() if entry.kind in ("text", "json"))
_LANGUAGES = ("source_language", "target_language")
_TASKS_OF_TEXTS = [task for task in GENERATING if "text" in SAMPLES[task]]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    completed_by(option(parser, "--model M", "the model's name", required=True), complete_models)
    option(parser, "--version V", "the model's version (default: the newest)", "")
    prompt_group = parser.add_mutually_exclusive_group(required=True)
    prompt = option(prompt_group, "--prompt TEXT", "the text to continue, or @FILE, or - for standard input")
    completed_by(prompt, complete_at_file)
    option(
        prompt_group,
        "--message",
        "instead of a prompt, a message of a chat (roles: system, user, assistant), or @FILE; several in their order",
        action="append",
        nargs=2,
        metavar=("ROLE", "TEXT"),
    )
    messages = option(
        prompt_group,
        "--messages JSON",
        """a whole chat: '[{"role": "user", "content": "…"}]', or @FILE, or - for standard input""",
    )
    completed_by(messages, complete_at_file)
    text = option(prompt_group, "--text TEXT", "the text to summarize or translate, or @FILE, or - for standard input")
    completed_by(text, complete_at_file)
    for name in _LANGUAGES:
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="LANGUAGE", help="language of a translation, as the model names it"
        )
    for name, entry in OPTIONS.items():
        help = re.sub("`([a-z_]+)`", lambda match: flag(match[1]), entry.text)
        if entry.draws:
            help = f"with {flag('do_sample')}: {help}"
        if name in _OF_FILES:
            help += "; it may be @FILE"
        parser.add_argument(flag(name), help=help, **_VALUES[entry.kind])
    option(
        parser,
        "--truncation",
        "treatment of a prompt that is too long (default: error)",
        "error",
        choices=("error", "right", "left"),
    )
    option(parser, "--output", "json: each message, one a line", "text", choices=("text", "json"))


def run(options: argparse.Namespace) -> None:
    """Prints the text, and its figures on standard error. Raises SetupError, and the call's error."""
    from google.protobuf import json_format

    with connected(options) as client:
        has_text = False
        for event in client.stream(_request(options, client)):
            if options.output == "json":
                print(json_format.MessageToJson(event, preserving_proto_field_name=True, indent=None), flush=True)
            elif event.HasField("response"):
                _print_rest(event.response, has_text=has_text)
            elif event.chunk.sequence == 0:
                has_text = has_text or bool(event.chunk.text)
                print(_printable(event.chunk.text), end="", flush=True)


def _request(options: argparse.Namespace, client: "Client") -> "InferRequest":
    from neuronpipe.api.v1.tasks_pb2 import Truncation
    from neuronpipe.client.task_call import generation_request

    option_values = {name: getattr(options, name) for name in OPTIONS}
    generation_options: dict[str, Any] = {name: value for name, value in option_values.items() if value is not None}
    generation_options |= {
        name: read_text(generation_options[name], flag(name)) for name in _OF_FILES if name in generation_options
    }
    settings: dict[str, Any] = {
        "truncation": Truncation.Value(f"TRUNCATION_{options.truncation.upper()}"),
        "version": options.version,
    }
    languages = {name: value for name in _LANGUAGES if (value := getattr(options, name)) is not None}
    if options.text is not None:
        task = "translation" if languages else _task_of_text(options, client)
        texts = {"text": read_text(options.text, "--text"), **languages}
        return generation_request(task, options.model, texts, generation_options, **settings)
    if languages:
        raise SetupError(f"--{next(iter(languages)).replace('_', '-')}: is for --text, which is translated")
    prompt = None if options.prompt is None else read_text(options.prompt, "--prompt")
    fields = {"prompt": prompt, "messages": _messages(options)}
    return generation_request("text_generation", options.model, fields, generation_options, **settings)


def _task_of_text(options: argparse.Namespace, client: "Client") -> str:
    tasks = tasks_of(client.get_model(options.model, options.version))
    if task := next((task for task in tasks if task in _TASKS_OF_TEXTS), None):
        return task
    task = tasks[0].replace("_", "-")
    raise SetupError(f"--text: model {options.model!r} does not summarize or translate; it supports {task}")


def _messages(options: argparse.Namespace) -> list[Any] | None:
    if options.message:
        return [{"role": role, "content": read_text(text, "--message")} for role, text in options.message]
    if options.messages is None:
        return None
    try:
        messages = json.loads(read_text(options.messages, "--messages"))
    except ValueError as error:
        raise SetupError(f"--messages: is not JSON: {error}") from error
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise SetupError("--messages: must be a list of messages, each with a role and a content")
    return messages


def _print_rest(response: "InferResponse", *, has_text: bool) -> None:
    """Prints the output that did not come in chunks: the text of a beam search, other texts, and log probabilities."""
    first, *others = getattr(response.result, str(response.result.WhichOneof("task"))).sequences
    print("" if has_text else _printable(first.text))
    for text in others:
        print(f"---\n{_printable(text.text)}")
    for number, text in enumerate((first, *others), 1):
        if text.logprobs:
            print(f"\nlog probabilities{f' of text {number}' if others else ''}:")
            print_table([["TOKEN", "LOGPROB", "BEST"], *map(_logprob_row, text.logprobs)])
    sys.stdout.flush()
    print(_summary(response, [first, *others]), file=sys.stderr)


def _logprob_row(token: "TokenLogprob") -> list[str]:
    best = "  ".join(f"{json.dumps(candidate.text)} {candidate.logprob:.3f}" for candidate in token.top)
    return [json.dumps(token.text), f"{token.logprob:.3f}", best]


def _printable(text: str) -> str:
    """Returns text for a terminal, whose only control characters are line breaks and tabs."""
    return "".join(character if character.isprintable() or character in "\n\t" else " " for character in text)


def _summary(response: "InferResponse", texts: "Sequence[GeneratedText]") -> str:
    from neuronpipe.api.v1.tasks_pb2 import FinishReason

    timings, usage = response.timings, response.usage
    reasons = [
        FinishReason.Name(text.finish_reason).removeprefix("FINISH_REASON_").replace("_", " ").lower() for text in texts
    ]
    tokens = f"{usage.tokens} + {usage.generated_tokens} tokens; ended by: {', '.join(reasons)}"
    if scores := [f"{text.score:.4f}" for text in texts if text.HasField("score")]:
        tokens += f"; score: {', '.join(scores)}"
    first_ms = timings.first_token_ns / 1e6
    if len(texts) > 1:
        return f"{tokens}\nfirst token after {first_ms:.1f} ms, all after {timings.total_ns / 1e6:.1f} ms"
    parts = {"pre-process": timings.preprocess_ns, "queue": timings.predict_queue_ns, "prefill": timings.prefill_ns}
    parts["hops"] = timings.first_token_ns - sum(parts.values())
    split = " + ".join(f"{name} {duration_ns / 1e6:.1f}" for name, duration_ns in parts.items())
    token_ms = timings.decode_ns / max(1, usage.generated_tokens + usage.discarded_tokens - 1) / 1e6
    gap_ms = timings.longest_gap_ns / 1e6
    return (
        f"{tokens}\nfirst token after {first_ms:.1f} ms = {split}; then {token_ms:.1f} ms a token, the longest gap "
        f"{gap_ms:.1f} ms"
    )
