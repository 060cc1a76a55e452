"""Image classification: scores of the model's labels for an image.

Equal to transformers' ImageClassificationPipeline with `top_k` and `function_to_apply`, with its image processor on
Pillow. Three cases differ; they are refused here. The pipeline takes the first image of an animation, treats a `top_k`
beyond the number of labels as all, and reads files of any format and size.
"""

from neuronpipe.api.v1.tasks_pb2 import ImageClassificationInput, ImageClassificationResult
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import ArraySets
from neuronpipe.tasks.base import Encoded, ImageReader, Task, check_image, encode_image, image_digest
from neuronpipe.tasks.scores import ClassifierFacts, best_labels, check_labels

# The pipeline's.
_TOP_K = 5


def check(input: ImageClassificationInput, model: ModelSpec) -> None:
    """Raises InvalidInput."""
    check_image(input.image)
    check_labels(model, input.function, input.top_k)


def traits(input: ImageClassificationInput) -> tuple[str | int, ...]:
    """The values of an input on which its encoding depends."""
    return (image_digest(input.image),)


def encode(input: ImageClassificationInput, read_image: ImageReader, model: ModelSpec) -> Encoded:
    """One sequence: the image's `pixels`, uint8 [3, height, width]."""
    return encode_image(input.image, read_image)


def decode(
    input: ImageClassificationInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets
) -> ImageClassificationResult:
    """The best labels from `logits`, float32 [labels]."""
    top_k = input.top_k or min(_TOP_K, len(model.labels))
    return ImageClassificationResult(labels=best_labels(outputs[0]["logits"], model, input.function, top_k))


TASK = Task(
    "image_classification", check, traits, encode, decode, ("top_k", "function"), ClassifierFacts, reads="images"
)
