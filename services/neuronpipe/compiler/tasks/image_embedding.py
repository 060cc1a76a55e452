"""Compiles for image embedding: normalization of the levels, and the vector that a model pools of an image."""

from pathlib import Path

import numpy as np
import transformers

from neuronpipe.compiler.image_modules import ImageModule, encode_images, image_module, try_images
from neuronpipe.compiler.image_processors import load_image_processor
from neuronpipe.compiler.modules import SourceModule
from neuronpipe.compiler.tasks.base import SourceTask
from neuronpipe.compiler.tasks.sentence_embedding import cosine_similarity
from neuronpipe.compiler.tokenizers import NO_TOKENIZER, SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.vectors import EmbeddingFacts

_POOLED, _OUTPUT = "pooler_output", "image_embedding"


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    processor = load_image_processor(folder)
    model = load_weights(transformers.AutoModel, folder)
    module = ImageModule(processor.normalize, model, _POOLED, _OUTPUT)
    pooled = try_images(folder, module, model, processor.spec.size)[_OUTPUT]
    if pooled is None or pooled.ndim != 2:
        raise SetupError(f"{folder}: {type(model).__name__} pools no vector of an image, which image-embedding needs")
    facts = {"image_embedding": EmbeddingFacts(embedding_dimensions=pooled.shape[1])}
    return image_module(processor, module, (_OUTPUT,), "image_embedding", tokenizer, facts=facts)


TASK = SourceTask(
    _load,
    encode_images,
    cosine_similarity,
    np.min,
    "smallest cosine similarity of an image's embeddings",
    load_tokenizer=lambda folder: NO_TOKENIZER,
)
