"""Text classification: a text, or a pair of texts, to scores of the model's labels.

Equal to transformers' TextClassificationPipeline with `top_k` and `function_to_apply`.
"""

import heapq
from collections.abc import Sequence
from operator import itemgetter

from neuronpipe.api.v1.tasks_pb2 import LabelScore, TextClassificationInput, TextClassificationResult
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Arrays
from neuronpipe.tasks.base import Encoded, Task, TextTokenizer, check_text, check_truncation, encode_text, or_default
from neuronpipe.tasks.scores import check_function, scores_of


def check(input: TextClassificationInput, model: ModelSpec) -> None:
    """Raises InvalidInput."""
    check_text("text", input.text)
    if input.text_pair:
        check_text("text_pair", input.text_pair)
    if input.top_k > len(model.labels):
        raise InvalidInput("top_k", f"{input.top_k}, the model has {len(model.labels)} labels")
    check_function(input.function)
    check_truncation(input.truncation)


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
    scores = scores_of(outputs[0]["logits"], input.function, model.score_function or "softmax")
    ranked = zip(scores.tolist(), model.labels, strict=True)
    # Labels of equal score stay in the model's order, as in the pipeline.
    best = heapq.nlargest(input.top_k or 1, ranked, key=itemgetter(0))
    return TextClassificationResult(labels=[LabelScore(label=label, score=score) for score, label in best])


TASK = Task("text_classification", check, traits, encode, decode)
