"""tasks/inputs/images.py: what is read of an image file, and what is refused. That pixels equal transformers' is
tests/contract/'s to show.
"""

import io
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ImageSpec
from neuronpipe.tasks.inputs.images import read_pixels, to_pixels

_AS_IT_IS = ImageSpec(crop=(4, 6))
_ORIENTATION = 0x112
_LEVELS = np.random.default_rng(20261121).integers(0, 256, (4, 6, 3), np.uint8)


def _file(levels: NDArray[np.uint8] = _LEVELS, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(levels).save(file, format, **options)
    return file.getvalue()


def _png(width: int, height: int, *chunks: bytes, colours: int = 2) -> bytes:
    """`colours`: 0 grey, 2 RGB, 3 a palette, 4 grey with alpha, 6 RGBA."""
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, colours, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + _chunk(b"IDAT", zlib.compress(b"")) + _chunk(b"IEND", b"")


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@pytest.mark.parametrize(("format", "options"), [("PNG", {}), ("WEBP", {"lossless": True})])
def test_levels_are_read_as_they_were_written_channels_first(format: str, options: dict[str, Any]) -> None:
    assert (read_pixels(_file(format=format, **options), _AS_IT_IS) == np.moveaxis(_LEVELS, -1, 0)).all()


def test_a_jpeg_file_is_read() -> None:
    grey = np.full((4, 6, 3), 128, np.uint8)
    assert (read_pixels(_file(grey, "JPEG"), _AS_IT_IS) == 128).all()


def test_an_image_that_lies_on_its_side_is_turned_upright() -> None:
    exif = Image.Exif()
    exif[_ORIENTATION] = 6  # the camera was turned: rows are columns, from the right
    pixels = read_pixels(_file(exif=exif), ImageSpec(crop=(6, 4)))
    assert (pixels == np.moveaxis(np.rot90(_LEVELS, -1), -1, 0)).all()


def test_the_middle_is_kept() -> None:
    pixels = to_pixels(_LEVELS, ImageSpec(crop=(2, 3)))
    assert (pixels == np.moveaxis(_LEVELS[1:3, 1:4], -1, 0)).all()


def test_what_a_small_image_lacks_is_black() -> None:
    pixels = to_pixels(_LEVELS, ImageSpec(crop=(7, 2)))
    assert not pixels[:, :2].any()
    assert not pixels[:, 6:].any()
    assert (pixels[:, 2:6] == np.moveaxis(_LEVELS[:, 2:4], -1, 0)).all()


def test_the_shorter_side_gets_its_length() -> None:
    # 4 x 6 becomes 8 x 12, of which columns 2 to 9 are the middle.
    whole = to_pixels(_LEVELS, ImageSpec(resize=(8, 12), resampling="bicubic"))
    assert (to_pixels(_LEVELS, ImageSpec(resize=8, resampling="bicubic", crop=(8, 8))) == whole[:, :, 2:10]).all()


def test_the_first_image_of_a_jpeg_with_a_preview_counts() -> None:
    light = np.full((4, 6, 3), 255, np.uint8)
    file = _file(np.zeros((4, 6, 3), np.uint8), "MPO", save_all=True, append_images=[Image.fromarray(light)])
    assert (read_pixels(file, _AS_IT_IS) == 0).all()


@pytest.mark.parametrize(
    "data",
    [
        *(pytest.param(_file(format=format), id=format) for format in ("GIF", "TIFF", "BMP", "ICO", "PPM", "TGA")),
        *(b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"%PDF-1.7", b"a text", b"\xff\xd8\xff", b"\0" * 100),
        *(pytest.param(_png(*size), id=f"without pixels: {size}") for size in ((0, 10), (10, 0), (0, 0))),
    ],
)
def test_what_is_no_jpeg_png_or_webp_file_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidInput, match=r"^image: is not a JPEG, PNG or WEBP file, or its header is damaged$"):
        read_pixels(data, _AS_IT_IS)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_a_file_that_ends_early_is_refused(format: str, share: float) -> None:
    levels = np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8)
    data = _file(levels, format)
    with pytest.raises(InvalidInput, match=r"is cut off or damaged|is not a JPEG, PNG or WEBP file"):
        read_pixels(data[: int(len(data) * share)], _AS_IT_IS)


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_a_file_with_bytes_changed_is_read_or_refused(format: str) -> None:
    data = _file(np.random.default_rng(1).integers(0, 256, (64, 64, 3), np.uint8), format)
    outcomes: set[object] = set()
    for seed in range(60):
        generator = np.random.default_rng([20261121, seed])
        broken = np.frombuffer(data, np.uint8).copy()
        broken[generator.integers(0, len(data) if seed % 2 else 100, 8)] = generator.integers(0, 256, 8)
        try:
            outcomes.add(read_pixels(broken.tobytes(), _AS_IT_IS).shape)
        except InvalidInput:
            outcomes.add("refused")
    assert {"refused"} <= outcomes <= {(3, 4, 6), "refused"}


@pytest.mark.parametrize("format", ["PNG", "WEBP"])
def test_an_animation_is_refused(format: str) -> None:
    frames = [Image.fromarray(np.full((4, 6, 3), level, np.uint8)) for level in (1, 99)]
    with pytest.raises(InvalidInput, match=r"is an animation of \d frames; send a single frame$"):
        read_pixels(_file(format=format, save_all=True, append_images=frames), _AS_IT_IS)


_CROPPED = ImageSpec(resize=224, crop=(224, 224))


@pytest.mark.parametrize(
    ("width", "height", "spec", "problem"),
    [
        # Its 57 bytes hold no pixel: were they looked for, it would be refused as a file that ends early.
        (8000, 7000, _AS_IT_IS, "8000 x 7000 pixels, the limit is 50,000,000 in all$"),
        *((side, side, _AS_IT_IS, r".*pixels.* limit (is|of) 50,000,000") for side in (10_000, 20_000, 1 << 30)),
        (1, 300_000, _CROPPED, "1 x 300000 pixels, too long to be scaled to a shorter side of 224$"),
        (1, 65_536, ImageSpec(resize=(8, 8)), "1 x 65536 pixels, the limit of a side is 65,535$"),
    ],
)
def test_a_giant_is_refused_by_its_header(width: int, height: int, spec: ImageSpec, problem: str) -> None:
    with pytest.raises(InvalidInput, match=f"^image: {problem}"):
        read_pixels(_png(width, height), spec)


def _zeros(width: int, height: int, mode: str, format: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, format, **options)
    return file.getvalue()


_TURNED = Image.Exif()
_TURNED[_ORIENTATION] = 6


@pytest.mark.parametrize(
    ("data", "spec"),
    [
        (_zeros(4000, 4000, "RGB", "WEBP", lossless=True, method=0), ImageSpec(resize=(8, 8))),
        (_png(6000, 6000, colours=6), ImageSpec(resize=(8, 8))),
        (_png(6000, 6000, colours=4), ImageSpec(resize=(8, 8))),
        (_png(6000, 6000, _chunk(b"eXIf", _TURNED.tobytes())), ImageSpec(resize=(8, 8))),
        (
            _png(4000, 4000, _chunk(b"PLTE", bytes(768)), _chunk(b"tRNS", b"\0"), colours=3),
            ImageSpec(resize=(8, 8), whitens=True),
        ),
        (_zeros(7000, 7000, "RGB", "JPEG", progressive=True), ImageSpec(resize=(8, 8))),
        (_png(5500, 5500), ImageSpec(crop=(8, 8))),
        (_png(50, 60_000, colours=0), ImageSpec(resize=(2000, 2000))),
    ],
    ids=["webp", "rgba", "la", "turned", "whitened", "progressive", "whole", "resized"],
)
def test_an_image_that_takes_too_much_memory_to_decode_is_refused_by_its_header(data: bytes, spec: ImageSpec) -> None:
    problem = r"pixels of a \w+ file in mode \w+ take [\d,]+ bytes of memory, the limit is"
    with pytest.raises(InvalidInput, match=problem):
        read_pixels(data, spec)


@pytest.mark.parametrize("format", ["JPEG", "MPO"])
def test_a_photograph_that_is_too_large_to_be_turned_is_decoded_at_half_its_size(format: str) -> None:
    light = Image.new("RGB", (8000, 6000), (250, 250, 250))
    light.paste((10, 10, 10), (0, 0, 4000, 6000))
    file = io.BytesIO()
    light.save(file, format, exif=_TURNED)
    pixels = read_pixels(file.getvalue(), ImageSpec(resize=(8, 6)))
    assert (pixels[:, :3] < 20).all()
    assert (pixels[:, 5:] > 240).all()


def test_large_images_have_turns_and_small_ones_none() -> None:
    taken = []

    @contextmanager
    def turn() -> Iterator[None]:
        taken.append(True)
        yield

    read_pixels(_zeros(100, 100, "RGB"), ImageSpec(resize=(8, 8)), turn())
    assert not taken
    read_pixels(_zeros(3000, 3000, "L"), ImageSpec(resize=(8, 8)), turn())
    assert taken


def test_metadata_that_inflates_without_end_is_refused() -> None:
    with pytest.raises(InvalidInput):
        read_pixels(_png(6, 4, _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100 << 20)))), _AS_IT_IS)


def test_a_jpeg_file_of_many_scans_is_refused() -> None:
    data = _file(format="JPEG", progressive=True)
    last_scan = data[data.rindex(b"\xff\xda") : -2]
    assert read_pixels(data[:-2] + last_scan * 50 + data[-2:], _AS_IT_IS).shape == (3, 4, 6)
    with pytest.raises(InvalidInput, match=r"is a JPEG file of \d+ scans, the limit is 64$"):
        read_pixels(data[:-2] + last_scan * 100 + data[-2:], _AS_IT_IS)


def test_sizes_that_depend_on_the_image_make_no_spec() -> None:
    for without_size in ({}, {"resize": 224}, {"resize": (0, 4)}, {"resize": 0, "crop": (4, 4)}, {"crop": (4, -1)}):
        with pytest.raises(ValueError, match=r"different sizes|from 1 on"):
            ImageSpec(**without_size)


def test_an_image_counts_as_its_patches() -> None:
    assert ImageSpec(resize=(224, 224)).tokens == 196
    assert ImageSpec(resize=(225, 224)).tokens == 15 * 14
    assert ImageSpec(resize=(8, 8)).tokens == 3
