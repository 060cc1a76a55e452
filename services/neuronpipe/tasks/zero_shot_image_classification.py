"""Zero-shot image classification: scores of an image for the labels of the request.

The model makes vectors of images and texts (CLIP, SigLIP). Each label is put into a sentence, and the scores follow
from the cosines of the sentences and the image. Equal to transformers' ZeroShotImageClassificationPipeline with
`candidate_labels` and `hypothesis_template`, except that a sentence that is too long is an error by default.
"""

from typing import Literal

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import ZeroShotImageClassificationInput, ZeroShotImageClassificationResult
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import (
    Encoded,
    Readers,
    Task,
    check_image,
    check_truncation,
    encode_image,
    encode_text,
    traits_of,
)
from neuronpipe.tasks.many_texts import check_hypotheses, hypotheses, join, ranked_labels
from neuronpipe.tasks.scores import sigmoid, softmax
from neuronpipe.tasks.vectors import normalized, vector_of

# The pipeline's default.
_DEFAULT_TEMPLATE = "This is a photo of {}."


class ImageTextFacts(TaskFacts):
    """The conversion of the cosine of an image and a text into a score: scale, shift, and function."""

    scale: float
    shift: float = 0.0
    function: Literal["softmax", "sigmoid"] = "softmax"


def check(input: ZeroShotImageClassificationInput, model: ModelSpec) -> None:
    check_image(input.image)
    check_hypotheses(input.candidate_labels, input.hypothesis_template)
    check_truncation(input)


def encode(input: ZeroShotImageClassificationInput, readers: Readers, model: ModelSpec) -> Encoded:
    """Returns one sequence of the image's `pixels`, uint8 [3, height, width], and one of each label's sentence."""
    sentences = hypotheses(input.candidate_labels, input.hypothesis_template or _DEFAULT_TEMPLATE)
    texts = (
        encode_text(readers.tokenizer, model, sentence, None, input.truncation, f"candidate_labels[{index}]")
        for index, sentence in enumerate(sentences)
    )
    return join((encode_image(input.image, readers.read_image), *texts))


def decode(
    input: ZeroShotImageClassificationInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> ZeroShotImageClassificationResult:
    """Returns all labels, best first, from the vectors of the image and of each sentence."""
    labels = input.candidate_labels
    if len(outputs) != len(labels) + 1:
        raise InvalidInput("candidate_labels", f"{len(labels)} labels and an image for {len(outputs)} outputs")
    facts = ImageTextFacts.of(model)
    vectors = normalized(np.stack([vector_of(output) for output in outputs]))
    logits = (vectors[1:] @ vectors[0]) * np.float32(facts.scale) + np.float32(facts.shift)
    scores = softmax(logits) if facts.function == "softmax" else sigmoid(logits)
    return ZeroShotImageClassificationResult(labels=ranked_labels(labels, scores))


traits = traits_of("image", "hypothesis_template", "truncation", "candidate_labels")
TASK = Task(
    "zero_shot_image_classification", check, traits, encode, decode, ("candidate_labels",), ImageTextFacts, reads="both"
)
