"""Compiles for tasks of a label, score, span or token: classification, reranking, question answering, masks to fill.

Zero-shot classification takes the logits of a model of natural language inference. A reranker is a cross-encoder, a
classifier of pairs with one label, or a decoder whose yes is scored.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from neuronpipe.compiler.architectures import MASKED_DECODERS, has_decoder
from neuronpipe.compiler.gliner import encode_samples, load_gliner
from neuronpipe.compiler.modules import (
    Named,
    Outputs,
    PooledModule,
    SampleBatch,
    SourceModule,
    choosing,
    classifier_facts,
    labels_of,
    source_module,
)
from neuronpipe.compiler.rerankers import (
    encode_written,
    entailing,
    load_decoder_reranker,
    ranking,
    read_options,
    score_function,
    written_template,
)
from neuronpipe.compiler.saved_files import read_object
from neuronpipe.compiler.sentence_transformers import (
    SCORES,
    last_token,
    read_limits,
    read_modules,
    read_sentence_transformer,
    transformer_folder,
)
from neuronpipe.compiler.source import check_labels
from neuronpipe.compiler.tasks.base import Measured, SourceTask, encode_texts
from neuronpipe.compiler.tokenizers import SourceTokenizer
from neuronpipe.compiler.weights import load_encoder, load_weights
from neuronpipe.core.errors import SetupError
from neuronpipe.core.model import TaskFacts
from neuronpipe.tasks.fill_mask import FillMaskFacts
from neuronpipe.tasks.question_answering import QuestionAnsweringFacts
from neuronpipe.tasks.rerank import RerankFacts

# Task → its facts about a model. Raises SetupError if the model cannot have the task.
_FACTS: Mapping[str, Callable[[Path, Any], TaskFacts]] = {
    "text_classification": lambda folder, config: classifier_facts(config),
    "rerank": ranking,
    "zero_shot_classification": entailing,
}


def load_classifier(folder: Path, tokenizer: SourceTokenizer, task: str = "text_classification") -> SourceModule:
    """Loads a classifier for one of the tasks of its graph, and names its other tasks. Raises SetupError."""
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)  # before the weights are read
    check_labels(folder, config)
    _FACTS[task](folder, config)
    model = load_weights(transformers.AutoModelForSequenceClassification, folder)
    facts = {}
    for answered, find in _FACTS.items():
        with contextlib.suppress(SetupError):
            facts[answered] = find(folder, model.config)
    labels = labels_of(model.config)
    limit = read_limits(transformer_folder(folder)).get("max_seq_length")
    end = getattr(model.config, "eos_token_id", None)
    if has_decoder(model) and end not in tokenizer.transformers_tokenizer("a")["input_ids"]:
        raise SetupError(
            f"{folder}: its tokenizer does not end texts with the eos_token_id {end} of config.json, at which its "
            "classifier reads; correct one of the two"
        )
    reads_one_token = model.config.model_type in MASKED_DECODERS or has_decoder(model)
    named = DecoderClassifier(model) if reads_one_token else Named(model, "logits")
    return source_module(named, model, task, tokenizer, saved_limit=limit, labels=labels, facts=facts)


class DecoderClassifier(torch.nn.Module):
    """A decoder whose head sees one token of a text.

    Behind an encoder, the last end of a sequence (BartForSequenceClassification); else, the last token without the id
    of padding (GenericForSequenceClassification).
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._has_encoder = has_decoder(model)
        self.named = Named(model.base_model, "last_hidden_state")

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> dict[str, torch.Tensor]:
        vectors = self.named(input_ids, attention_mask)["last_hidden_state"]
        if self._has_encoder:
            is_end = attention_mask * (input_ids == self.model.config.eos_token_id)
            return {"logits": self.model.classification_head(last_token(vectors, is_end))}
        padding = self.model.config.pad_token_id
        mask = attention_mask if padding is None else attention_mask * (input_ids != padding)
        return {"logits": self.model.score(last_token(vectors, mask))}


def same_best_label(outputs: Outputs, reference: Outputs, batch: SampleBatch) -> Measured | None:
    """Returns whether each text's best label is the same; None for a model with one label."""
    if reference["logits"].shape[1] == 1:
        return None
    return np.equal(outputs["logits"].argmax(axis=1), reference["logits"].argmax(axis=1))


TEXT_CLASSIFICATION = SourceTask(
    load_classifier, encode_texts, same_best_label, np.mean, "share of texts with the same best label"
)


def _load_token_classification(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    model = load_weights(transformers.AutoModelForTokenClassification, folder)
    check_labels(folder, model.config)
    described: dict[str, Any] = {"per_token": True, "labels": labels_of(model.config), "facts": TaskFacts()}
    return source_module(Named(model, "logits"), model, "token_classification", tokenizer, **described)


def _same_best_labels(outputs: Outputs, reference: Outputs, batch: SampleBatch) -> Measured:
    is_token = batch["attention_mask"] == 1
    same = outputs["logits"].argmax(axis=-1) == reference["logits"].argmax(axis=-1)
    return (same & is_token).sum(axis=1) / is_token.sum(axis=1)


TOKEN_CLASSIFICATION = SourceTask(
    _load_token_classification,
    encode_texts,
    _same_best_labels,
    np.mean,
    "mean share of a text's tokens with the same best label",
)


def _entity_scores(outputs: Outputs, reference: Outputs, batch: SampleBatch) -> Measured:
    """Computes the share of a text's spans whose best label is the same."""
    is_word = batch["attention_mask"] == 1
    same = outputs["logits"].argmax(axis=-1) == reference["logits"].argmax(axis=-1)
    return (same.mean(axis=-1) * is_word).sum(axis=1) / is_word.sum(axis=1)


ZERO_SHOT_TOKEN_CLASSIFICATION = SourceTask(
    load_gliner, encode_samples, _entity_scores, np.mean, "mean share of a text's spans with the same best label"
)


def _encode_zero_shot_classification(module: SourceModule, texts: Sequence[str]) -> SampleBatch:
    # The hypothesis is shorter than the text, and contains a word of it.
    return encode_texts(module, [f"This example is {text.split()[0]}." for text in texts], texts)


ZERO_SHOT_CLASSIFICATION = replace(
    TEXT_CLASSIFICATION,
    load=partial(load_classifier, task="zero_shot_classification"),
    encode=_encode_zero_shot_classification,
)


# Number of first words of a text that become its query or question: real queries are short, with words of the text.
_FIRST_WORDS = 8


def _beginnings(texts: Sequence[str]) -> list[str]:
    return [" ".join(text.split()[:_FIRST_WORDS]) for text in texts]


def _load_rerank(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    if any(kind == "Pooling" for kind, _ in read_modules(folder)):
        return _load_modular_reranker(folder, tokenizer)
    (architecture, *_) = read_object(transformer_folder(folder) / "config.json").get("architectures") or ("",)
    if str(architecture).endswith("ForCausalLM"):
        return load_decoder_reranker(folder, tokenizer)
    module = load_classifier(folder, tokenizer, "rerank")
    if not (options := read_options(folder)).template:
        return module
    template = written_template(folder, tokenizer, options)
    facts = module.facts["rerank"].model_copy(update={"template": template})
    return replace(module, facts={**module.facts, "rerank": facts})


def _load_modular_reranker(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    """Loads a cross-encoder of modules: an encoder, pooling, and layers that make the score."""
    parts = read_sentence_transformer(folder, SCORES)
    model = load_encoder(parts.model_folder)
    module = PooledModule(model, parts.head, "logits")
    with torch.inference_mode():
        scores = module(*torch.ones((2, 1, 1), dtype=torch.int64))["logits"].shape[1]
    if scores != 1 or not parts.head.pooling.pools_prompt:
        reason = f"makes {scores} scores" if scores != 1 else "leaves its prompt out of the pooling (include_prompt)"
        raise SetupError(f"{folder}: is a cross-encoder that {reason}, which is not supported")
    facts = RerankFacts(score_function=score_function(folder, model.config), prompt=parts.prompt)
    remarks = {"pooling": parts.head.describe()}
    return source_module(module, model, "rerank", tokenizer, saved_limit=parts.max_tokens, facts=facts, remarks=remarks)


def _encode_rerank(module: SourceModule, texts: Sequence[str]) -> SampleBatch:
    queries, template = _beginnings(texts), module.fact("template")
    return encode_written(module, template, queries, texts) if template else encode_texts(module, texts, queries)


RERANK = replace(TEXT_CLASSIFICATION, load=_load_rerank, encode=_encode_rerank)


_OUTPUTS = ("start_logits", "end_logits")


def _load_question_answering(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    if tokenizer.transformers_tokenizer.padding_side != "right":
        problem = "pads on the left, so it reads the context before the question"
        raise SetupError(f"{folder}: {problem}, which is not supported")
    model = load_weights(transformers.AutoModelForQuestionAnswering, folder)
    facts = QuestionAnsweringFacts(cls_token_id=tokenizer.cls_token_id)
    return source_module(
        Named(model, *_OUTPUTS), model, "question_answering", tokenizer, outputs=_OUTPUTS, per_token=True, facts=facts
    )


def _same_best_answer(outputs: Outputs, reference: Outputs, batch: SampleBatch) -> Measured:
    is_token = batch["attention_mask"] == 1
    same: Measured = np.ones(len(is_token), np.bool_)
    for name in _OUTPUTS:
        best, expected = (np.where(is_token, logits[name], -np.inf).argmax(axis=1) for logits in (outputs, reference))
        same = same & (best == expected)
    return same


QUESTION_ANSWERING = SourceTask(
    _load_question_answering,
    lambda module, texts: encode_texts(module, texts, _beginnings(texts)),
    _same_best_answer,
    np.mean,
    "share of texts with the same best start and end",
)


_POSITION = "mask_position"


class _AtPosition(torch.nn.Module):
    """A masked language model whose head sees the token of each row where `mask_position` [batch, tokens] is 1."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.named = Named(model, "logits")

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor | None = None,
        mask_position: torch.Tensor | None = None,
    ) -> dict[str, torch.Tensor]:
        assert mask_position is not None  # noqa: S101 (the input that the module is made for)

        with choosing(self.named.model.base_model, lambda vectors: last_token(vectors, mask_position)[:, None]):
            return {"logits": self.named(input_ids, attention_mask, token_type_ids)["logits"][:, 0]}


def _load_fill_mask(folder: Path, tokenizer: SourceTokenizer) -> SourceModule:
    transformers_tokenizer = tokenizer.transformers_tokenizer
    if transformers_tokenizer.mask_token_id is None:
        raise SetupError(f"{folder}: its tokenizer has no mask token, so there is nothing to fill")
    model = load_weights(transformers.AutoModelForMaskedLM, folder)
    facts = FillMaskFacts(
        mask_token=str(transformers_tokenizer.mask_token), mask_token_id=int(transformers_tokenizer.mask_token_id)
    )
    return source_module(_AtPosition(model), model, "fill_mask", tokenizer, facts=facts, further_inputs=(_POSITION,))


def _encode_fill_mask(module: SourceModule, texts: Sequence[str]) -> SampleBatch:
    """Encodes the texts, with a mask instead of a token in the middle."""
    batch = dict(encode_texts(module, texts))
    batch["input_ids"] = batch["input_ids"].copy()
    rows = np.arange(len(texts))
    middle = batch["attention_mask"].sum(axis=1) // 2
    batch[_POSITION] = np.zeros_like(batch["input_ids"])
    batch[_POSITION][rows, middle] = 1
    batch["input_ids"][rows, middle] = module.fact("mask_token_id")
    return batch


FILL_MASK = SourceTask(
    _load_fill_mask, _encode_fill_mask, same_best_label, np.mean, "share of texts with the same best token for a mask"
)
