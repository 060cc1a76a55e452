"""Compiles for text classification: the logits of a classifier.

The same graph serves two more tasks if its labels allow it.
"""

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from neuronpipe.compiler.cross_encoders import entailing, ranking
from neuronpipe.compiler.decoder_masks import MASKED_DECODERS
from neuronpipe.compiler.modules import Batch, Named, Outputs, SourceModule, source_module
from neuronpipe.compiler.sentence_transformers import last_token, read_limits
from neuronpipe.compiler.source_checks import check_labels
from neuronpipe.compiler.tasks.base import Measured, SourceTask, encode_texts
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_weights
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import TaskFacts
from neuronpipe.tasks.scores import ClassifierFacts, ScoreFunctionName

# Task → its facts about a model; raises SetupError for a model that cannot have the task.
_FACTS: Mapping[str, Callable[[Path, Any], TaskFacts]] = {
    "text_classification": lambda folder, config: classifier_facts(config),
    "rerank": ranking,
    "zero_shot_classification": entailing,
}


def load_classifier(folder: Path, tokenizer: SourceTokenizer, task: str = "text_classification") -> SourceModule:
    """A classifier for one of the tasks of its graph. The module also names the others. Raises SetupError."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)  # before the weights are read
    check_labels(folder, config)
    _FACTS[task](folder, config)
    model = load_weights(transformers.AutoModelForSequenceClassification, folder)
    facts = {}
    for answered, find in _FACTS.items():
        with contextlib.suppress(SetupError):
            facts[answered] = find(folder, model.config)
    labels = labels_of(model.config)
    limit = read_limits(folder).get("max_seq_length")
    named = DecoderClassifier(model) if model.config.model_type in MASKED_DECODERS else Named(model, "logits")
    return source_module(
        named, model, task, tokenizer, outputs=("logits",), max_tokens=limit, labels=labels, facts=facts
    )


class DecoderClassifier(torch.nn.Module):
    """A decoder whose head sees its last token that is not padding.

    As transformers has it, a token is padding that has the id of padding, wherever it comes from. Source:
    GenericForSequenceClassification, modeling_layers.py.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.named = Named(model.base_model, "last_hidden_state")

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        vectors = self.named(input_ids, attention_mask)["last_hidden_state"]
        padding = self.model.config.pad_token_id
        mask = attention_mask if padding is None else attention_mask * (input_ids != padding)
        return {"logits": self.model.score(last_token(vectors, mask))}


def labels_of(config: Any) -> tuple[str, ...]:
    """A classifier's labels, in the order of its logits."""
    return tuple(config.id2label[index] for index in range(config.num_labels))


def classifier_facts(config: Any) -> ClassifierFacts:
    """The function that turns a classifier's logits into scores."""
    return ClassifierFacts(score_function=_score_function(config))


def _score_function(config: Any) -> ScoreFunctionName:
    # The default of the pipelines of text and image classification.
    if config.problem_type == "regression":
        return "none"
    if config.problem_type == "multi_label_classification" or config.num_labels == 1:
        return "sigmoid"
    return "softmax"


def same_best_label(outputs: Outputs, reference: Outputs, batch: Batch) -> Measured | None:
    """Whether each text's best label is the same; None for a model with one label."""
    if reference["logits"].shape[1] == 1:
        return None
    same: Measured = np.equal(outputs["logits"].argmax(axis=1), reference["logits"].argmax(axis=1))
    return same


TASK = SourceTask(load_classifier, encode_texts, same_best_label, np.mean, "share of texts with the same best label")
