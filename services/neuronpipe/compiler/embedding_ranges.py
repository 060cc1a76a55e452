"""The range of each dimension of a model's vectors, by which int8 vectors are made of them.

Measured on the outputs of PyTorch for the texts of the comparison: some 120 sample texts in many languages, or up to
128 texts of --calibration. quantize_embeddings of sentence-transformers advises 100 or more.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from neuronpipe.compiler.modules import Outputs, SourceModule
from neuronpipe.tasks.vectors import EmbeddingFacts, normalized, vector_of

# Whose vectors are of texts alone: sample images say little of photographs.
EMBEDDING_TASKS = ("sentence_embedding", "sentence_similarity")


def with_ranges(module: SourceModule, outputs: Sequence[Outputs]) -> SourceModule:
    """The module with the ranges of its outputs among its facts; another kind of module as it is."""
    if module.task not in EMBEDDING_TASKS:
        return module
    vectors = normalized(np.concatenate([vector_of(one) for one in outputs]))
    ranges = {"lowest": tuple(vectors.min(axis=0).tolist()), "highest": tuple(vectors.max(axis=0).tolist())}
    facts = {
        task: one.model_copy(update=ranges) if isinstance(one, EmbeddingFacts) else one
        for task, one in module.facts.items()
    }
    return dataclasses.replace(module, facts=facts)
