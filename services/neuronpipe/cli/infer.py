"""`neuronpipe infer`: runs inputs and prints their results."""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeAlias

from neuronpipe.cli.request import add_request, add_target, connected, has_inputs_in_texts, read_requests, sample_json
from neuronpipe.cli.terminal import option, print_table
from neuronpipe.core.task_inputs import SAMPLES

if TYPE_CHECKING:
    from neuronpipe.api.v1.inference_pb2 import InferOutcome, InferRequest
    from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
    from neuronpipe.client import Client

HELP = "run one input or several, and print the results"
EXTRA = ""

_SHOWN_NUMBERS = 6
_SHOWN_CHARACTERS = 60
_Rows: TypeAlias = Iterable[Sequence[object]]


def add_options(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_request(parser)
    option(
        parser,
        "--output",
        "output format (default: a table on a terminal, otherwise JSON, one line per input)",
        choices=("table", "json"),
    )
    option(parser, "--example TASK", "print an input of that task for --json, and end", action=_ShowExample)


def run(options: argparse.Namespace) -> None:
    """Prints the results; exits with 1 if one of several inputs failed. Raises SetupError, and the call's error."""
    from neuronpipe.api.v1.inference_pb2 import InferOutcome

    output = options.output or ("table" if sys.stdout.isatty() else "json")
    with connected(options) as client:
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
    """Yields the outcome of each request in order, when it is known for all before."""
    early: dict[str, InferOutcome] = {}
    number = 0
    for answer in client.infer_stream(requests, timeout_s=timeout_s):
        early[answer.request_id] = answer.outcome
        while outcome := early.pop(str(number), None):
            number += 1
            yield outcome


def _print_json(outcomes: "Iterable[InferOutcome]", indent: int | None) -> list[str]:
    """Prints each outcome as it comes; without an indent, on a line. Returns the messages of errors."""
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
    """Prints a table of all outcomes. Returns the messages of errors."""
    listed = list(outcomes)
    results = [None if outcome.HasField("error") else outcome.response.result for outcome in listed]
    print_table(result_rows([request.input for request in requests], results))
    if len(listed) == 1 and results[0]:
        times = listed[0].response.timings
        parts = {"answered in": times.total_ns, "pre-process": times.preprocess_ns, "prediction": times.predict_ns}
        parts["post-process"] = times.postprocess_ns
        print("\n" + ", ".join(f"{part} {duration_ns / 1e6:.2f} ms" for part, duration_ns in parts.items()))
    return [_failure(number, outcome) for number, outcome in enumerate(listed, 1) if outcome.HasField("error")]


def _failure(number: int, outcome: "InferOutcome") -> str:
    return f"input {number}: {outcome.error.message}"


def result_rows(inputs: "Sequence[TaskInput]", results: "Sequence[TaskResult | None]") -> list[list[str]]:
    """Returns a heading and the rows of the results of one task; several results begin with the number of their input.

    None stands for an input that failed: it has no row.
    """
    from neuronpipe.api.v1.tasks_pb2 import TaskResult

    task = str(inputs[0].WhichOneof("task"))
    [field, *_] = getattr(TaskResult(), task).DESCRIPTOR.fields
    heading, rows_of = _TABLES.get(field.name) or _plain_table(field)
    is_numbered = len(inputs) > 1
    rows = [[*(["INPUT"] if is_numbered else []), *heading.split()]]
    for number, (input, result) in enumerate(zip(inputs, results, strict=True), 1):
        own_rows = rows_of(getattr(result, task), getattr(input, task)) if result else ()
        rows += ([*([str(number)] if is_numbered else []), *map(_cell, row)] for row in own_rows)
    return rows


def _plain_table(field: Any) -> "tuple[str, Callable[[Any, Any], _Rows]]":
    """Returns the table of a field that _TABLES lacks: a row for each element, a column for each of its fields."""
    names = [part.name for part in field.message_type.fields] if field.message_type else []

    def rows_of(result: Any, _: Any) -> _Rows:
        value = getattr(result, field.name)
        return [
            [getattr(element, name) for name in names] or [element]
            for element in (value if field.is_repeated else [value])
        ]

    return " ".join(names or [field.name]).upper(), rows_of


def _vector(result: Any, _: Any) -> _Rows:
    if result.packed:
        return [(f"{len(result.packed)} bytes", _numbers(result.packed))]
    return [(len(result.embedding), _numbers(result.embedding))]


def _vectors(result: Any, _: Any) -> _Rows:
    from neuronpipe.client.task_call import to_array

    vectors: Any = to_array(result)
    return [("x".join(map(str, vectors.shape)), _numbers(vectors.flat))]


def _each(field: str, *names: str) -> "Callable[[Any, Any], _Rows]":
    """Returns a function that lists the elements of a result's `field` as rows of their fields `names`."""
    return lambda result, _: ([getattr(element, name) for name in names] for element in getattr(result, field))


# The first field of a result → the heading and the rows of its table.
_TABLES: "Mapping[str, tuple[str, Callable[[Any, Any], _Rows]]]" = {
    "labels": ("SCORE LABEL", _each("labels", "score", "label")),
    "embedding": ("SHAPE VECTOR", _vector),
    "data": ("SHAPE VECTOR", _vectors),
    "scores": ("SCORE TEXT", lambda result, task_input: zip(result.scores, task_input.texts, strict=True)),
    "texts": (
        "SCORE INDEX TEXT",
        lambda result, task_input: ((text.score, text.index, task_input.texts[text.index]) for text in result.texts),
    ),
    "answers": ("SCORE START END ANSWER", _each("answers", "score", "start", "end", "text")),
    "entities": ("SCORE LABEL START END TEXT", _each("entities", "score", "label", "start", "end", "text")),
    "masks": (
        "SCORE MASK TOKEN",
        lambda result, _: (
            (token.score, number, token.token) for number, mask in enumerate(result.masks, 1) for token in mask.tokens
        ),
    ),
    "sequences": (
        "SCORE TEXT",
        lambda result, _: (
            (sequence.score if sequence.HasField("score") else "", sequence.text) for sequence in result.sequences
        ),
    ),
    "weights": ("WEIGHT ID TOKEN", _each("weights", "weight", "token_id", "token")),
    "tokens": (
        "ID SPECIAL START END TEXT",
        lambda result, _: (
            (token.token_id, "yes" if token.is_special else "", token.start, token.end, token.text)
            for token in result.tokens
        ),
    ),
}


def _numbers(vector: Iterable[float]) -> str:
    shown = [_cell(float(number)) for number in islice(vector, _SHOWN_NUMBERS + 1)]
    return " ".join([*shown[:_SHOWN_NUMBERS], *(["…"] if len(shown) > _SHOWN_NUMBERS else [])])


def _cell(value: object) -> str:
    """Formats a value for a terminal. Removes the control characters of texts and labels."""
    if isinstance(value, float):
        return f"{value:.4f}"
    text = " ".join("".join(character if character.isprintable() else " " for character in str(value)).split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"


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
        if task not in SAMPLES:
            parser.error(
                f"argument --example: there is no task {values!r} (there are: {', '.join(SAMPLES).replace('_', '-')})"
            )
        print(sample_json(task))
        parser.exit()
