"""The rows of a table that shows tasks' results."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
from neuronpipe.client.features import to_array

_SHOWN_NUMBERS = 6
_SHOWN_CHARACTERS = 60
_Rows = Iterable[Sequence[object]]


def result_rows(inputs: Sequence[TaskInput], results: Sequence[TaskResult | None]) -> list[list[str]]:
    """A heading and the rows of the results of one task; several results have the number of their input before.

    None stands for an input that failed: it has no row.
    """
    task = str(inputs[0].WhichOneof("task"))
    heading, rows_of = _TABLES[task]
    is_numbered = len(inputs) > 1
    rows = [["INPUT"] * is_numbered + heading.split()]
    for number, (input, result) in enumerate(zip(inputs, results, strict=True), 1):
        found = rows_of(getattr(result, task), getattr(input, task)) if result else ()
        rows += ([str(number)] * is_numbered + list(map(_cell, row)) for row in found)
    return rows


def _labels(result: Any, _: Any) -> _Rows:
    return ((one.score, one.label) for one in result.labels)


def _texts(result: Any, _: Any) -> _Rows:
    return ((one.score if one.HasField("score") else "", one.text) for one in result.sequences)


def _vector(result: Any, _: Any) -> _Rows:
    if result.packed:
        return [(f"{len(result.packed)} bytes", _numbers(result.packed))]
    return [(len(result.embedding), _numbers(result.embedding))]


_TABLES: Mapping[str, tuple[str, Callable[[Any, Any], _Rows]]] = {
    "text_classification": ("SCORE LABEL", _labels),
    "zero_shot_classification": ("SCORE LABEL", _labels),
    "image_classification": ("SCORE LABEL", _labels),
    "zero_shot_image_classification": ("SCORE LABEL", _labels),
    "sentence_embedding": ("SHAPE VECTOR", _vector),
    "image_embedding": ("SHAPE VECTOR", _vector),
    "feature_extraction": ("SHAPE VECTOR", lambda result, _: [_features(to_array(result))]),
    "sentence_similarity": ("SCORE TEXT", lambda result, given: zip(result.scores, given.texts, strict=True)),
    "rerank": (
        "SCORE INDEX TEXT",
        lambda result, given: ((one.score, one.index, given.texts[one.index]) for one in result.texts),
    ),
    "question_answering": (
        "SCORE START END ANSWER",
        lambda result, _: ((one.score, one.start, one.end, one.text) for one in result.answers),
    ),
    "token_classification": (
        "SCORE LABEL START END TEXT",
        lambda result, _: ((one.score, one.label, one.start, one.end, one.text) for one in result.entities),
    ),
    "fill_mask": (
        "SCORE MASK TOKEN",
        lambda result, _: (
            (one.score, number, one.token) for number, mask in enumerate(result.masks, 1) for one in mask.tokens
        ),
    ),
    "text_generation": ("SCORE TEXT", _texts),
    "summarization": ("SCORE TEXT", _texts),
    "translation": ("SCORE TEXT", _texts),
    "multi_vector_embedding": ("SHAPE VECTOR", lambda result, _: [_features(to_array(result))]),
    "sparse_embedding": (
        "WEIGHT ID TOKEN",
        lambda result, _: ((one.weight, one.token_id, one.token) for one in result.weights),
    ),
    "tokenization": (
        "ID SPECIAL START END TEXT",
        lambda result, _: (
            (one.token_id, "yes" if one.is_special else "", one.start, one.end, one.text) for one in result.tokens
        ),
    ),
    "detokenization": ("TEXT", lambda result, _: [(result.text,)]),
}


def _features(vectors: Any) -> Sequence[object]:
    return "x".join(map(str, vectors.shape)), _numbers(vectors.flat)


def _numbers(vector: Iterable[float]) -> str:
    """The first numbers of a vector."""
    shown = [_cell(float(number)) for number in islice(vector, _SHOWN_NUMBERS + 1)]
    return " ".join(shown[:_SHOWN_NUMBERS]) + " …" * (len(shown) > _SHOWN_NUMBERS)


def _cell(value: object) -> str:
    """A value for a terminal: what a text or a label has of control characters stays out of it."""
    if isinstance(value, float):
        return f"{value:.4f}"
    text = " ".join("".join(one if one.isprintable() else " " for one in str(value)).split())
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 1]}…"
