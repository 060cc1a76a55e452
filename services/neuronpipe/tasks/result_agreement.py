"""The agreement of two results for one input: a number from 0 to 1, defined as in the compiler's accuracy.

Results contain less than the outputs that the compiler compares: sentence-similarity has scores and no vectors, rerank
has an order and no logits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import EmbeddingPrecision, FeatureType, TaskInput, TaskResult
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.task_inputs import NEEDED
from neuronpipe.tasks import TASKS

_DTYPES = {
    FeatureType.FEATURE_TYPE_FLOAT32: "<f4",
    FeatureType.FEATURE_TYPE_FLOAT16: "<f2",
    FeatureType.FEATURE_TYPE_INT8: "i1",
}
# The data type of a quantized vector, and the middle of its steps.
_MIDDLES = {
    EmbeddingPrecision.EMBEDDING_PRECISION_INT8: ("i1", -0.5),
    EmbeddingPrecision.EMBEDDING_PRECISION_UINT8: ("u1", 127.5),
}
Vectors = NDArray[np.float64]


def result_agreement(input: TaskInput, model: ModelSpec, one: TaskResult, other: TaskResult) -> float | None:
    """The agreement of two results; None for a classifier with one label, and for texts drawn at random."""
    task = one.WhichOneof("task")
    if task is None or task != other.WhichOneof("task"):
        return 0.0
    first, second = getattr(one, task), getattr(other, task)
    field = first.DESCRIPTOR.fields[0].name
    if field == "labels" and "candidate_labels" not in NEEDED[task] and len(model.labels) == 1:
        return None
    complete = TASKS[task].complete if task in TASKS else None
    # The number of tokens, here 1, limits the length of a text and not its content.
    if complete and complete(getattr(input, task), model, 1).do_sample:
        return None
    return float(_MEASURES[field](first, second) if field in _MEASURES else first == second)


def _same_best_label(one: Any, other: Any) -> bool:
    return bool([label.label for label in one.labels[:1]] == [label.label for label in other.labels[:1]])


def _same_best_text(one: Any, other: Any) -> bool:
    return bool([text.index for text in one.texts[:1]] == [text.index for text in other.texts[:1]])


def _same_best_answer(one: Any, other: Any) -> bool:
    first, second = ([(answer.start, answer.end) for answer in result.answers[:1]] for result in (one, other))
    return first == second


def _same_entities(one: Any, other: Any) -> float:
    """The share of entities, or of tokens with a label, that both results contain."""
    first, second = (
        {(entity.label, entity.start, entity.end) for entity in result.entities} for result in (one, other)
    )
    return len(first & second) / len(first | second) if first | second else 1.0


def _same_best_tokens(one: Any, other: Any) -> float:
    return _same_share(
        *([mask.tokens[0].token_id if mask.tokens else None for mask in result.masks] for result in (one, other))
    )


def _same_text(one: Any, other: Any) -> float:
    """The share of equal tokens at equal places, over all texts of a result."""
    texts = list(zip(one.sequences, other.sequences, strict=False))
    most = max(len(one.sequences), len(other.sequences))
    return sum(_same_share(first.token_ids, second.token_ids) for first, second in texts) / most if most else 1.0


def _same_tokens(one: Any, other: Any) -> float:
    return _same_share(*([token.token_id for token in result.tokens] for result in (one, other)))


def _same_share(one: Sequence[Any], other: Sequence[Any]) -> float:
    most = max(len(one), len(other))
    return sum(first == second for first, second in zip(one, other, strict=False)) / most if most else 1.0


def _embedding_cosine(one: Any, other: Any) -> float:
    return _smallest_cosine(*(_embedding(result) for result in (one, other)))


def _embedding(result: Any) -> Vectors:
    """The embedding, [1, dimensions]: 1 and -1 for binary precisions, steps from the middle for int8 and uint8."""
    if not result.packed:
        return np.array([result.embedding], np.float64)
    if result.precision in _MIDDLES:
        dtype, middle = _MIDDLES[result.precision]
        return np.frombuffer(result.packed, dtype)[np.newaxis] - middle
    bits = np.unpackbits(np.frombuffer(result.packed, np.uint8))
    return 2.0 * bits[np.newaxis].astype(np.float64) - 1.0


def _vectors_cosine(one: Any, other: Any) -> float:
    return _smallest_cosine(*(_vectors(result) for result in (one, other)))


def _vectors(result: Any) -> Vectors:
    """The vectors, [vectors, dimensions], without the scales of int8, which change no angle."""
    numbers = np.frombuffer(result.data, _DTYPES[result.type]).astype(np.float64)
    return numbers.reshape(-1, result.shape[-1]) if numbers.size else np.zeros((0, 1))


def _smallest_cosine(one: Vectors, other: Vectors) -> float:
    """The smallest cosine of two vectors at the same place, at least 0. Two vectors of zeros are equal."""
    if one.shape != other.shape:
        return 0.0
    if not one.size:
        return 1.0
    lengths = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    cosines = (one * other).sum(axis=1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    both_empty = ~one.any(axis=1) & ~other.any(axis=1)
    return float(np.where(both_empty, 1.0, np.clip(cosines, 0, 1)).min())


def _weights_cosine(weights: Any, other: Any) -> float:
    first, second = ({weight.token_id: weight.weight for weight in result.weights} for result in (weights, other))
    tokens = sorted(first.keys() | second.keys())
    if not tokens:
        return 1.0
    return _smallest_cosine(*(np.array([[weights.get(token, 0.0) for token in tokens]]) for weights in (first, second)))


def _scores_difference(one: Any, other: Any) -> float:
    """Returns 1 minus the largest difference of two cosine similarities, at least 0."""
    if len(one.scores) != len(other.scores):
        return 0.0
    differences = [abs(first - second) for first, second in zip(one.scores, other.scores, strict=True)]
    return max(0.0, 1.0 - max(differences, default=0.0))


# The first field of a result → the measure of its agreement.
_MEASURES: Mapping[str, Callable[[Any, Any], float]] = {
    "labels": _same_best_label,
    "texts": _same_best_text,
    "answers": _same_best_answer,
    "entities": _same_entities,
    "masks": _same_best_tokens,
    "embedding": _embedding_cosine,
    "scores": _scores_difference,
    "weights": _weights_cosine,
    "data": _vectors_cosine,
    "sequences": _same_text,
    "tokens": _same_tokens,
}
