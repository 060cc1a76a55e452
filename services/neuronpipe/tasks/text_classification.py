"""Text classification: scores of the model's labels for a text or a pair of texts.

Equal to transformers' TextClassificationPipeline with `top_k` and `function_to_apply`.
"""

from neuronpipe.api.v1.tasks_pb2 import TextClassificationInput, TextClassificationResult
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import Encoded, Task, TextTokenizer, check_text, check_truncation, encode_text, traits_of
from neuronpipe.tasks.scores import ClassifierFacts, best_labels, check_labels


def check(input: TextClassificationInput, model: ModelSpec) -> None:
    check_text("text", input.text)
    if input.text_pair:
        check_text("text_pair", input.text_pair)
    check_labels(model, input.function, input.top_k)
    check_truncation(input)


def encode(input: TextClassificationInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence of the text, or of the pair."""
    return encode_text(tokenizer, model, input.text, input.text_pair or None, input.truncation)


def decode(
    input: TextClassificationInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> TextClassificationResult:
    """Returns the best labels from `logits`, float32 [labels]."""
    return TextClassificationResult(labels=best_labels(outputs[0]["logits"], model, input.function, input.top_k or 1))


traits = traits_of("text", "text_pair", "truncation")
_DECODED = ("top_k", "function")
TASK = Task("text_classification", check, traits, encode, decode, _DECODED, ClassifierFacts)
