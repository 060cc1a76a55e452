"""Compiles for zero-shot image classification: the vectors of images and texts as one graph."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from neuronpipe.compiler.image_modules import encode_images, try_images
from neuronpipe.compiler.image_processors import load_image_processor
from neuronpipe.compiler.images_and_texts import ImagesAndTexts, check_texts, image_text_facts
from neuronpipe.compiler.modules import PIXELS, PLACES, Batch, SourceModule
from neuronpipe.compiler.sentence_transformers import transformer_folder
from neuronpipe.compiler.tasks.base import SourceTask, encode_texts
from neuronpipe.compiler.tasks.sentence_embedding import cosine_similarity
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.tasks.vectors import EmbeddingFacts

_IDS, _OUTPUT = "input_ids", "embedding"
# Samples take long where each has an image: this many of a batch have one.
_SAMPLE_IMAGES = 2


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    processor = load_image_processor(transformer_folder(folder))
    model = load_weights(transformers.AutoModel, folder)
    check_texts(folder, model, tokenizer)
    module = ImagesAndTexts(model, processor.normalize, tokenizer).eval()
    height, width = processor.spec.size
    example = {_IDS: torch.zeros((1, 3), dtype=torch.int64), PLACES: torch.arange(2)}
    dimensions = try_images(folder, lambda pixels: module(**example, pixels=pixels), model, (height, width))[_OUTPUT]
    vectors = EmbeddingFacts(embedding_dimensions=dimensions.shape[1])
    limits = [tokenizer.max_tokens, int(model.config.text_config.max_position_embeddings)]
    return SourceModule(
        module=module,
        task="zero_shot_image_classification",
        architecture=type(model).__name__,
        inputs=(_IDS, PIXELS, PLACES),
        outputs=(_OUTPUT,),
        max_tokens=min(limit for limit in limits if limit),
        config=model.config.text_config,
        tokenizer=tokenizer,
        image=processor.spec,
        facts={
            "zero_shot_image_classification": image_text_facts(folder, model),
            **dict.fromkeys(("image_embedding", "sentence_embedding", "sentence_similarity"), vectors),
        },
        remarks={"images": f"{width} x {height} pixels"},
    )


def _encode(module: SourceModule, texts: Sequence[str]) -> Batch:
    """The texts, and before them, as `places` says, images of some; a text alone has none."""
    images = encode_images(module, texts[:_SAMPLE_IMAGES])[PIXELS][: len(texts) if len(texts) > 1 else 0]
    order = [*range(len(texts), len(texts) + len(images)), *range(len(texts))]
    return {_IDS: encode_texts(module, texts)[_IDS], PIXELS: images, PLACES: np.array(order, np.int64)}


TASK = SourceTask(
    _load, _encode, cosine_similarity, np.min, "smallest cosine similarity of a text's or an image's vectors"
)
