"""Compiles for feature extraction: the last hidden state of a model without a head."""

from pathlib import Path

import numpy as np
import transformers

from neuronpipe.compiler.modules import Batch, Named, Outputs, SourceModule, source_module
from neuronpipe.compiler.tasks.base import Measured, SourceTask, encode_texts
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.tasks.feature_extraction import FeatureFacts

_OUTPUT = "last_hidden_state"


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    model = load_weights(transformers.AutoModel, folder)
    facts = {"feature_extraction": FeatureFacts(embedding_dimensions=model.config.hidden_size)}
    return source_module(
        Named(model, _OUTPUT), model, "feature_extraction", tokenizer, outputs=(_OUTPUT,), per_token=True, facts=facts
    )


def _smallest_cosine_similarity(outputs: Outputs, reference: Outputs, batch: Batch) -> Measured:
    one, other = (vectors[_OUTPUT].astype(np.float64) for vectors in (outputs, reference))
    lengths = np.linalg.norm(one, axis=2) * np.linalg.norm(other, axis=2)
    cosines = (one * other).sum(axis=2) / np.maximum(lengths, np.finfo(np.float64).tiny)
    smallest: Measured = np.where(batch["attention_mask"] == 1, cosines, 1).min(axis=1)
    return np.clip(smallest, 0, 1)  # rounding may exceed 1, and below 0 is as wrong as 0


TASK = SourceTask(
    _load, encode_texts, _smallest_cosine_similarity, np.min, "smallest cosine similarity of a token's vectors"
)
