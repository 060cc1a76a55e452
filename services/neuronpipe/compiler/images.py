"""Models of images as modules: normalization of levels, then the model. With texts, both parts are one graph.

A model's image processor is split into an ImageSpec, by which the tokenizer reads images, and a part of the graph.
"""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from PIL import Image
from pydantic import ValidationError

from neuronpipe.compiler.architectures import EmptyBatches, added_to_scores, fixing_positions
from neuronpipe.compiler.modules import PIXELS, SampleBatch, SourceModule
from neuronpipe.compiler.saved_files import reason_of, refusing
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.core.errors import InvalidInput, SetupError
from neuronpipe.core.files import reporting_os_errors
from neuronpipe.core.model import ImageSpec, Resampling, TaskFacts
from neuronpipe.tasks.inputs.images import read_pixels, to_pixels, whiten
from neuronpipe.tasks.zero_shot_image_classification import ImageTextFacts

# In the order of Pillow's numbers.
_FILTERS: tuple[Resampling, ...] = get_args(Resampling)
_STEPS = frozenset({"do_resize", "do_center_crop", "do_rescale", "do_normalize"})
# Options that do not change an RGB image. The last option is for maps of labels.
_WITHOUT_EFFECT = frozenset({"do_convert_rgb", "do_reduce_labels"})
# Below this size, ConvNeXt's processor scales to a larger size than requested, and crops. Source: its `resize`.
_CONVNEXT_WARPS_FROM = 384
# float32 numbers of 2.7, the largest value, have steps of 2.4e-7.
_TOLERANCE = 1e-6
# A wide image, a high image that is smaller than most models' images, and a larger image.
_SAMPLE_SIZES = ((300, 200), (37, 91), (512, 640))
_TRANSPARENT = (10, 20, 30)


class NormalizeLevels(torch.nn.Module):
    """Converts levels, uint8 [batch, 3, height, width], to the float32 numbers with which the model was trained."""

    def __init__(self, scale: float, means: Sequence[float], deviations: Sequence[float]) -> None:
        super().__init__()
        # Not buffers, which would lose digits with the model's dtype.
        self._factors = [scale / deviation for deviation in deviations]
        self._offsets = [-mean / deviation for mean, deviation in zip(means, deviations, strict=True)]

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        factors, offsets = (
            torch.tensor(numbers, device=pixels.device).view(1, 3, 1, 1) for numbers in (self._factors, self._offsets)
        )
        return pixels.to(torch.float32) * factors + offsets


@dataclass(frozen=True, slots=True)
class SourceImageProcessor:
    """An image processor in two parts: `spec` is for the pre-process stage, `normalize` runs before the model."""

    spec: ImageSpec
    normalize: NormalizeLevels

    def run(self, image: Image.Image) -> NDArray[np.float32]:
        """Converts an RGB image to the model's input: float32 [1, 3, height, width]."""
        return self.normalize(torch.from_numpy(to_pixels(np.asarray(image), self.spec))[None]).numpy()


def load_image_processor(folder: Path) -> SourceImageProcessor:
    """Reads the processor on Pillow and NumPy. Raises SetupError, which names an unsupported operation."""
    backend = {"use_fast": False} if transformers.__version__.startswith("4.") else {"backend": "pil"}
    problem = f"{folder}: transformers {transformers.__version__} cannot load its image processor"
    with refusing(problem, why=_why_not_loaded):
        processor = transformers.AutoImageProcessor.from_pretrained(folder, trust_remote_code=False, **backend)
    options = {name: value for name, value in processor.to_dict().items() if value is not None}
    name = type(processor).__name__
    steps = {step for step, is_on in options.items() if step.startswith("do_") and is_on}
    if unknown := sorted(steps - _STEPS - _WITHOUT_EFFECT):
        raise SetupError(f"{folder}: its {name} has {', '.join(unknown)}, which is not supported")
    try:
        processor_parts = SourceImageProcessor(_image_spec(options), _normalize(options))
    except (ValidationError, ValueError) as error:
        problem = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise SetupError(f"{folder}: its {name} is not supported: {problem}") from error
    samples = [Image.fromarray(_sample_image(height, width, 0)) for height, width in _SAMPLE_SIZES]
    difference = max(_difference(processor, sample, processor_parts.run(sample)) for sample in samples)
    if not difference <= _TOLERANCE:
        raise SetupError(
            f"{folder}: its {name} makes pixels that differ by {difference:.2e} from what its options say; "
            "not supported"
        )
    # No option alone decides this: with do_convert_rgb, transformers 5 whitens, and transformers 4 does not.
    transparent = Image.new("RGB", _SAMPLE_SIZES[0], _TRANSPARENT)
    transparent.info["transparency"] = _TRANSPARENT
    if _difference(processor, transparent, processor_parts.run(transparent)) <= _TOLERANCE:
        return processor_parts
    if not _difference(processor, transparent, processor_parts.run(whiten(transparent))) <= _TOLERANCE:
        raise SetupError(f"{folder}: its {name} makes another colour than white of what is transparent; not supported")
    return SourceImageProcessor(processor_parts.spec.model_copy(update={"whitens": True}), processor_parts.normalize)


def _why_not_loaded(error: Exception) -> str:
    if isinstance(error, ImportError):  # such as DINOv3's
        return (
            "it needs torchvision, which rounds pixels differently; name a processor on Pillow with the same steps, "
            "such as ViTImageProcessor, as image_processor_type in preprocessor_config.json"
        )
    return reason_of(error)


def sample_pixels(spec: ImageSpec, seed: int) -> NDArray[np.uint8]:
    """Makes an image from a number: uint8 [3, height, width]."""
    height, width = (200 + seed % length for length in (170, 230))
    return to_pixels(_sample_image(height, width, seed), spec)


def _sample_image(height: int, width: int, seed: int) -> NDArray[np.uint8]:
    """Patches of colour that blend into each other, under noise, as in photographs: [height, width, 3]."""
    generator = np.random.default_rng([seed, height, width])
    patches = generator.integers(0, 256, (6, 8, 3), np.uint8)
    smooth = np.moveaxis(to_pixels(patches, ImageSpec(resize=(height, width), resampling="bicubic")), 0, -1)
    noisy = smooth + generator.integers(-20, 21, smooth.shape, np.int16)
    return np.ascontiguousarray(noisy.clip(0, 255).astype(np.uint8))


def _image_spec(options: Mapping[str, Any]) -> ImageSpec:
    resize: tuple[int, int] | int | None = None
    crop: tuple[int, int] | None = None
    if options.get("do_center_crop"):
        crop = _height_and_width(options["crop_size"], "crop_size")
    if options.get("do_resize"):
        size = {key: value for key, value in options["size"].items() if value is not None}
        if set(size) == {"shortest_edge"} and "crop_pct" in options:
            if crop is not None:
                raise ValueError("do_center_crop beside crop_pct")
            edge = int(size["shortest_edge"])
            if edge < _CONVNEXT_WARPS_FROM:
                resize, crop = int(edge / options["crop_pct"]), (edge, edge)
            else:
                resize = (edge, edge)
        else:
            resize = int(size["shortest_edge"]) if set(size) == {"shortest_edge"} else _height_and_width(size, "size")
    number = int(options.get("resample", _FILTERS.index("bilinear")))
    if not 0 <= number < len(_FILTERS):
        raise ValueError(f"resample {number}")
    return ImageSpec(resize=resize, resampling=_FILTERS[number], crop=crop)


def _height_and_width(size: Mapping[str, Any], name: str) -> tuple[int, int]:
    sizes = {key: value for key, value in size.items() if value is not None}
    if set(sizes) != {"height", "width"}:
        raise ValueError(f"{name} has {', '.join(sorted(sizes))}")
    return int(sizes["height"]), int(sizes["width"])


def _normalize(options: Mapping[str, Any]) -> NormalizeLevels:
    scale = float(options["rescale_factor"]) if options.get("do_rescale") else 1.0
    if not options.get("do_normalize"):
        return NormalizeLevels(scale, [0.0] * 3, [1.0] * 3)
    means, deviations = (_channel_values(options[name], name) for name in ("image_mean", "image_std"))
    if not all(deviations):
        raise ValueError("image_std has a zero")
    return NormalizeLevels(scale, means, deviations)


def _channel_values(value: Any, name: str) -> list[float]:
    numbers = [float(number) for number in value] if isinstance(value, Sequence) else [float(value)] * 3
    if len(numbers) != 3:
        raise ValueError(f"{name} has {len(numbers)} numbers, not one for each of 3 channels")
    return numbers


def _difference(processor: Any, image: Image.Image, numbers: NDArray[np.float32]) -> float:
    """Returns the largest difference of `numbers` from the processor's result, relative for numbers above 1."""
    expected = np.asarray(processor(images=[image], return_tensors="np")["pixel_values"], np.float64)
    if numbers.shape != expected.shape:
        return float("inf")
    return float((np.abs(numbers - expected) / np.maximum(1, np.abs(expected))).max())


# Kinds of models of images and texts for which this file computes the inputs and scores of transformers.
IMAGE_TEXT_KINDS = ("clip", "siglip")


class ImagesAndTexts(torch.nn.Module):
    """Comparable vectors of texts and images from one graph, in the order of `places` [batch].

    `places` counts the texts, then the images. Sources: transformers 5, CLIPModel and SiglipModel; the pipeline for
    zero-shot-image-classification.
    """

    def __init__(self, model: Any, normalize: NormalizeLevels, tokenizer: SourceTokenizer) -> None:
        super().__init__()
        self.model = model
        self.normalize = normalize
        self._pad_token_id = tokenizer.pad_token_id

    def forward(self, input_ids: torch.Tensor, pixels: torch.Tensor, places: torch.Tensor) -> dict[str, torch.Tensor]:
        pixel_values = self.normalize(pixels).to(next(self.model.parameters()).dtype)
        with EmptyBatches():
            images = self.model.get_image_features(pixel_values=pixel_values).pooler_output
            texts = self._texts_of(input_ids).pooler_output
        return {"embedding": torch.cat([texts, images]).index_select(0, places)}

    def _texts_of(self, input_ids: torch.Tensor) -> Any:
        return self.model.get_text_features(**_text_inputs(self.model, input_ids, self._pad_token_id))


def _text_inputs(model: Any, input_ids: torch.Tensor, pad_token_id: int) -> dict[str, torch.Tensor]:
    """Makes the inputs of CLIP or SigLIP, or of its part for texts, from ids with any padding, [batch, tokens]."""
    if model.config.model_type.startswith("clip"):
        # A token sees the tokens before it, and thus no padding. transformers makes no mask for a length that it
        # knows, and a trace would keep that for every length.
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        is_seen = positions[:, None] >= positions[None, :]
        mask = added_to_scores(is_seen, next(model.parameters()).dtype)[None, None]
        return {"input_ids": input_ids, "attention_mask": mask}
    # SigLIP was trained on texts padded to its full length, whose last token gives the vector.
    tokens = int(getattr(model.config, "text_config", model.config).max_position_embeddings)
    padding = input_ids.new_full((input_ids.shape[0], tokens), pad_token_id)
    return {"input_ids": torch.cat([input_ids, padding], 1)[:, :tokens]}


# The architectures of a part of CLIP or SigLIP → the part of the result that is its vector. The vectors of other parts
# that project, such as MetaCLIP 2, are not made.
IMAGE_PARTS = {"CLIPVisionModelWithProjection": "image_embeds"}
TEXT_PARTS = {"CLIPTextModelWithProjection": "text_embeds", "SiglipTextModel": "pooler_output"}


class TextsPart(torch.nn.Module):
    """The part of CLIP or SigLIP for texts alone. `name`: the name of the output."""

    def __init__(self, model: Any, tokenizer: SourceTokenizer, name: str) -> None:
        super().__init__()
        self.model = model
        self._pad_token_id, self._name = tokenizer.pad_token_id, name

    def forward(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        result = self.model(**_text_inputs(self.model, input_ids, self._pad_token_id))
        return {self._name: getattr(result, TEXT_PARTS[type(self.model).__name__])}


def image_text_facts(folder: Path, model: Any) -> ImageTextFacts:
    """Reads the conversion of a cosine to a score. Raises SetupError if the model's files lack a part of it."""
    parameters = [model.logit_scale] + ([model.logit_bias] if model.config.model_type == "siglip" else [])
    if any(parameter.requires_grad for parameter in parameters):  # load_weights marks parameters that the files lack
        raise SetupError(f"{folder}: its weights lack logit_scale or logit_bias, without which it has no scores")
    scale, shift = float(model.logit_scale.exp()), sum(float(parameter) for parameter in parameters[1:])
    return ImageTextFacts(scale=scale, shift=shift, function="softmax" if len(parameters) == 1 else "sigmoid")


def check_texts(folder: Path, model: Any, tokenizer: SourceTokenizer) -> None:
    """Raises SetupError if the graph would read the tokenizer's texts otherwise than transformers."""
    if model.config.model_type.startswith("siglip") and "attention_mask" in tokenizer.input_names:
        raise SetupError(
            f"{folder}: its tokenizer masks padding (model_input_names has attention_mask), with which SigLIP was not "
            "trained; leave attention_mask out of model_input_names in tokenizer_config.json"
        )


class ImageModule(torch.nn.Module):
    """A model after the normalization of its images. `attribute`: the part of its result that is the `output`."""

    def __init__(self, normalize: NormalizeLevels, model: torch.nn.Module, attribute: str, output: str) -> None:
        super().__init__()
        self.normalize = normalize
        self.model = model
        self._attribute, self.output = attribute, output

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        dtype = next(self.model.parameters()).dtype
        result = self.model(pixel_values=self.normalize(pixels).to(dtype), return_dict=True)
        vectors: Any = getattr(result, self._attribute, None)
        # ResNet and its kin pool to maps of one place, [batch, width, 1, 1].
        is_map = vectors is not None and vectors.shape[2:] == (1, 1)
        return {self.output: vectors.flatten(1) if is_map else vectors}


def image_module(
    processor: SourceImageProcessor,
    module: ImageModule,
    task: str,
    tokenizer: SourceTokenizer,
    facts: TaskFacts,
    labels: tuple[str, ...] = (),
) -> SourceModule:
    model: Any = module.model
    height, width = processor.spec.size
    return SourceModule(
        module=module.eval(),
        task=task,
        architecture=type(model).__name__,
        inputs=(PIXELS,),
        outputs=(module.output,),
        max_tokens=processor.spec.tokens,
        config=model.config,
        tokenizer=tokenizer,
        labels=labels,
        image=processor.spec,
        facts={task: facts},
        remarks={"images": f"{width} x {height} pixels"},
    )


def try_images(
    folder: Path, module: Callable[[torch.Tensor], dict[str, torch.Tensor]], model: Any, size: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """Returns the outputs for an image of a size, (height, width).

    Fixes the model's positions to this size from now on.
    """
    images = f"{folder}: its image processor makes RGB images of {size[0]} x {size[1]}"
    refused = refusing(f"{images}, which {type(model).__name__} does not take", why=None)
    with refused, torch.no_grad(), fixing_positions(model):
        return module(torch.zeros((1, 3, *size), dtype=torch.uint8))


def encode_images(module: SourceModule, texts: Sequence[str]) -> SampleBatch:
    assert module.image is not None  # noqa: S101 (the module is a module of images)
    return {PIXELS: np.stack([sample_pixels(module.image, zlib.crc32(text.encode())) for text in texts])}


def encode_image_files(module: SourceModule, files: Sequence[Path]) -> SampleBatch:
    """Reads the images of files. Raises SetupError if a file cannot be read, or is no image."""
    assert module.image is not None  # noqa: S101 (the module is a module of images)
    return {PIXELS: np.stack([_pixels(file, module.image) for file in files])}


def _pixels(file: Path, spec: ImageSpec) -> NDArray[np.uint8]:
    with reporting_os_errors(f"{file}: cannot be read"):
        content = file.read_bytes()
    try:
        return read_pixels(content, spec)
    except InvalidInput as error:
        raise SetupError(f"{file}: {error}") from error
