"""Converts logits to scores, and chooses the best labels."""

import math
from collections.abc import Mapping
from typing import Literal

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import LabelScore, ScoreFunction
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import Array

ScoreFunctionName = Literal["softmax", "sigmoid", "none"]

_NAMES: dict["ScoreFunction.ValueType", ScoreFunctionName] = {
    ScoreFunction.SCORE_FUNCTION_SOFTMAX: "softmax",
    ScoreFunction.SCORE_FUNCTION_SIGMOID: "sigmoid",
    ScoreFunction.SCORE_FUNCTION_NONE: "none",
}
# Up to this number of labels Python's own numbers are faster than NumPy's arrays, by 8 µs for two labels.
_FEW_LABELS = 16
_NUMBERS = frozenset(ScoreFunction.values())


class ClassifierFacts(TaskFacts):
    """Facts about a classifier of whole inputs."""

    score_function: ScoreFunctionName = "softmax"
    moderation_categories: Mapping[str, str] = Field(
        {}, description="category of each label that tells harm, for OpenAI's moderations; empty: the labels themselves"
    )


def check_function(function: "ScoreFunction.ValueType") -> None:
    """Refuses an unknown function, which a newer client may send."""
    if function not in _NUMBERS:
        raise InvalidInput("function", f"{function} is not known")


def check_labels(model: ModelSpec, function: "ScoreFunction.ValueType", top_k: int) -> None:
    """Refuses more labels than the model has, and an unknown function."""
    if top_k > len(model.labels):
        raise InvalidInput("top_k", f"{top_k}, the model has {len(model.labels)} labels")
    check_function(function)


def best_labels(logits: Array, model: ModelSpec, function: "ScoreFunction.ValueType", top_k: int) -> list[LabelScore]:
    """Returns the `top_k` labels from `logits`, float32 [labels], best first."""
    default = ClassifierFacts.of(model).score_function
    if top_k == 1 and len(logits) <= _FEW_LABELS and _NAMES.get(function, default) == "softmax":
        numbers = logits.tolist()
        best = max(numbers)
        score = 1.0 / sum([math.exp(number - best) for number in numbers])
        return [LabelScore(label=model.labels[numbers.index(best)], score=score)]
    scores = scores_of(logits, function, default)
    top_k = min(top_k, len(scores))
    if top_k == 1:
        index = int(scores.argmax())
        return [LabelScore(label=model.labels[index], score=scores[index].item())]
    # Partitioned, not sorted: sorting the 1,000 labels of an image classifier takes 0.1 ms.
    least = np.partition(scores, -top_k)[-top_k]
    candidates = np.flatnonzero(scores >= least)
    # Labels of equal score stay in the model's order, as in the pipelines.
    best = candidates[np.argsort(-scores[candidates], kind="stable")][:top_k]
    return [
        LabelScore(label=model.labels[index], score=score)
        for index, score in zip(best.tolist(), scores[best].tolist(), strict=True)
    ]


def scores_of(logits: Array, function: "ScoreFunction.ValueType", default: ScoreFunctionName) -> Array:
    """Converts logits to scores, float32 of the same shape, by the requested function, or else by the default."""
    name = _NAMES.get(function, default)
    if name == "softmax":
        return softmax(logits)
    return sigmoid(logits) if name == "sigmoid" else logits


def softmax(logits: Array) -> Array:
    scores: Array = np.exp(logits - logits.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


def sigmoid(logits: Array) -> Array:
    # exp(-x) cannot overflow for a positive logit, exp(x) cannot for a negative logit.
    decayed: Array = np.exp(-np.abs(logits))
    scores: Array = np.where(logits >= 0, np.float32(1), decayed) / (1 + decayed)
    return scores
