"""Decodes image files to the pixels that a model takes. The only file that imports Pillow.

The pixels equal, bit by bit, those of transformers' image processors on Pillow and NumPy (those named ...Pil in
transformers 5, the "slow" ones in 4) after `load_image`, which applies the EXIF orientation and converts to RGB. Both
use the same functions of the same library. torchvision's processors resize tensors, with different rounding.
"""

import io
import warnings
from typing import Any, get_args

import numpy as np
import PIL
from PIL import Image, ImageOps

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ImageSpec, Resampling
from neuronpipe.core.tensors import Array

# Warnings about broken metadata hold text of the file, and Python would remember each of them. The filter is permanent:
# setting it for the time of a call is not thread-safe.
warnings.filterwarnings("ignore", module="PIL")

# The version of the library: decoders and filters may change with it.
LIBRARY_VERSION: str = PIL.__version__

_FORMATS = ("JPEG", "PNG", "WEBP")
# The formats that can be animated. A JPEG file with several images (MPO) is a photograph with a preview or depth map;
# the first image counts.
_ANIMATED_FORMATS = ("PNG", "WEBP")
# An image of this size takes 200 MB decoded, and as much again to be rotated. Phones take pictures of 48 million
# pixels.
_MAX_PIXELS = 50_000_000
# Each scan of a progressive JPEG covers the whole image: a small file with many scans keeps the decoder busy for
# minutes. Encoders write 10.
_MAX_SCANS = 64
_START_OF_SCAN = b"\xff\xda"

_FILTERS = {name: Image.Resampling[name.upper()] for name in get_args(Resampling)}


def read_pixels(data: bytes, spec: ImageSpec) -> Array:
    """The pixels of a JPEG, PNG or WebP file: uint8 [3, height, width].

    Raises InvalidInput for other files and for images that are too large.
    """
    return _fit(_decode(data, spec), spec)


def to_pixels(levels: Array, spec: ImageSpec) -> Array:
    """The pixels of a decoded image, uint8 [any, any, 3]: uint8 [3, height, width]."""
    return _fit(Image.fromarray(levels), spec)


def whiten(image: Image.Image) -> Image.Image:
    """Replaces the transparent colour of an image by white, in RGB.

    It equals convert_to_rgb in transformers/image_transforms.py.
    """
    if image.info.get("transparency") is None:
        return image
    with_alpha = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), with_alpha).convert("RGB")


def _fit(image: Image.Image, spec: ImageSpec) -> Array:
    if spec.resize is not None:
        height, width = _resized(image.height, image.width, spec)
        image = image.resize((width, height), resample=_FILTERS[spec.resampling])
    pixels: Array = np.moveaxis(np.asarray(image), -1, 0)
    return np.ascontiguousarray(pixels if spec.crop is None else _crop(pixels, *spec.crop))


def _decode(data: bytes, spec: ImageSpec) -> Image.Image:
    """The file's first image, upright and in RGB."""
    image = _open(data, spec)
    try:
        upright = ImageOps.exif_transpose(image).convert("RGB")
        return whiten(upright) if spec.whitens else upright
    except Exception as error:  # each decoder raises other exceptions
        raise InvalidInput("image", f"is a {image.format} file that is cut off or damaged") from error


def _open(data: bytes, spec: ImageSpec) -> Image.Image:
    """The opened file, of which only the header has been read."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidInput("image", f"more pixels than the limit of {_MAX_PIXELS:,}") from error
    except Exception as error:  # for a damaged header, each format raises other exceptions
        raise InvalidInput(
            "image", f"is not a {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]} file, or its header is damaged"
        ) from error
    if image.width * image.height > _MAX_PIXELS:
        raise InvalidInput("image", f"{image.width} x {image.height} pixels, the limit is {_MAX_PIXELS:,} in all")
    if spec.resize is not None:
        height, width = _resized(image.height, image.width, spec)
        if width * height > _MAX_PIXELS:
            raise InvalidInput(
                "image",
                f"{image.width} x {image.height} pixels, too long to be scaled to a shorter side of {spec.resize}",
            )
    frames = getattr(image, "n_frames", 1)
    if image.format in _ANIMATED_FORMATS and frames > 1:
        raise InvalidInput("image", f"is an animation of {frames} frames; send a single frame")
    if image.format not in _ANIMATED_FORMATS and (scans := data.count(_START_OF_SCAN)) > _MAX_SCANS:
        raise InvalidInput("image", f"is a JPEG file of {scans} scans, the limit is {_MAX_SCANS}")
    return image


def _resized(height: int, width: int, spec: ImageSpec) -> tuple[int, int]:
    """As get_resize_output_image_size in transformers/image_transforms.py."""
    if isinstance(spec.resize, tuple):
        return spec.resize
    shorter = spec.resize or 0
    longer = int(shorter * max(height, width) / min(height, width))
    return (longer, shorter) if width <= height else (shorter, longer)


def _crop(pixels: Array, height: int, width: int) -> Array:
    """The centre of uint8 [3, any, any], with black where the image is smaller than the crop.

    It rounds as center_crop in transformers/image_transforms.py.
    """
    (rows, kept_rows), (columns, kept_columns) = _middle(pixels.shape[1], height), _middle(pixels.shape[2], width)
    cropped: np.ndarray[Any, Any] = np.zeros((3, height, width), np.uint8)
    cropped[:, rows, columns] = pixels[:, kept_rows, kept_columns]
    return cropped


def _middle(length: int, cropped: int) -> tuple[slice, slice]:
    """The slices that copy the centre of a side of `length` into one of `cropped`: of the target, and of the source."""
    if length >= cropped:
        first = (length - cropped) // 2
        return slice(None), slice(first, first + cropped)
    first = -((length - cropped) // 2)
    return slice(first, first + length), slice(None)
