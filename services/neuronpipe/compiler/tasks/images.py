"""Compiles for tasks of images: normalization of the levels, and a classifier's logits or a pooled vector.

Zero-shot image classification compares the vectors of images and texts, which are one graph.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
import transformers

from neuronpipe.compiler.images import (
    IMAGE_PARTS,
    ImageModule,
    ImagesAndTexts,
    check_texts,
    encode_images,
    image_module,
    image_text_facts,
    load_image_processor,
    try_images,
)
from neuronpipe.compiler.modules import PIXELS, PLACES, SampleBatch, SourceModule, classifier_facts, labels_of
from neuronpipe.compiler.sentence_transformers import read_limits, read_modules, transformer_folder
from neuronpipe.compiler.source import check_labels
from neuronpipe.compiler.tasks.base import SourceTask, encode_texts
from neuronpipe.compiler.tasks.labels import same_best_label
from neuronpipe.compiler.tasks.vectors import cosine_similarity
from neuronpipe.compiler.tokenizers import NO_TOKENIZER, SourceTokenizer
from neuronpipe.compiler.weights import architecture_of, load_weights
from neuronpipe.core.errors import SetupError
from neuronpipe.tasks.vectors import EmbeddingFacts

_LOGITS = "logits"


def _load_image_classification(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    processor = load_image_processor(folder)
    model = load_weights(transformers.AutoModelForImageClassification, folder)
    check_labels(folder, model.config)
    module = ImageModule(processor.normalize, model, _LOGITS, _LOGITS)
    try_images(folder, module, model, processor.spec.size)
    facts, labels = classifier_facts(model.config), labels_of(model.config)
    return image_module(
        processor=processor, module=module, task="image_classification", tokenizer=tokenizer, facts=facts, labels=labels
    )


IMAGE_CLASSIFICATION = SourceTask(
    _load_image_classification,
    encode_images,
    same_best_label,
    np.mean,
    "share of images with the same best label",
    load_tokenizer=lambda folder: NO_TOKENIZER,
)


_POOLED, _OUTPUT = "pooler_output", "image_embedding"


def _load_image_embedding(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    processor = load_image_processor(folder)
    architecture = architecture_of(folder)
    vector = IMAGE_PARTS.get(architecture, _POOLED)
    auto_class = getattr(transformers, architecture) if architecture in IMAGE_PARTS else transformers.AutoModel
    model = load_weights(auto_class, folder)
    module = ImageModule(processor.normalize, model, vector, _OUTPUT)
    pooled = try_images(folder, module, model, processor.spec.size)[_OUTPUT]
    if pooled is None or pooled.ndim != 2:
        raise SetupError(f"{folder}: {type(model).__name__} pools no vector of an image, which image-embedding needs")
    facts = EmbeddingFacts(embedding_dimensions=pooled.shape[1])
    return image_module(processor, module, "image_embedding", tokenizer, facts)


IMAGE_EMBEDDING = SourceTask(
    _load_image_embedding,
    encode_images,
    cosine_similarity,
    np.min,
    "smallest cosine similarity of an image's embeddings",
    load_tokenizer=lambda folder: NO_TOKENIZER,
)


_IDS, _IMAGE_AND_TEXT = "input_ids", "embedding"
# Number of samples with an image in a batch. Batches with an image for each sample take long.
_SAMPLE_IMAGES = 2


def _load_zero_shot_image_classification(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    if others := {kind for kind, _ in read_modules(folder)[1:]} - {"Normalize"}:
        problem = f"has {', '.join(sorted(others))} behind its model of images and texts, which is not supported"
        raise SetupError(f"{folder}: {problem}; supported is Normalize")
    processor = load_image_processor(transformer_folder(folder))
    model = load_weights(transformers.AutoModel, folder)
    if read_modules(folder) and model.config.model_type.startswith("siglip"):
        problem = "sentence-transformers pads texts to the longest of a batch, and SigLIP reads texts of one length"
        raise SetupError(f"{folder}: {problem}; take modules.json out to have all texts padded to this length")
    check_texts(folder, model, tokenizer)
    module = ImagesAndTexts(model, processor.normalize, tokenizer).eval()
    height, width = processor.spec.size
    example = {_IDS: torch.zeros((1, 3), dtype=torch.int64), PLACES: torch.arange(2)}
    outputs = try_images(folder, lambda pixels: module(**example, pixels=pixels), model, (height, width))
    vectors = EmbeddingFacts(embedding_dimensions=outputs[_IMAGE_AND_TEXT].shape[1])
    limits = [
        read_limits(transformer_folder(folder)).get("max_seq_length") or tokenizer.max_tokens,
        int(model.config.text_config.max_position_embeddings),
    ]
    return SourceModule(
        module=module,
        task="zero_shot_image_classification",
        architecture=type(model).__name__,
        inputs=(_IDS, PIXELS, PLACES),
        outputs=(_IMAGE_AND_TEXT,),
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


def _encode_zero_shot_image_classification(module: SourceModule, texts: Sequence[str]) -> SampleBatch:
    """Makes a batch of the texts and images of some texts; `places` puts images first. A single text has no image."""
    images = encode_images(module, texts[:_SAMPLE_IMAGES])[PIXELS][: len(texts) if len(texts) > 1 else 0]
    order = [*range(len(texts), len(texts) + len(images)), *range(len(texts))]
    return {_IDS: encode_texts(module, texts)[_IDS], PIXELS: images, PLACES: np.array(order, np.int64)}


ZERO_SHOT_IMAGE_CLASSIFICATION = SourceTask(
    _load_zero_shot_image_classification,
    _encode_zero_shot_image_classification,
    cosine_similarity,
    np.min,
    "smallest cosine similarity of a text's or an image's vectors",
)
