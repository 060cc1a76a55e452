"""Small models of images with an image processor of each kind, and image files of every mode, format, size and
orientation.
"""

import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from PIL import Image

from tests.models.repository import SMALL, save, save_weights
from tests.models.tokenizers import byte_level_bpe

_SEED = 20261121
_ORIENTATION = 0x112
_WITH_PATCHES = {**SMALL, "image_size": 32, "patch_size": 8}
_SWIN = {"depths": [1, 1], "image_size": 32, "patch_size": 2, "embed_dim": 16, "num_heads": [2, 2], "window_size": 4}
_CONVNEXT = {"num_stages": 2, "hidden_sizes": [16, 32], "depths": [1, 1]}
# It has learned the positions of larger images.
_DINO_2 = {**_WITH_PATCHES, "image_size": 56, "mlp_ratio": 2}
_SQUARE = {"height": 32, "width": 32}

# family → (its model's name, its configuration's values, its image processor's name and options)
_FAMILIES: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "ViT": ("ViT", _WITH_PATCHES, "ViT", {"size": _SQUARE}),
    "DeiT": ("DeiT", _WITH_PATCHES, "DeiT", {"size": {"height": 36, "width": 40}, "crop_size": _SQUARE}),
    "BEiT": ("Beit", _WITH_PATCHES, "Beit", {"size": _SQUARE}),
    "Swin": ("Swin", _SWIN, "ViT", {"size": _SQUARE, "resample": 3}),
    "ConvNeXt": ("ConvNext", _CONVNEXT, "ConvNext", {"size": {"shortest_edge": 32}}),
    "DINOv2": ("Dinov2", _DINO_2, "Bit", {"size": {"shortest_edge": 36}, "crop_size": _SQUARE}),
}
IMAGE_FAMILIES = tuple(_FAMILIES)
_CROPPED = {"size": {"shortest_edge": 32}, "crop_size": _SQUARE}
# family → (its model's name, values of its configuration, of its texts', of its images', its image processor's name and
# options). The texts of CLIP end in a token of their own, those of SigLIP are always as long as can be.
_IMAGE_TEXT_FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], str, dict[str, Any]]] = {
    "CLIP": ("CLIP", {"projection_dim": 24}, SMALL, _WITH_PATCHES, "CLIP", _CROPPED),
    "SigLIP": ("Siglip", {}, SMALL, _WITH_PATCHES, "Siglip", {"size": _SQUARE}),
}
IMAGE_TEXT_FAMILIES = tuple(_IMAGE_TEXT_FAMILIES)


def image_processor(name: str, **options: Any) -> Any:
    """transformers' image processor on Pillow, such as "ViT"."""
    class_name = f"{name}ImageProcessor"
    is_5 = hasattr(transformers, f"{class_name}Pil")
    return getattr(transformers, f"{class_name}Pil" if is_5 else class_name)(**options)


def make_image_source(folder: Path, family: str, **config: Any) -> Path:
    """A classifier of images of 32 x 32 pixels with its image processor."""
    return _make_image_source(folder, family, "ForImageClassification", config)


def make_image_encoder_source(folder: Path, family: str) -> Path:
    """A model of images of 32 x 32 pixels without a head, with its image processor."""
    return _make_image_source(folder, family, "Model", {})


def _make_image_source(folder: Path, family: str, head: str, config: dict[str, Any]) -> Path:
    name, sizes, processor_name, options = _FAMILIES[family]
    config_class: Callable[..., Any] = getattr(transformers, f"{name}Config")
    save_weights(getattr(transformers, f"{name}{head}")(config_class(**sizes, **config)), folder)
    image_processor(processor_name, **options).save_pretrained(folder)
    return folder


def make_image_text_source(folder: Path, family: str, max_tokens: int = 16) -> Path:
    """A model of images of 32 x 32 pixels and of texts, with its image processor and its tokenizer."""
    name, values, texts, images, processor_name, options = _IMAGE_TEXT_FAMILIES[family]
    tokenizer = byte_level_bpe(max_tokens=max_tokens)
    tokenizer.model_input_names = ["input_ids", "attention_mask"] if family == "CLIP" else ["input_ids"]
    ends = {"bos_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    texts = {**texts, **ends, "vocab_size": len(tokenizer), "max_position_embeddings": max_tokens}
    config = getattr(transformers, f"{name}Config")(text_config=texts, vision_config=images, **values)
    save(getattr(transformers, f"{name}Model")(config), folder, tokenizer)
    image_processor(processor_name, **options).save_pretrained(folder)
    return folder


def make_part_source(folder: Path, architecture: str) -> Path:
    """The part of CLIP or SigLIP for images or texts, such as SiglipTextModel, as make_image_text_source makes it."""
    make_image_text_source(folder, "CLIP" if architecture.startswith("CLIP") else "SigLIP")
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    part_config = config.vision_config if "Vision" in architecture else config.text_config
    part_config.projection_dim = getattr(config, "projection_dim", None)
    save_weights(getattr(transformers, architecture)(part_config), folder)
    return folder


def image_files(*, every: int = 1) -> Iterator[tuple[str, bytes]]:
    """Image files with what they are; `every`: one of so many."""
    modes = ("RGB", "L", "LA", "RGBA", "P", "PA", "CMYK", "YCbCr", "1", "I;16")
    sizes = ((120, 90), (31, 57), (5, 4), (1, 1))
    formats: tuple[tuple[str, dict[str, Any]], ...] = (
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True, "quality": 30, "subsampling": 2}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
    )
    orientations = (None, 1, 2, 3, 4, 5, 6, 7, 8)
    number = 0
    for mode, size, (format, options), orientation in itertools.product(modes, sizes, formats, orientations):
        image = _image(mode, size)
        if not _can_hold(format, mode):
            continue
        number += 1
        if number % every == 0:
            file = io.BytesIO()
            exif = Image.Exif()
            if orientation:
                exif[_ORIENTATION] = orientation
            image.save(file, format, exif=exif, **options)
            yield f"{mode} {size[0]}x{size[1]} {format} {options} orientation {orientation}", file.getvalue()


def _image(mode: str, size: tuple[int, int]) -> Image.Image:
    height, width = size
    generator = np.random.default_rng([_SEED, height, width])
    if mode == "I;16":
        return Image.fromarray(generator.integers(0, 65536, (height, width), np.uint16))
    patches = Image.fromarray(generator.integers(0, 256, (4, 4, 4), np.uint8), "RGBA").resize(
        (width, height), Image.Resampling.BICUBIC
    )
    if mode == "PA":  # transparency as an index of the palette
        image = patches.convert("RGB").convert("P")
        image.info["transparency"] = 3
        return image
    return patches.convert(mode) if mode in ("RGBA", "LA") else patches.convert("RGB").convert(mode)


def _can_hold(format: str, mode: str) -> bool:
    return {
        "PNG": mode not in ("CMYK", "YCbCr"),
        "JPEG": mode in ("RGB", "L", "CMYK", "YCbCr", "1"),
        "WEBP": mode in ("RGB", "RGBA", "L", "LA", "P", "PA"),
    }[format]
