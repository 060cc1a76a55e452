"""Zero-shot classification: scores of a text for the labels of the request.

The model is a model of natural language inference (NLI). Each label is put into a sentence, the hypothesis, and the
model scores how far the text entails it. Equal to transformers' ZeroShotClassificationPipeline with `candidate_labels`,
`hypothesis_template` and `multi_label`. Differences:

- Labels of equal score stay in the order of the request. The pipeline has no rule for them.
- If no label is called "entailment", the compiler refuses the model. The pipeline takes the last label.
"""

import numpy as np
from pydantic import Field

from neuronpipe.api.v1.tasks_pb2 import Truncation, ZeroShotClassificationInput, ZeroShotClassificationResult
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import (
    Encoded,
    Task,
    TextTokenizer,
    check_text,
    check_truncation,
    encode_text,
    or_default,
    sequence,
    side_of,
    traits_of,
)
from neuronpipe.tasks.many_texts import check_hypotheses, check_pairs, hypotheses, join, ranked_labels
from neuronpipe.tasks.scores import softmax

# The pipeline's default.
_DEFAULT_TEMPLATE = "This example is {}."


class ZeroShotFacts(TaskFacts):
    """Facts about a model of natural language inference."""

    entailment_id: int = Field(ge=0, description="the label that says that a text entails another")


def check(input: ZeroShotClassificationInput, model: ModelSpec) -> None:
    check_text("text", input.text)
    check_hypotheses(input.candidate_labels, input.hypothesis_template)
    check_pairs("text", input.text + input.hypothesis_template, "candidate_labels", input.candidate_labels)
    check_truncation(input)


def encode(input: ZeroShotClassificationInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence of the text and each label's hypothesis."""
    sentences = hypotheses(input.candidate_labels, input.hypothesis_template or _DEFAULT_TEMPLATE)
    return join(_encode_pair(input, tokenizer, model, index, sentence) for index, sentence in enumerate(sentences))


def decode(
    input: ZeroShotClassificationInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> ZeroShotClassificationResult:
    """Returns all labels, best first, from the `logits` of each sequence, float32 [labels]."""
    if len(outputs) != len(input.candidate_labels):
        raise InvalidInput("candidate_labels", f"{len(input.candidate_labels)} labels for {len(outputs)} outputs")
    logits = np.stack([output["logits"] for output in outputs])
    entailment = ZeroShotFacts.of(model).entailment_id
    if input.multi_label or len(logits) == 1:
        contradiction = -1 if entailment == 0 else 0
        scores = softmax(logits[:, [contradiction, entailment]])[:, 1]
    else:
        scores = softmax(logits[:, entailment])
    return ZeroShotClassificationResult(labels=ranked_labels(input.candidate_labels, scores))


def _encode_pair(
    input: ZeroShotClassificationInput, tokenizer: TextTokenizer, model: ModelSpec, index: int, hypothesis: str
) -> Encoded:
    if or_default(input.truncation) == Truncation.TRUNCATION_ERROR:
        name = f"text and candidate_labels[{index}]"
        return encode_text(tokenizer, model, input.text, hypothesis, input.truncation, name)
    encoded = tokenizer.encode_truncated(
        input.text, hypothesis, max_tokens=model.max_tokens, side=side_of(input.truncation), only_first=True
    )
    if len(encoded.token_ids) > model.max_tokens:
        tokens = tokenizer.count(hypothesis) + tokenizer.special_tokens(pair=True)
        takes = f"the model takes {model.token_limit} with the text"
        problem = f"its hypothesis has {tokens} tokens, special ones included; {takes}"
        raise InvalidInput(f"candidate_labels[{index}]", problem)
    return Encoded([sequence(encoded, model)], truncated_tokens=encoded.truncated_tokens)


traits = traits_of("text", "hypothesis_template", "truncation", "candidate_labels")
TASK = Task(
    "zero_shot_classification", check, traits, encode, decode, ("candidate_labels", "multi_label"), ZeroShotFacts
)
