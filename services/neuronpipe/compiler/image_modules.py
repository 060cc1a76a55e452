"""Models of images as modules: normalization of the levels, then the model."""

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from neuronpipe.compiler.fixed_positions import fixing_positions
from neuronpipe.compiler.image_processors import Normalize, SourceImageProcessor, sample_pixels
from neuronpipe.compiler.modules import PIXELS, Batch, SourceModule
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.core.errors import InvalidInput, SetupError
from neuronpipe.core.model import ImageSpec, TaskFacts
from neuronpipe.tasks.inputs.images import read_pixels


class ImageModule(torch.nn.Module):
    """A model after the normalization of its images. `attribute`: of its result, which becomes the output `name`."""

    def __init__(self, normalize: Normalize, model: torch.nn.Module, attribute: str, name: str) -> None:
        super().__init__()
        self.normalize = normalize
        self.model = model
        self._attribute, self._name = attribute, name

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        dtype = next(self.model.parameters()).dtype
        result = self.model(pixel_values=self.normalize(pixels).to(dtype), return_dict=True)
        return {self._name: getattr(result, self._attribute)}


def image_module(
    processor: SourceImageProcessor,
    module: ImageModule,
    outputs: tuple[str, ...],
    task: str,
    tokenizer: SourceTokenizer,
    *,
    labels: tuple[str, ...] = (),
    facts: Mapping[str, TaskFacts],
) -> SourceModule:
    """`module` with the data of the model's configuration and image processor."""
    model: Any = module.model
    height, width = processor.spec.size
    return SourceModule(
        module=module.eval(),
        task=task,
        architecture=type(model).__name__,
        inputs=(PIXELS,),
        outputs=outputs,
        max_tokens=processor.spec.tokens,
        config=model.config,
        tokenizer=tokenizer,
        labels=labels,
        image=processor.spec,
        facts=facts,
        remarks={"images": f"{width} x {height} pixels"},
    )


def try_images(
    folder: Path, module: Callable[[torch.Tensor], dict[str, torch.Tensor]], model: Any, size: tuple[int, int]
) -> dict[str, torch.Tensor]:
    """The outputs of a module for one image of a size, height and width, to which the model's positions are fixed from
    now on. Raises SetupError if the model does not take it.
    """
    try:
        with torch.no_grad(), fixing_positions(model):
            return module(torch.zeros((1, 3, *size), dtype=torch.uint8))
    except Exception as error:  # each model raises other exceptions for images of another size
        raise SetupError(
            f"{folder}: its image processor makes RGB images of {size[0]} x {size[1]}, which {type(model).__name__} "
            "does not take"
        ) from error


def encode_images(module: SourceModule, texts: Sequence[str]) -> Batch:
    """An image for each text, made from its words."""
    assert module.image is not None  # noqa: S101 (it is a module of images)
    return {PIXELS: np.stack([sample_pixels(module.image, zlib.crc32(text.encode())) for text in texts])}


def encode_image_files(module: SourceModule, files: Sequence[Path]) -> Batch:
    """The images of files. Raises SetupError for one that cannot be read, or is no image."""
    assert module.image is not None  # noqa: S101 (it is a module of images)
    return {PIXELS: np.stack([_pixels(file, module.image) for file in files])}


def _pixels(file: Path, spec: ImageSpec) -> NDArray[np.uint8]:
    try:
        return read_pixels(file.read_bytes(), spec)
    except OSError as error:
        raise SetupError(f"{file}: cannot be read: {os.strerror(error.errno or 0)}") from error
    except InvalidInput as error:
        raise SetupError(f"{file}: {error}") from error
