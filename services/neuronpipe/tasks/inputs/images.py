"""Decodes image files to the pixels that a model takes. The only file that imports Pillow.

The pixels equal, bit by bit, the pixels of transformers' image processors on Pillow and NumPy: the classes named ...Pil
in transformers 5, the "slow" classes in transformers 4. Both run after `load_image`, which applies the EXIF orientation
and converts to RGB, and use the same functions of the same library. torchvision's processors resize tensors, with
different rounding.
"""

import io
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, get_args

import numpy as np
import PIL
from PIL import Image, ImageOps

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ImageSpec, Resampling
from neuronpipe.core.tensors import Array

# Warnings about broken metadata contain text of the file, and Python would remember each of them. The filter is
# permanent: setting it for the time of a call is not thread-safe.
warnings.filterwarnings("ignore", module="PIL")

# The version of the library: decoders and filters may change with it.
LIBRARY_VERSION: str = PIL.__version__

_FORMATS = ("JPEG", "PNG", "WEBP")
# The formats that can be animated. The first image of a JPEG with several images (MPO) is the photograph itself.
_ANIMATED_FORMATS = ("PNG", "WEBP")
# Phones take pictures of 48 million pixels. No JPEG file has a longer side than 65,535, and the rows and filters of a
# longer image would take more memory than its pixels.
_MAX_PIXELS, _MAX_SIDE = 50_000_000, 65_535
# Bytes that decoding and resizing may allocate at a time, without small images: half of a tokenizer's container.
_MAX_DECODING_BYTES = 256 << 20
_SMALL_BYTES = 16 << 20
# Bytes of a pixel in memory, by mode (Pillow, Storage.c). All other modes have 4 bytes.
_BYTES_OF_MODE = {"1": 1, "L": 1, "P": 1, "I;16": 2, "I;16B": 2}
# Further bytes of a pixel: libwebp's two canvases and a copy; the coefficients of a JPEG file that is not decoded in
# one pass; the images that make a transparent colour white.
_WEBP_BYTES, _COEFFICIENT_BYTES, _WHITENING_BYTES = 16, 2, 20
_ORIENTATION = 0x112
# Each scan of a progressive JPEG covers the whole image: a small file with many scans keeps the decoder busy for
# minutes. Encoders write 10 scans.
_MAX_SCANS = 64
_START_OF_SCAN = b"\xff\xda"
# Bytes of a marker: SOF2, a fill byte, the end of the data.
_PROGRESSIVE_OR_UNKNOWN = (b"\xc2", b"\xff", b"")
# Marks in a PNG file that may have an orientation, which is known only once the image is decoded.
_MAY_BE_TURNED = (b"eXIf", b"exif", b"xmp", b"adobe")

_FILTERS = {name: Image.Resampling[name.upper()] for name in get_args(Resampling)}


def read_pixels(data: bytes, spec: ImageSpec, turn: AbstractContextManager[object] | None = None) -> Array:
    """Decodes a file to pixels: uint8 [3, height, width]. `turn`: entered for a large image. Raises InvalidInput."""
    image, size_bytes = _open(data, spec)
    with turn if turn and size_bytes > _SMALL_BYTES else nullcontext():
        return _fit(_decode(image, spec), spec)


def to_pixels(levels: Array, spec: ImageSpec) -> Array:
    """Converts a decoded image, uint8 [any, any, 3], to pixels: uint8 [3, height, width]."""
    return _fit(Image.fromarray(levels), spec)


def whiten(image: Image.Image) -> Image.Image:
    """Replaces the transparent colour by white, in RGB, as convert_to_rgb of transformers/image_transforms.py does."""
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


def _decode(image: Image.Image, spec: ImageSpec) -> Image.Image:
    """Decodes the file's first image, upright and in RGB. An image that is right already is not copied."""
    try:
        image.load()
        ImageOps.exif_transpose(image, in_place=True)
        upright = image if image.mode == "RGB" else image.convert("RGB")
        return whiten(upright) if spec.whitens else upright
    except Exception as error:  # each decoder raises other exceptions
        raise InvalidInput("image", f"is a {image.format} file that is cut off or damaged") from error


def _open(data: bytes, spec: ImageSpec) -> tuple[Image.Image, int]:
    """Opens a file and reads its header. Returns the file, and the number of bytes that its pixels will take."""
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidInput("image", f"more pixels than the limit of {_MAX_PIXELS:,}") from error
    except Exception as error:  # for a damaged header, each format raises other exceptions
        problem = f"is not a {', '.join(_FORMATS[:-1])} or {_FORMATS[-1]} file, or its header is damaged"
        raise InvalidInput("image", problem) from error
    if image.width * image.height > _MAX_PIXELS:
        raise InvalidInput("image", f"{image.width} x {image.height} pixels, the limit is {_MAX_PIXELS:,} in all")
    if spec.resize is not None:
        height, width = _resized(image.height, image.width, spec)
        if width * height > _MAX_PIXELS:
            problem = f"{image.width} x {image.height} pixels, too long to be scaled to a shorter side of {spec.resize}"
            raise InvalidInput("image", problem)
    if max(image.size) > _MAX_SIDE:
        raise InvalidInput("image", f"{image.width} x {image.height} pixels, the limit of a side is {_MAX_SIDE:,}")
    frames = getattr(image, "n_frames", 1)
    if image.format in _ANIMATED_FORMATS and frames > 1:
        raise InvalidInput("image", f"is an animation of {frames} frames; send a single frame")
    if image.format not in _ANIMATED_FORMATS and (scans := data.count(_START_OF_SCAN)) > _MAX_SCANS:
        raise InvalidInput("image", f"is a JPEG file of {scans} scans, the limit is {_MAX_SCANS}")
    size = image.size
    in_scans = image.format not in _ANIMATED_FORMATS and _is_in_scans(data, len(image.getbands()))
    kept_bytes = _COEFFICIENT_BYTES * len(image.getbands()) * image.width * image.height if in_scans else 0
    size_bytes = kept_bytes + _decoding_bytes(image, data, spec)
    if size_bytes > _MAX_DECODING_BYTES and image.draft(image.mode, (image.width // 2, image.height // 2)):
        size_bytes = kept_bytes + _decoding_bytes(image, data, spec)  # a JPEG file, half as wide and half as high
    if size_bytes > _MAX_DECODING_BYTES:
        description = f"{size[0]} x {size[1]} pixels of a {image.format} file in mode {image.mode}"
        problem = f"{description} take {size_bytes:,} bytes of memory, the limit is {_MAX_DECODING_BYTES:,}"
        raise InvalidInput("image", problem)
    return image, size_bytes


def _decoding_bytes(image: Image.Image, data: bytes, spec: ImageSpec) -> int:
    """Returns the peak of bytes that decoding and resizing allocate, without a decoder's coefficients."""
    pixels, mode_bytes = image.width * image.height, _BYTES_OF_MODE.get(image.mode, 4)
    steps = [mode_bytes + (_WEBP_BYTES if image.format == "WEBP" else 0)]
    turned = any(mark in data for mark in _MAY_BE_TURNED) if image.format == "PNG" else _ORIENTATION in image.getexif()
    steps.append(2 * mode_bytes if turned else mode_bytes)
    steps.append(mode_bytes if image.mode == "RGB" else mode_bytes + 4)
    steps.append(_WHITENING_BYTES if spec.whitens and "transparency" in image.info else 4)
    resized = 6 * pixels  # the resized array, and a copy
    if spec.resize is not None:
        height, width = _resized(image.height, image.width, spec)
        resized = width * (4 * max(image.size) + 8 * height)
    return max(max(steps) * pixels, 4 * pixels + resized)


def _is_in_scans(data: bytes, bands: int) -> bool:
    """Returns whether a JPEG file has its components in several scans.

    The decoder then keeps all coefficients in memory.
    """
    place = 2
    while (marker := data[place : place + 2]) != _START_OF_SCAN:
        if marker[:1] != b"\xff" or marker[1:] in _PROGRESSIVE_OR_UNKNOWN:
            return True
        place += 2 + int.from_bytes(data[place + 2 : place + 4])
    return data[place + 4] < bands


def _resized(height: int, width: int, spec: ImageSpec) -> tuple[int, int]:
    """Returns the height and width that get_resize_output_image_size of transformers/image_transforms.py gives."""
    if isinstance(spec.resize, tuple):
        return spec.resize
    shorter = spec.resize or 0
    longer = int(shorter * max(height, width) / min(height, width))
    return (longer, shorter) if width <= height else (shorter, longer)


def _crop(pixels: Array, height: int, width: int) -> Array:
    """Returns the centre of uint8 [3, any, any], black beyond its edges, rounded as transformers' center_crop does."""
    (rows, kept_rows), (columns, kept_columns) = _middle(pixels.shape[1], height), _middle(pixels.shape[2], width)
    cropped: np.ndarray[Any, Any] = np.zeros((3, height, width), np.uint8)
    cropped[:, rows, columns] = pixels[:, kept_rows, kept_columns]
    return cropped


def _middle(length: int, cropped: int) -> tuple[slice, slice]:
    """Returns the slices of target and source that copy the centre of a side of `length` to a side of `cropped`."""
    if length >= cropped:
        start = (length - cropped) // 2
        return slice(None), slice(start, start + cropped)
    start = -((length - cropped) // 2)
    return slice(start, start + length), slice(None)
