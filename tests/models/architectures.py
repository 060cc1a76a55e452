"""The architectures that must work, in small configurations, with a tokenizer or an image processor of the kind that
each has.
"""

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import transformers

from tests.models import gliner, jina_bert
from tests.models.images import (
    IMAGE_FAMILIES,
    IMAGE_TEXT_FAMILIES,
    make_image_encoder_source,
    make_image_source,
    make_image_text_source,
)
from tests.models.repository import SMALL, named_labels, save
from tests.models.tokenizers import byte_level_bpe, mbart, t5, unigram, unigram_pairs, word_piece

MAX_TOKENS = 64

_LABELS = named_labels(["contradiction", "neutral", "entailment"])
_IDENTITY = "torch.nn.modules.linear.Identity"
_BERT = {**SMALL, "max_position_embeddings": MAX_TOKENS}
# Positions begin after the padding id 1.
_ROBERTA = {**SMALL, "max_position_embeddings": MAX_TOKENS + 2, "type_vocab_size": 1}

# task → (the class of transformers that has its head, values of its configuration)
_HEADS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "text_classification": ("AutoModelForSequenceClassification", _LABELS),
    "sentence_embedding": ("AutoModel", {}),
    "question_answering": ("AutoModelForQuestionAnswering", {}),
    "token_classification": ("AutoModelForTokenClassification", _LABELS),
    "fill_mask": ("AutoModelForMaskedLM", {}),
    "feature_extraction": ("AutoModel", {}),
    "sentence_similarity": ("AutoModel", {}),
    "rerank": ("AutoModelForSequenceClassification", {"num_labels": 1}),
    "zero_shot_classification": ("AutoModelForSequenceClassification", _LABELS),
    "sparse_embedding": ("AutoModelForMaskedLM", {}),
    "multi_vector_embedding": ("AutoModel", {}),
    "image_classification": ("AutoModelForImageClassification", _LABELS),
    "image_embedding": ("AutoModel", {}),
    "zero_shot_image_classification": ("AutoModel", {}),
}
_OF_IMAGES = ("image_classification", "image_embedding")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A family of text models. `model_type` is transformers' name for it."""

    model_type: str
    tokenizer: Callable[..., Any]
    config: Mapping[str, Any] = field(default_factory=dict)
    tasks: tuple[str, ...] = ()
    """Of a family that is published for some tasks only."""
    publish: Callable[..., Path] | None = None
    """Makes a model (folder, task, tokenizer) that transformers does not have."""

    def make_source(self, folder: Path, task: str) -> Path:
        """A small model of this architecture with a task's head, and its tokenizer."""
        if self.publish:
            return self.publish(folder, task, self.tokenizer(max_tokens=MAX_TOKENS))
        head, values = _HEADS[task]
        if self.model_type in _T5_KINDS and head == "AutoModel":
            head = "AutoModelForTextEncoding"
        tokenizer = self.tokenizer(max_tokens=MAX_TOKENS)
        special = {
            "pad_token_id": tokenizer.pad_token_id,
            "bos_token_id": tokenizer.cls_token_id,
            "cls_token_id": tokenizer.cls_token_id,
            "eos_token_id": tokenizer.eos_token_id if tokenizer.sep_token_id is None else tokenizer.sep_token_id,
            "sep_token_id": tokenizer.sep_token_id,
        }
        config = transformers.AutoConfig.for_model(
            self.model_type, vocab_size=len(tokenizer), **special, **self.config, **values
        )
        save(getattr(transformers, head).from_config(config), folder, tokenizer)
        if task == "multi_vector_embedding":
            _project(folder)
        return folder


def _project(folder: Path) -> None:
    """Makes it a model of late interaction, as sentence-transformers saves one: 16 numbers for each token."""
    kinds = {"Dense": "1_Dense", "Normalize": "2_Normalize"}
    modules = [{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}]
    for number, (kind, path) in enumerate(kinds.items(), start=1):
        modules.append(
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        )
        (folder / path).mkdir()
    dense = {"in_features": 32, "out_features": 16, "bias": False, "activation_function": _IDENTITY}
    (folder / "1_Dense" / "config.json").write_text(json.dumps(dense | {"module_input_name": "token_embeddings"}))
    weight = np.random.default_rng(7).standard_normal((16, 32)).astype(np.float32)
    safetensors.numpy.save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    (folder / "2_Normalize" / "config.json").write_text(json.dumps({"module_input_name": "token_embeddings"}))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"model_type": "MultiVectorEncoder"}))


_DISTILBERT = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "max_position_embeddings": MAX_TOKENS}
_NARROW = dict.fromkeys(("embedding_size", "intra_bottleneck_size", "true_hidden_size"), 16)
_MOBILEBERT = {**_BERT, **_NARROW, "num_feedforward_networks": 2}
_DEBERTA_3 = {**_BERT, **gliner.DEBERTA_3}

_SCORES = ("text_classification", "rerank", "zero_shot_classification")
_SCORES_AND_VECTORS = (*_SCORES, "sentence_embedding", "sentence_similarity")
_OF_JINA_2 = (*_SCORES_AND_VECTORS, "fill_mask", "feature_extraction")
# Models of late interaction have a layer behind an encoder, which is the same for all of them.
_OTHERS = (*_OF_IMAGES, "zero_shot_image_classification")
_NOT_OF_ALL = (*_OTHERS, "multi_vector_embedding")
_LATE_INTERACTION = ("BERT", "XLM-R", "ModernBERT")
_BART_SIZES = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
_DECODER = {**_BERT, "num_key_value_heads": 2, "head_dim": 8}
_GEMMA = {**_DECODER, "query_pre_attn_scalar": 8, "sliding_window": 16}
_GEMMA_3 = {**_GEMMA, "layer_types": ["sliding_attention", "full_attention"]}

_BART = {
    "d_model": 32,
    **{f"{part}_{size}": count for part in ("encoder", "decoder") for size, count in _BART_SIZES.items()},
    "max_position_embeddings": MAX_TOKENS,
}
_T5_KINDS = ("t5", "mt5", "umt5")
_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20,
}

# Decoders, for vectors and scores.
DECODERS: dict[str, Architecture] = {
    "Llama": Architecture("llama", byte_level_bpe, _DECODER, tasks=_SCORES_AND_VECTORS),
    "Mistral": Architecture("mistral", byte_level_bpe, {**_DECODER, "sliding_window": 16}, tasks=_SCORES_AND_VECTORS),
    "Qwen2": Architecture("qwen2", byte_level_bpe, _DECODER, tasks=_SCORES_AND_VECTORS),
    "Qwen3": Architecture("qwen3", byte_level_bpe, _DECODER, tasks=_SCORES_AND_VECTORS),
    "Gemma": Architecture("gemma", byte_level_bpe, _DECODER, tasks=_SCORES_AND_VECTORS),
    "Gemma 2": Architecture("gemma2", byte_level_bpe, _GEMMA, tasks=_SCORES_AND_VECTORS),
    "Gemma 3": Architecture("gemma3_text", byte_level_bpe, _GEMMA_3, tasks=_SCORES_AND_VECTORS),
    "Gemma 3, bidirectional": Architecture(
        "gemma3_text", byte_level_bpe, {**_GEMMA_3, "use_bidirectional_attention": True}, tasks=_SCORES_AND_VECTORS
    ),
}

_make_jina_2_for_code = functools.partial(jina_bert.make_source, has_query_norms=True)
ENCODERS: dict[str, Architecture] = {
    "BERT": Architecture("bert", word_piece, _BERT),
    "RoBERTa": Architecture("roberta", byte_level_bpe, _ROBERTA),
    "XLM-R": Architecture("xlm-roberta", unigram, _ROBERTA),
    "CamemBERT": Architecture("camembert", unigram, _ROBERTA),
    "DistilBERT": Architecture("distilbert", word_piece, _DISTILBERT),
    "ALBERT": Architecture("albert", unigram_pairs, {**_BERT, "embedding_size": 16}),
    "ELECTRA": Architecture("electra", word_piece, {**_BERT, "embedding_size": 16}),
    "MPNet": Architecture("mpnet", byte_level_bpe, _ROBERTA),
    "DeBERTa-v3": Architecture("deberta-v2", unigram_pairs, _DEBERTA_3),
    "MobileBERT": Architecture("mobilebert", word_piece, _MOBILEBERT),
    # A layer in three sees all tokens, the others those at most 8 away.
    "ModernBERT": Architecture("modernbert", word_piece, {**_BERT, "num_hidden_layers": 4, "local_attention": 16}),
    "BigBird": Architecture("big_bird", unigram_pairs, {**_BERT, "block_size": 16, "num_random_blocks": 1}),
    "Longformer": Architecture("longformer", byte_level_bpe, {**_ROBERTA, "attention_window": [8, 8]}),
    "Nomic BERT": Architecture("nomic_bert", word_piece, _BERT, _SCORES_AND_VECTORS),
    "GTE": Architecture("gte", unigram, _BERT, _SCORES_AND_VECTORS),
    "Jina v3": Architecture("jina_embeddings_v3", unigram, _BERT, _SCORES_AND_VECTORS),
    "EuroBERT": Architecture("eurobert", byte_level_bpe, _BERT, _SCORES_AND_VECTORS),
    "Jina v2": Architecture("jina_bert", word_piece, tasks=_OF_JINA_2, publish=jina_bert.make_source),
    "Jina v2, code": Architecture("jina_bert", byte_level_bpe, tasks=_OF_JINA_2, publish=_make_jina_2_for_code),
    "GLiNER": Architecture(
        "deberta-v2", unigram_pairs, tasks=("zero_shot_token_classification",), publish=gliner.make_source
    ),
}
_READS = (*_SCORES, "question_answering")
_OF_T5 = (*_SCORES_AND_VECTORS, "feature_extraction")
# Of which the decoder reads what the encoder read, for scores and spans, or T5's encoder alone makes vectors.
ENCODER_DECODERS: dict[str, Architecture] = {
    "BART": Architecture("bart", byte_level_bpe, {**_BART, "decoder_start_token_id": 2}, _READS),
    "mBART": Architecture("mbart", mbart, _BART, _READS),
    "T5": Architecture("t5", t5, {**_T5, "feed_forward_proj": "relu"}, (*_OF_T5, "question_answering")),
    # With gates, as T5 1.1, Flan-T5 and mT5.
    "UMT5": Architecture("umt5", t5, {**_T5, "feed_forward_proj": "gated-gelu"}, _OF_T5),
}
TEXT_ARCHITECTURES = ENCODERS | DECODERS | ENCODER_DECODERS
ARCHITECTURES = (*TEXT_ARCHITECTURES, *IMAGE_FAMILIES, *IMAGE_TEXT_FAMILIES)


def tasks_of(architecture: str) -> tuple[str, ...]:
    """The tasks that models of the architecture can have."""
    if architecture in IMAGE_TEXT_FAMILIES:
        return ("zero_shot_image_classification",)
    if architecture in IMAGE_FAMILIES:
        return _OF_IMAGES
    if tasks := TEXT_ARCHITECTURES[architecture].tasks:
        return tasks
    lacking = _OTHERS if architecture in _LATE_INTERACTION else _NOT_OF_ALL
    return tuple(task for task in _HEADS if task not in lacking)


def make_source(folder: Path, architecture: str, task: str) -> Path:
    """A small model of the architecture for the task, as transformers saves it."""
    if architecture in TEXT_ARCHITECTURES:
        return TEXT_ARCHITECTURES[architecture].make_source(folder, task)
    if architecture in IMAGE_TEXT_FAMILIES:
        return make_image_text_source(folder, architecture)
    if task == "image_embedding":
        return make_image_encoder_source(folder, architecture)
    return make_image_source(folder, architecture, **_LABELS)
