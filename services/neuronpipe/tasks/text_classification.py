"""Text classification: a text, or a pair of texts, to scores of the model's labels.

Equal to transformers' TextClassificationPipeline with `top_k` and `function_to_apply`.
"""

from collections.abc import Sequence

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import LabelScore, ScoreFunction, TextClassificationInput, TextClassificationResult
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, ScoreFunctionName
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.tasks.base import Encoded, Task, TextTokenizer, check_text, check_truncation, encode_text, or_default

_FUNCTIONS: dict["ScoreFunction.ValueType", ScoreFunctionName] = {
    ScoreFunction.SCORE_FUNCTION_SOFTMAX: "softmax",
    ScoreFunction.SCORE_FUNCTION_SIGMOID: "sigmoid",
    ScoreFunction.SCORE_FUNCTION_NONE: "none",
}
_FUNCTION_NUMBERS = frozenset(ScoreFunction.values())


def check(input: TextClassificationInput, model: ModelSpec) -> None:
    """Raises InvalidInput."""
    check_text("text", input.text)
    if input.text_pair:
        check_text("text_pair", input.text_pair)
    check_labels(model, input.function, input.top_k)
    check_truncation(input.truncation)


def check_labels(model: ModelSpec, function: "ScoreFunction.ValueType", top_k: int) -> None:
    """Refuses more labels than the model has, and a score function that is not known."""
    if top_k > len(model.labels):
        raise InvalidInput("top_k", f"{top_k}, the model has {len(model.labels)} labels")
    if function not in _FUNCTION_NUMBERS:
        raise InvalidInput("function", f"{function} is not known")


def traits(input: TextClassificationInput) -> tuple[str | int, ...]:
    """What of an input its encoding depends on."""
    return input.text, input.text_pair, or_default(input.truncation)


def encode(input: TextClassificationInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """One sequence of the text, or of the pair."""
    return encode_text(tokenizer, model, input.text, input.text_pair or None, input.truncation)


def decode(
    input: TextClassificationInput, model: ModelSpec, annotations: Sequence[Arrays], outputs: Sequence[Arrays]
) -> TextClassificationResult:
    """The best labels from `logits`, float32 [labels]."""
    return TextClassificationResult(labels=best_labels(outputs[0]["logits"], model, input.function, input.top_k or 1))


def best_labels(logits: Array, model: ModelSpec, function: "ScoreFunction.ValueType", top_k: int) -> list[LabelScore]:
    """The `top_k` labels from `logits`, float32 [labels], best first."""
    scores = _scores(logits, _FUNCTIONS.get(function, model.score_function or "softmax"))
    # Not all are sorted: a classifier of images has 1,000 labels, of which that takes 0.1 ms.
    least = np.partition(scores, -top_k)[-top_k]
    candidates = np.flatnonzero(scores >= least)
    # Labels of equal score stay in the model's order, as in the pipelines.
    best = candidates[np.argsort(-scores[candidates], kind="stable")][:top_k]
    return [LabelScore(label=model.labels[index], score=score) for index, score in zip(best.tolist(), scores[best].tolist(), strict=True)]


def _scores(logits: Array, function: ScoreFunctionName) -> Array:
    if function == "sigmoid":
        # With a positive logit exp(-x) cannot overflow, with a negative one exp(x) cannot.
        decayed: Array = np.exp(-np.abs(logits))
        scores: Array = np.where(logits >= 0, np.float32(1), decayed) / (1 + decayed)
        return scores
    if function == "softmax":
        scores = np.exp(logits - logits.max())
        scores /= scores.sum()
        return scores
    return logits


TASK = Task("text_classification", check, traits, encode, decode)
