"""`neuronpipe generate`: continues a prompt or a chat, summarizes or translates, and prints the text as it comes."""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from neuronpipe.cli.at_file import read_text
from neuronpipe.cli.completers import complete_at_file, complete_models, completed_by
from neuronpipe.cli.credentials import tls_files
from neuronpipe.cli.request import add_target, tasks_of
from neuronpipe.cli.table import print_table
from neuronpipe.core.errors import SetupError

if TYPE_CHECKING:
    from neuronpipe.api.v1.inference_pb2 import InferRequest, InferResponse
    from neuronpipe.api.v1.tasks_pb2 import GeneratedText, TokenLogprob
    from neuronpipe.client import Client

HELP = "continue a text or a chat, summarize or translate, and print the text as it comes"
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
    "no_repeat_ngram_size": (int, "no so many tokens in a row come twice"),
    "forced_bos_token_id": (int, "the first token of the text"),
    "forced_eos_token_id": (int, "the last token of a text that reaches --max-new-tokens"),
    "num_return_sequences": (
        int,
        "so many texts: with --num-beams the best ones, with --do-sample each drawn by itself; the first one is "
        "printed as it comes",
    ),
    "num_beams": (int, "search so many texts for the best one, which comes as a whole"),
    "length_penalty": (float, "with --num-beams: more than 0 for longer texts, less for shorter ones"),
    "top_logprobs": (int, "print the log probability of each token, and of so many of the best in its place"),
}
_EARLY_STOPPING = ("false", "true", "never")
_LANGUAGES = ("source_language", "target_language")
_TASKS_OF_TEXTS = ("summarization", "translation")


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
    messages = given.add_argument(
        "--messages",
        metavar="JSON",
        help="""a whole chat: '[{"role": "user", "content": "…"}]', or @FILE, or - for standard input""",
    )
    completed_by(messages, complete_at_file)
    text = given.add_argument(
        "--text", metavar="TEXT", help="the text to summarize or to translate, or @FILE, or - for standard input"
    )
    completed_by(text, complete_at_file)
    for name in _LANGUAGES:
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="LANGUAGE", help="of a translation, as the model names it"
        )
    parser.add_argument("--do-sample", action="store_true", default=None, help="draw tokens at random")
    for name, (kind, help) in _NUMBERS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="N" if kind is int else "X", help=help)
    parser.add_argument(
        "--early-stopping", choices=_EARLY_STOPPING, help="with --num-beams: when the search ends (default: false)"
    )
    parser.add_argument(
        "--stop-strings", action="extend", nargs="+", metavar="TEXT", help="end the text before one of these"
    )
    parser.add_argument(
        "--stop-token-ids", type=int, action="extend", nargs="+", metavar="ID", help="tokens that end the text, too"
    )
    parser.add_argument(
        "--bad-words-ids",
        type=int,
        action="append",
        nargs="+",
        metavar="ID",
        help="the tokens of a word that the text must not have; once for each word",
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

    from neuronpipe.client import Client

    with Client(options.target, timeout_s=options.timeout_s, tls=tls_files(options)) as client:
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
    from neuronpipe.api.v1.inference_pb2 import Priority
    from neuronpipe.api.v1.tasks_pb2 import EarlyStopping, Truncation
    from neuronpipe.client.generation import generation_request, text_request

    names = ("do_sample", *_NUMBERS, "stop_strings", "stop_token_ids", "bad_words_ids")
    given: dict[str, Any] = {name: value for name in names if (value := getattr(options, name)) is not None}
    if options.early_stopping:
        given["early_stopping"] = EarlyStopping.Value(f"EARLY_STOPPING_{options.early_stopping.upper()}")
    settings: dict[str, Any] = {
        "truncation": Truncation.Value(f"TRUNCATION_{options.truncation.upper()}"),
        "version": options.version,
        "priority": Priority.PRIORITY_UNSPECIFIED,
    }
    languages = {name: value for name in _LANGUAGES if (value := getattr(options, name)) is not None}
    if options.text is not None:
        task = "translation" if languages else _task_of_text(options, client)
        texts = {"text": read_text(options.text, "--text"), **languages}
        return text_request(task, options.model, texts, given, **settings)
    if languages:
        raise SetupError(f"--{next(iter(languages)).replace('_', '-')}: is for --text, which is translated")
    prompt = None if options.prompt is None else read_text(options.prompt, "--prompt")
    return generation_request(options.model, prompt, given, messages=_messages(options), **settings)


def _task_of_text(options: argparse.Namespace, client: "Client") -> str:
    tasks = tasks_of(client.get_model(options.model, options.version))
    if task := next((task for task in tasks if task in _TASKS_OF_TEXTS), None):
        return task
    raise SetupError(f"--text: model {options.model!r} does not summarize or translate; it has the task {tasks[0]}")


def _messages(options: argparse.Namespace) -> list[Any] | None:
    if options.message:
        return [{"role": role, "content": read_text(text, "--message")} for role, text in options.message]
    if options.messages is None:
        return None
    try:
        messages = json.loads(read_text(options.messages, "--messages"))
    except ValueError as error:
        raise SetupError(f"--messages: is not JSON: {error}") from error
    if not isinstance(messages, list) or not all(isinstance(one, dict) for one in messages):
        raise SetupError("--messages: must be a list of messages, each with a role and a content")
    return messages


def _print_rest(response: "InferResponse", *, has_text: bool) -> None:
    """Prints what did not come in chunks: the text of a beam search, other texts, and log probabilities."""
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
    best = "  ".join(f"{json.dumps(one.text)} {one.logprob:.3f}" for one in token.top)
    return [json.dumps(token.text), f"{token.logprob:.3f}", best]


def _printable(text: str) -> str:
    """Text for a terminal: of control characters only line breaks and tabs."""
    return "".join(one if one.isprintable() or one in "\n\t" else " " for one in text)


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
    parts = {
        "pre-process": timings.preprocess_ns,
        "queue": timings.predict_queue_ns,
        "prefill": timings.prefill_ns,
    }
    parts["hops"] = timings.first_token_ns - sum(parts.values())
    split = " + ".join(f"{name} {duration_ns / 1e6:.1f}" for name, duration_ns in parts.items())
    token_ms = timings.decode_ns / max(1, usage.generated_tokens + usage.discarded_tokens - 1) / 1e6
    gap_ms = timings.longest_gap_ns / 1e6
    return (
        f"{tokens}\nfirst token after {first_ms:.1f} ms = {split}; then {token_ms:.1f} ms a token, the longest gap "
        f"{gap_ms:.1f} ms"
    )
