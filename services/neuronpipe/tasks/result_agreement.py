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


def result_agreement(input: TaskInput, model: ModelSpec, result: TaskResult, other: TaskResult) -> float | None:
    """Returns the agreement of two results; None for a classifier with one label, and for texts drawn at random."""
    task = result.WhichOneof("task")
    if task is None or task != other.WhichOneof("task"):
        return 0.0
    first, second = getattr(result, task), getattr(other, task)
    field = first.DESCRIPTOR.fields[0].name
    if field == "labels" and "candidate_labels" not in NEEDED[task] and len(model.labels) == 1:
        return None
    generation = TASKS[task].generation if task in TASKS else None
    # The number of tokens, here 1, limits the length of a text and not its content.
    if generation and generation.complete(getattr(input, task), model, 1).do_sample:
        return None
    return float(_MEASURES[field](first, second) if field in _MEASURES else first == second)


def _best(items: str, *names: str) -> Callable[[Any, Any], float]:
    """Measures whether the best items of two results, if any, have the same values of these fields."""

    def best(result: Any) -> list[Any]:
        return [[getattr(item, name) for name in names] for item in getattr(result, items)[:1]]

    return lambda first, second: float(best(first) == best(second))


def _same_entities(first: Any, second: Any) -> float:
    """Returns the share of entities, or of tokens with a label, that both results contain."""
    first_entities, second_entities = (
        {(entity.label, entity.start, entity.end) for entity in result.entities} for result in (first, second)
    )
    all_entities = first_entities | second_entities
    return len(first_entities & second_entities) / len(all_entities) if all_entities else 1.0


def _same_text(first: Any, second: Any) -> float:
    """Returns the share of equal tokens at equal places, over all texts of a result."""
    longest = max(len(first.sequences), len(second.sequences))
    pairs = zip(first.sequences, second.sequences, strict=False)
    return sum(_same_share(text.token_ids, other.token_ids) for text, other in pairs) / longest if longest else 1.0


def _same_share(first: Sequence[Any], second: Sequence[Any]) -> float:
    longest = max(len(first), len(second))
    return sum(item == other for item, other in zip(first, second, strict=False)) / longest if longest else 1.0


def _of_each(read: Callable[[Any], Any], measure: Callable[[Any, Any], float]) -> Callable[[Any, Any], float]:
    """Measures two results by the values that `read` returns for each."""
    return lambda first, second: measure(read(first), read(second))


def _best_tokens(result: Any) -> list[int | None]:
    return [mask.tokens[0].token_id if mask.tokens else None for mask in result.masks]


def _embedding(result: Any) -> Vectors:
    """Returns the vectors, [vectors, dimensions]: 1 and -1 for binary precisions, steps from the middle for int8,
    uint8.
    """
    if not result.packed:
        numbers = np.array(result.embedding, np.float64)
    elif result.precision in _MIDDLES:
        dtype, middle = _MIDDLES[result.precision]
        numbers = np.frombuffer(result.packed, dtype) - middle
    else:
        numbers = 2.0 * np.unpackbits(np.frombuffer(result.packed, np.uint8)).astype(np.float64) - 1.0
    # Results of an image have one vector.
    return numbers.reshape(getattr(result, "vectors", 0) or 1, -1)


def _vectors(result: Any) -> Vectors:
    """Returns the vectors, [vectors, dimensions], without the scales of int8, which change no angle."""
    numbers = np.frombuffer(result.data, _DTYPES[result.type]).astype(np.float64)
    return numbers.reshape(-1, result.shape[-1]) if numbers.size else np.zeros((0, 1))


def _smallest_cosine(first: Vectors, second: Vectors) -> float:
    """Returns the smallest cosine of two vectors at the same place, at least 0. Two vectors of zeros are equal."""
    if first.shape != second.shape:
        return 0.0
    if not first.size:
        return 1.0
    lengths = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines = (first * second).sum(axis=1) / np.maximum(lengths, np.finfo(np.float64).tiny)
    both_empty = ~first.any(axis=1) & ~second.any(axis=1)
    return float(np.where(both_empty, 1.0, np.clip(cosines, 0, 1)).min())


def _weights_cosine(first: Any, second: Any) -> float:
    weights_of_results = [{weight.token_id: weight.weight for weight in result.weights} for result in (first, second)]
    tokens = sorted(weights_of_results[0].keys() | weights_of_results[1].keys())
    return _smallest_cosine(
        *(np.array([[weights.get(token, 0.0) for token in tokens]]) for weights in weights_of_results)
    )


def _scores_difference(first: Any, second: Any) -> float:
    """Returns 1 minus the largest difference of two cosine similarities, at least 0."""
    if len(first.scores) != len(second.scores):
        return 0.0
    differences = [abs(score - other) for score, other in zip(first.scores, second.scores, strict=True)]
    return max(0.0, 1.0 - max(differences, default=0.0))


# The first field of a result → the measure of its agreement.
_MEASURES: Mapping[str, Callable[[Any, Any], float]] = {
    "labels": _best("labels", "label"),
    "texts": _best("texts", "index"),
    "answers": _best("answers", "start", "end"),
    "entities": _same_entities,
    "masks": _of_each(_best_tokens, _same_share),
    "embedding": _of_each(_embedding, _smallest_cosine),
    "scores": _scores_difference,
    "weights": _weights_cosine,
    "data": _of_each(_vectors, _smallest_cosine),
    "sequences": _same_text,
    "tokens": _of_each(lambda result: [token.token_id for token in result.tokens], _same_share),
}
