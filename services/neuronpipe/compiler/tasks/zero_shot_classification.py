"""Compiles for zero-shot classification: the logits of a model of natural language inference."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from neuronpipe.compiler.modules import Batch, SourceModule
from neuronpipe.compiler.tasks import text_classification
from neuronpipe.compiler.tasks.base import encode_texts


def _encode(module: SourceModule, texts: Sequence[str]) -> Batch:
    # The hypothesis is shorter than the text, and has a word of it.
    return encode_texts(module, [f"This example is {text.split()[0]}." for text in texts], texts)


TASK = replace(
    text_classification.TASK,
    load=partial(text_classification.load_classifier, task="zero_shot_classification"),
    encode=_encode,
)
