"""What the pre-process stage and the graph make of an image equals what transformers' image processors make of it, on
Pillow.
"""

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from transformers.image_utils import load_image

from neuronpipe.compiler.images import load_image_processor
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.inputs.images import read_pixels
from tests.models.images import image_files, image_processor

pytestmark = [
    pytest.mark.filterwarnings("ignore:Palette images with Transparency"),
    pytest.mark.filterwarnings("ignore:.*use_fast"),
    pytest.mark.sampled,
]
# Scaling and normalizing in float32 in another order: numbers are below 3, where its steps are 2.4e-7.
_TOLERANCE = 1e-6
_SQUARE = {"height": 24, "width": 24}
_IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}

_PROCESSORS: dict[str, tuple[str, dict[str, Any]]] = {
    "vit": ("ViT", {}),
    "vit, not square, bicubic": ("ViT", {"size": {"height": 48, "width": 64}, "resample": 3}),
    "vit, other filters": ("ViT", {"size": _SQUARE, "resample": 1}),
    "vit, nearest": ("ViT", {"size": _SQUARE, "resample": 0}),
    "vit, levels as they are": ("ViT", {"size": _SQUARE, "do_rescale": False, "do_normalize": False}),
    "vit, not normalized": ("ViT", {"size": _SQUARE, "do_normalize": False, "rescale_factor": 1 / 127.5}),
    "deit": ("DeiT", _IMAGENET),
    "deit, crop larger than the image": (
        "DeiT",
        {"size": {"height": 33, "width": 300}, "crop_size": {"height": 101, "width": 250}},
    ),
    "deit, not resized": ("DeiT", {"do_resize": False, "crop_size": {"height": 51, "width": 50}}),
    "beit": ("Beit", {}),
    "beit, cropped": ("Beit", {"size": {"height": 30, "width": 30}, "do_center_crop": True, "crop_size": _SQUARE}),
    "convnext, cropped": ("ConvNext", {"size": {"shortest_edge": 32}, **_IMAGENET}),
    "convnext, warped": ("ConvNext", {"size": {"shortest_edge": 384}}),
    "clip": ("CLIP", {"size": {"shortest_edge": 40}, "crop_size": _SQUARE}),
    "siglip": ("Siglip", {"size": _SQUARE}),
}


@pytest.fixture(scope="module")
def files() -> Sequence[tuple[str, bytes]]:
    return [*image_files(every=11)]


@pytest.mark.parametrize("name", _PROCESSORS)
def test_pixels_equal_those_of_transformers(name: str, files: Sequence[tuple[str, bytes]], tmp_path: Path) -> None:
    kind, options = _PROCESSORS[name]
    reference = image_processor(kind, **options)
    reference.save_pretrained(tmp_path)
    read = load_image_processor(tmp_path)
    assert len(files) > 60
    for description, data in files:
        expected = np.asarray(
            reference(images=[load_image(Image.open(io.BytesIO(data)))], return_tensors="np")["pixel_values"]
        )
        pixels = read.normalize(torch.from_numpy(read_pixels(data, read.spec))[None]).numpy()
        tolerance = _TOLERANCE * max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(pixels, expected, rtol=0, atol=tolerance, err_msg=description)


@pytest.mark.parametrize(
    ("kind", "options", "problem"),
    [
        ("ViT", {"size": {"shortest_edge": 32}}, "images of different shapes would have different sizes"),
        ("ViT", {"size": {"longest_edge": 32, "shortest_edge": 16}}, "size has longest_edge, shortest_edge"),
        ("DeiT", {"image_mean": [0.5], "image_std": [0.5]}, "image_mean has 1 numbers, not one for each of 3 channels"),
        (
            "DeiT",
            {"do_resize": False, "do_center_crop": False},
            "images of different shapes would have different sizes",
        ),
        ("ViT", {"image_std": [0.5, 0, 0.5]}, "image_std has a zero"),
        ("ConvNext", {"do_center_crop": True, "crop_size": _SQUARE}, "do_center_crop beside crop_pct"),
        ("ViT", {"do_pad": True, "pad_size": _SQUARE}, "has do_pad, which is not supported"),
        ("MobileViT", {}, "has do_flip_channel_order, which is not supported"),
        # It resizes to 256/224 of what its options say.
        ("Levit", {}, "makes pixels that differ by .* from what its options say; not supported"),
    ],
)
def test_what_cannot_be_reproduced_is_refused(kind: str, options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    image_processor(kind, **options).save_pretrained(tmp_path)
    with pytest.raises(SetupError, match=problem):
        load_image_processor(tmp_path)


def test_a_model_without_an_image_processor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot load its image processor"):
        load_image_processor(tmp_path)


@pytest.mark.skipif(
    find_spec("torchvision") is not None or transformers.__version__.startswith("4."),
    reason="torchvision is installed, or this transformers has no processors on Pillow apart",
)
def test_a_processor_of_torchvision_is_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text('{"image_processor_type": "DINOv3ViTImageProcessorFast"}')
    with pytest.raises(
        SetupError, match=r"it needs torchvision, .* such as ViTImageProcessor, as image_processor_type"
    ):
        load_image_processor(tmp_path)
