"""Text classification, compiled: the logits of a classifier."""

from pathlib import Path
from typing import Any

import numpy as np
import transformers

from neuronpipe.bundles.compiler.modules import Named, SourceModule, load_weights, source_module
from neuronpipe.bundles.compiler.tasks.base import Batch, Measured, Outputs, SourceTask, encode_texts
from neuronpipe.bundles.compiler.tokenizers import SourceTokenizer
from neuronpipe.core.model import ScoreFunctionName


def _load(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    model = load_weights(transformers.AutoModelForSequenceClassification, folder)
    facts = classifier_facts(model.config)
    return source_module(Named(model, "logits"), model, "text_classification", tokenizer, outputs=("logits",), facts=facts)


def classifier_facts(config: Any) -> dict[str, Any]:
    """A classifier's labels, and how its logits become scores, as fields of ModelSpec."""
    return {
        "labels": tuple(config.id2label[index] for index in range(config.num_labels)),
        "score_function": _score_function(config),
    }


def _score_function(config: Any) -> ScoreFunctionName:
    # As the pipelines of text and image classification choose where its caller does not.
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"


def same_best_label(outputs: Outputs, reference: Outputs, batch: Batch) -> Measured | None:
    """Whether each text's best label is the same; None where there is one label."""
    if reference["logits"].shape[1] == 1:
        return None
    same: Measured = np.equal(outputs["logits"].argmax(axis=1), reference["logits"].argmax(axis=1))
    return same


TASK = SourceTask(_load, encode_texts, same_best_label, np.mean, "share of texts with the same best label")
