"""Tasks of an image alone: scores of the model's labels, and the image's vector.

Image classification equals transformers' ImageClassificationPipeline with `top_k` and `function_to_apply`, with its
image processor on Pillow. Three cases are refused here: the pipeline takes the first image of an animation, treats a
`top_k` beyond the number of labels as all, and reads files of any format and size.

Image embedding equals the `pooler_output` of transformers' image-feature-extraction pipeline with `pool`, and for
models of images and texts the result of `get_image_features`. Vectors are scaled to length 1 unless the caller asks for
the original length.
"""

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import (
    ImageClassificationInput,
    ImageClassificationResult,
    ImageEmbeddingInput,
    ImageEmbeddingResult,
)
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import Encoded, ImageReader, Task, check_image, encode_image, traits_of
from neuronpipe.tasks.scores import ClassifierFacts, best_labels, check_labels
from neuronpipe.tasks.vectors import VECTOR_OPTIONS, EmbeddingFacts, check_vector_options, vector_of, vectors_result

# The pipeline's default.
_TOP_K = 5


def check_classification(input: ImageClassificationInput, model: ModelSpec) -> None:
    check_image(input.image)
    check_labels(model, input.function, input.top_k)


def check_embedding(input: ImageEmbeddingInput, model: ModelSpec) -> None:
    check_image(input.image)
    check_vector_options(input, model)


def encode(input: ImageClassificationInput | ImageEmbeddingInput, read_image: ImageReader, model: ModelSpec) -> Encoded:
    return encode_image(input.image, read_image)


def decode_classification(
    input: ImageClassificationInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> ImageClassificationResult:
    """Returns the best labels from `logits`, float32 [labels]."""
    top_k = input.top_k or min(_TOP_K, len(model.labels))
    return ImageClassificationResult(labels=best_labels(outputs[0]["logits"], model, input.function, top_k))


def decode_embedding(
    input: ImageEmbeddingInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> ImageEmbeddingResult:
    """Returns the vector from the graph's output."""
    return vectors_result(ImageEmbeddingResult, vector_of(outputs[0])[np.newaxis], input, model)


_TRAITS = traits_of("image")
_LABELS = "image_classification", check_classification, _TRAITS, encode, decode_classification
_VECTORS = "image_embedding", check_embedding, _TRAITS, encode, decode_embedding
CLASSIFICATION = Task(*_LABELS, ("top_k", "function"), ClassifierFacts, reads="images")
EMBEDDING = Task(*_VECTORS, VECTOR_OPTIONS, EmbeddingFacts, reads="images")
