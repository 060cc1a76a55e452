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
    facts = {
        "labels": tuple(model.config.id2label[index] for index in range(model.config.num_labels)),
        "score_function": _score_function(model.config),
    }
    return source_module(Named(model, "logits"), model, "text_classification", tokenizer, outputs=("logits",), facts=facts)


def _score_function(config: Any) -> ScoreFunctionName:
    # As TextClassificationPipeline.postprocess chooses where its caller does not.
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"


def _same_best_label(outputs: Outputs, reference: Outputs, batch: Batch) -> Measured | None:
    if reference["logits"].shape[1] == 1:
        return None
    same: Measured = np.equal(outputs["logits"].argmax(axis=1), reference["logits"].argmax(axis=1))
    return same


TASK = SourceTask(_load, encode_texts, _same_best_label, np.mean, "share of texts with the same best label")
