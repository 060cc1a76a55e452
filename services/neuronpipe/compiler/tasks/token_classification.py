"""Compiles for token classification: the logits of the labels of every token."""

from pathlib import Path

import numpy as np
import transformers

from neuronpipe.compiler.modules import Batch, Named, Outputs, SourceModule, source_module
from neuronpipe.compiler.source_checks import check_labels
from neuronpipe.compiler.tasks.base import Measured, SourceTask, encode_texts
from neuronpipe.compiler.tasks.text_classification import labels_of
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.core.model import TaskFacts


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    model = load_weights(transformers.AutoModelForTokenClassification, folder)
    check_labels(folder, model.config)
    labels, facts = labels_of(model.config), {"token_classification": TaskFacts()}
    named = Named(model, "logits")
    return source_module(
        named, model, "token_classification", tokenizer, outputs=("logits",), per_token=True, labels=labels, facts=facts
    )


def _same_best_labels(outputs: Outputs, reference: Outputs, batch: Batch) -> Measured:
    is_token = batch["attention_mask"] == 1
    same = outputs["logits"].argmax(axis=-1) == reference["logits"].argmax(axis=-1)
    shares: Measured = (same & is_token).sum(axis=1) / is_token.sum(axis=1)
    return shares


TASK = SourceTask(
    _load, encode_texts, _same_best_labels, np.mean, "mean share of a text's tokens with the same best label"
)
