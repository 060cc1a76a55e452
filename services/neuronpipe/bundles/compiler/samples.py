"""Batches of sample text on which an artefact is compared with the original: short and long, alone and together."""

import pydoc_data.topics
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from neuronpipe.bundles.compiler.tokenizers import SourceTokenizer, encode_batch

Batch: TypeAlias = Mapping[str, NDArray[np.int64]]

# Batches of sequences of about these many words; rows of one batch differ in length, so that padding is compared too.
_BATCHES = ((9, 14), (2,), (25, 3, 60, 11, 30, 7, 18), (120, 90, 15), (100_000,))


def sample_batches(tokenizer: SourceTokenizer, max_tokens: int) -> Sequence[Batch]:
    """Batches of one to seven texts, the last as long as the model takes. int64 [batch, tokens] by input name."""
    words = " ".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).split()
    batches = []
    position = 0
    for lengths in _BATCHES:
        texts = []
        for length in lengths:
            # No more words than the model can have tokens: each is at least one.
            count = min(length, max_tokens)
            texts.append(" ".join(words[position : position + count]))
            position += count
        encoded = encode_batch(tokenizer, texts, max_tokens)
        batches.append({name: np.asarray(encoded[name], np.int64) for name in tokenizer.input_names if name in encoded})
    return batches
