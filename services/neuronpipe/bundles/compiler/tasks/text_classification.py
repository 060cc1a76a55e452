"""Text classification, compiled: the logits of a classifier. Two more tasks are served by the same graph, where its labels allow it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from neuronpipe.bundles.compiler.cross_encoders import entailing, ranking
from neuronpipe.bundles.compiler.modules import Named, SourceModule, load_weights, source_module
from neuronpipe.bundles.compiler.sentence_transformers import read_limits
from neuronpipe.bundles.compiler.tasks.base import Batch, Measured, Outputs, SourceTask, encode_texts
from neuronpipe.bundles.compiler.tokenizers import SourceTokenizer
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import ScoreFunctionName

# Task → what it needs to know of a model besides; raises SetupError for a model that cannot have it.
_FACTS: Mapping[str, Callable[[Path, Any], dict[str, Any]]] = {
    "text_classification": lambda folder, config: {},
    "rerank": ranking,
    "zero_shot_classification": entailing,
}


def load_classifier(folder: Path, tokenizer: SourceTokenizer, task: str = "text_classification") -> SourceModule:
    """A classifier for one of the tasks that its graph serves, which says which others it answers. Raises SetupError."""
    _FACTS[task](folder, transformers.AutoConfig.from_pretrained(folder))  # before the weights are read in vain
    model = load_weights(transformers.AutoModelForSequenceClassification, folder)
    facts = classifier_facts(model.config)
    others = []
    for other, find in _FACTS.items():
        try:
            facts |= find(folder, model.config)
        except SetupError:
            continue
        others.append(other)
    facts["also_answers"] = tuple(other for other in others if other != task)
    limit = read_limits(folder).get("max_seq_length")
    return source_module(Named(model, "logits"), model, task, tokenizer, outputs=("logits",), max_tokens=limit, facts=facts)


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


TASK = SourceTask(load_classifier, encode_texts, same_best_label, np.mean, "share of texts with the same best label")
