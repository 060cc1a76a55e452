"""Compiles for image classification: normalization of the levels, and the logits of a classifier."""

from pathlib import Path

import numpy as np
import transformers

from neuronpipe.compiler.image_modules import ImageModule, encode_images, image_module, try_images
from neuronpipe.compiler.image_processors import load_image_processor
from neuronpipe.compiler.modules import SourceModule
from neuronpipe.compiler.source_checks import check_labels
from neuronpipe.compiler.tasks.base import SourceTask
from neuronpipe.compiler.tasks.text_classification import classifier_facts, labels_of, same_best_label
from neuronpipe.compiler.tokenizers import NO_TOKENIZER, SourceTokenizer
from neuronpipe.compiler.weights import load_weights

_OUTPUT = "logits"


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    processor = load_image_processor(folder)
    model = load_weights(transformers.AutoModelForImageClassification, folder)
    check_labels(folder, model.config)
    module = ImageModule(processor.normalize, model, _OUTPUT, _OUTPUT)
    try_images(folder, module, model, processor.spec.size)
    return image_module(
        processor,
        module,
        (_OUTPUT,),
        "image_classification",
        tokenizer,
        labels=labels_of(model.config),
        facts={"image_classification": classifier_facts(model.config)},
    )


TASK = SourceTask(
    _load,
    encode_images,
    same_best_label,
    np.mean,
    "share of images with the same best label",
    load_tokenizer=lambda folder: NO_TOKENIZER,
)
