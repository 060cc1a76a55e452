"""Compiles for image classification: normalization of the levels, and the logits of a classifier."""

import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from neuronpipe.bundles.compiler.image_processors import Normalize, load_image_processor, sample_pixels
from neuronpipe.bundles.compiler.modules import SourceModule
from neuronpipe.bundles.compiler.source_checks import check_labels
from neuronpipe.bundles.compiler.tasks.base import Batch, SourceTask
from neuronpipe.bundles.compiler.tasks.text_classification import classifier_facts, labels_of, same_best_label
from neuronpipe.bundles.compiler.tokenizers import NO_TOKENIZER, SourceTokenizer
from neuronpipe.bundles.compiler.weights import load_weights
from neuronpipe.core.errors import SetupError

_INPUT, _OUTPUT = "pixels", "logits"


class _Classifier(torch.nn.Module):
    """A model after the normalization of its images."""

    def __init__(self, normalize: Normalize, model: torch.nn.Module) -> None:
        super().__init__()
        self.normalize = normalize
        self.model = model

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        dtype = next(self.model.parameters()).dtype
        return {_OUTPUT: self.model(pixel_values=self.normalize(pixels).to(dtype), return_dict=True).logits}


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    processor = load_image_processor(folder)
    model = load_weights(transformers.AutoModelForImageClassification, folder)
    check_labels(folder, model.config)
    module = _Classifier(processor.normalize, model).eval()
    height, width = processor.spec.size
    try:
        with torch.inference_mode():
            module(torch.zeros((1, 3, height, width), dtype=torch.uint8))
    except Exception as error:  # each model raises other exceptions for images of another size
        name = type(model).__name__
        raise SetupError(
            f"{folder}: its image processor makes RGB images of {height} x {width}, which {name} does not take"
        ) from error
    return SourceModule(
        module=module,
        task="image_classification",
        architecture=type(model).__name__,
        inputs=(_INPUT,),
        outputs=(_OUTPUT,),
        max_tokens=processor.spec.tokens,
        config=model.config,
        tokenizer=tokenizer,
        labels=labels_of(model.config),
        image=processor.spec,
        facts={"image_classification": classifier_facts(model.config)},
        remarks={"images": f"{width} x {height} pixels"},
    )


def _encode(module: SourceModule, texts: Sequence[str]) -> Batch:
    """An image for each text, made from its words."""
    assert module.image is not None  # noqa: S101 (as _load made it)
    return {_INPUT: np.stack([sample_pixels(module.image, zlib.crc32(text.encode())) for text in texts])}


TASK = SourceTask(
    _load,
    _encode,
    same_best_label,
    np.mean,
    "share of images with the same best label",
    load_tokenizer=lambda folder: NO_TOKENIZER,
)
