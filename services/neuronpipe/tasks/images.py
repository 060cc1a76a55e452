"""What tasks of an image share: its check, its key for caches, and its sequence."""

from hashlib import blake2b

from neuronpipe.core.errors import InvalidInput
from neuronpipe.tasks.base import Encoded, ImageReader


def check_image(image: bytes) -> None:
    """Refuses no bytes."""
    if not image:
        raise InvalidInput("image", "is empty")


def image_digest(image: bytes) -> str:
    """What stands for an image among the traits of an input."""
    return blake2b(image, digest_size=32).hexdigest()


def encode_image(image: bytes, read_image: ImageReader) -> Encoded:
    """One sequence: the image's `pixels`, uint8 [3, height, width]."""
    return Encoded([{"pixels": read_image(image)}])
