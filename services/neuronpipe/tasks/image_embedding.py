"""Image embedding: an image to its vector.

Equal to the `pooler_output` of transformers' image-feature-extraction pipeline with `pool`, and of models of images and
texts to `get_image_features`; scaled to length 1 unless the caller says otherwise.
"""

from neuronpipe.api.v1.tasks_pb2 import ImageEmbeddingInput, ImageEmbeddingResult
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import Encoded, ImageReader, Task, check_image, encode_image, image_digest
from neuronpipe.tasks.vectors import VECTOR_OPTIONS, EmbeddingFacts, check_vector_options, vector_fields, vector_of


def check(input: ImageEmbeddingInput, model: ModelSpec) -> None:
    """Raises InvalidInput."""
    check_image(input.image)
    check_vector_options(input, model)


def traits(input: ImageEmbeddingInput) -> tuple[str | int, ...]:
    """The values of an input on which its encoding depends."""
    return (image_digest(input.image),)


def encode(input: ImageEmbeddingInput, read_image: ImageReader, model: ModelSpec) -> Encoded:
    """One sequence: the image's `pixels`, uint8 [3, height, width]."""
    return encode_image(input.image, read_image)


def decode(
    input: ImageEmbeddingInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> ImageEmbeddingResult:
    """The vector from the graph's output."""
    return ImageEmbeddingResult(**vector_fields(vector_of(outputs[0]), input, model))


TASK = Task("image_embedding", check, traits, encode, decode, VECTOR_OPTIONS, EmbeddingFacts, reads="images")
