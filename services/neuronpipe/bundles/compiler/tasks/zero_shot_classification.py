"""Zero-shot classification, compiled: the logits of a model of entailment."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from neuronpipe.bundles.compiler.modules import SourceModule
from neuronpipe.bundles.compiler.tasks import text_classification
from neuronpipe.bundles.compiler.tasks.base import Batch, encode_texts


def _encode(module: SourceModule, texts: Sequence[str]) -> Batch:
    # A hypothesis is the shorter of the two, and has a word of its text.
    return encode_texts(module, [f"This example is {text.split()[0]}." for text in texts], texts)


TASK = replace(text_classification.TASK, load=partial(text_classification.load_classifier, task="zero_shot_classification"), encode=_encode)
