"""Compiles for reranking: the logit of a cross-encoder, a classifier of pairs with one label."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from neuronpipe.bundles.compiler.modules import SourceModule
from neuronpipe.bundles.compiler.tasks import text_classification
from neuronpipe.bundles.compiler.tasks.base import Batch, encode_texts

# The first words of a text are its query. Like a real query, it is short, and has words of its text.
_QUERY_WORDS = 8


def _encode(module: SourceModule, texts: Sequence[str]) -> Batch:
    return encode_texts(module, texts, [" ".join(text.split()[:_QUERY_WORDS]) for text in texts])


TASK = replace(
    text_classification.TASK, load=partial(text_classification.load_classifier, task="rerank"), encode=_encode
)
