"""Jina-BERT v2 as it is published: small models in its files' names, and what they compute, written plainly.

Sources: modeling_bert.py of jina-bert-implementation, and of jina-bert-v2-qk-post-norm.
"""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

_CODE = {False: "jinaai/jina-bert-implementation", True: "jinaai/jina-bert-v2-qk-post-norm"}
_CLASSES = {"text_classification": "JinaBertForSequenceClassification", "fill_mask": "JinaBertForMaskedLM"}


def make_source(
    folder: Path,
    task: str,
    tokenizer: Any,
    *,
    has_query_norms: bool = False,
    heads: int = 4,
    head_width: int = 8,
    inner: int = 64,
) -> Path:
    """A small model with a task's head and the tokenizer.

    `has_query_norms`: of the second kind, as jina-embeddings-v2-base-code.
    """
    name = {"rerank": "text_classification", "zero_shot_classification": "text_classification"}.get(task, task)
    labels = ["contradiction", "neutral", "entailment"] if task != "rerank" else ["relevant"]
    head, code = _CLASSES.get(name, "JinaBertModel"), _CODE[has_query_norms]
    config = {
        "architectures": [head],
        "auto_map": {
            "AutoConfig": f"{code}--configuration_bert.JinaBertConfig",
            "AutoModel": f"{code}--modeling_bert.JinaBertModel",
            "AutoModelForMaskedLM": f"{code}--modeling_bert.JinaBertForMaskedLM",
        },
        "model_type": "bert",
        "position_embedding_type": "alibi",
        "feed_forward_type": "geglu",
        "emb_pooler": "mean",
        "attn_implementation": None,
        "hidden_act": "gelu",
        "hidden_size": head_width * heads,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_hidden_layers": 2,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 8192,
        "type_vocab_size": 2,
        "vocab_size": len(tokenizer),
        "pad_token_id": tokenizer.pad_token_id,
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
    }
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = dict(_shapes(config, head, len(labels), has_query_norms))
    save_file({name: _random(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def _shapes(
    config: Mapping[str, Any], head: str, labels: int, has_query_norms: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    norms = [f"layer.{layer}.attention.output.LayerNorm" for layer in range(2)]
    linears = []
    for layer in range(2):
        prefix = f"layer.{layer}"
        linears += [f"{prefix}.attention.self.{part}" for part in ("query", "key", "value")]
        linears.append(f"{prefix}.attention.output.dense")
        if has_query_norms:
            norms += [f"{prefix}.attention.self.layer_norm_{part}" for part in "qk"]
            norms += [f"{prefix}.layer_norm_{number}" for number in "12"]
        else:
            norms.append(f"{prefix}.mlp.layernorm")
    prefix = "" if head == "JinaBertModel" else "bert."
    yield f"{prefix}embeddings.word_embeddings.weight", (vocabulary, width)
    yield f"{prefix}embeddings.token_type_embeddings.weight", (2, width)
    for module in ["embeddings.LayerNorm", *(f"encoder.{norm}" for norm in norms)]:
        yield from ((f"{prefix}{module}.{kind}", (width,)) for kind in ("weight", "bias"))
    for module in [*(f"encoder.{linear}" for linear in linears), "pooler.dense"]:
        if head != "JinaBertForMaskedLM" or module != "pooler.dense":
            yield f"{prefix}{module}.weight", (width, width)
            yield f"{prefix}{module}.bias", (width,)
    up, down = ("up_gated_layer", "down_layer") if has_query_norms else ("gated_layers", "wo")
    for layer in range(2):
        mlp = f"{prefix}encoder.layer.{layer}.mlp"
        yield f"{mlp}.{up}.weight", (2 * inner, width)
        yield f"{mlp}.{down}.weight", (width, inner)
        yield f"{mlp}.{down}.bias", (width,)
    if head == "JinaBertForSequenceClassification":
        yield "classifier.weight", (labels, width)
        yield "classifier.bias", (labels,)
    if head == "JinaBertForMaskedLM":
        yield "cls.predictions.transform.dense.weight", (width, width)
        yield "cls.predictions.transform.dense.bias", (width,)
        yield "cls.predictions.transform.LayerNorm.weight", (width,)
        yield "cls.predictions.transform.LayerNorm.bias", (width,)
        yield "cls.predictions.bias", (vocabulary,)


def token_vectors(folder: Path, tokens: list[int], types: list[int] | None = None) -> torch.Tensor:
    """The published model's vectors of one text's tokens, float32 [tokens, width], computed head by head."""
    config = json.loads((folder / "config.json").read_text())
    files = load_file(folder / "model.safetensors")
    weights = {name.removeprefix("bert."): value for name, value in files.items()}
    width, heads = config["hidden_size"], config["num_attention_heads"]
    inner, own = config["intermediate_size"], width // heads

    def norm(name: str, vectors: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(vectors, (width,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-12)

    def linear(name: str, vectors: torch.Tensor) -> torch.Tensor:
        return functional.linear(vectors, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    vectors = weights["embeddings.word_embeddings.weight"][tokens]
    vectors = vectors + weights["embeddings.token_type_embeddings.weight"][types or [0] * len(tokens)]
    vectors = norm("embeddings.LayerNorm", vectors)
    distance = torch.tensor([[abs(i - j) for j in range(len(tokens))] for i in range(len(tokens))], dtype=torch.float32)
    for layer in range(config["num_hidden_layers"]):
        name = f"encoder.layer.{layer}"
        query, key, value = (linear(f"{name}.attention.self.{part}", vectors) for part in ("query", "key", "value"))
        has_norms = f"{name}.attention.self.layer_norm_q.weight" in weights
        if has_norms:
            query, key = (
                norm(f"{name}.attention.self.layer_norm_{letter}", part) for letter, part in (("q", query), ("k", key))
            )
        parts = []
        for head, slope in enumerate(slopes(heads)):
            part = slice(head * own, (head + 1) * own)
            scores = query[:, part] @ key[:, part].T / math.sqrt(own) - slope * distance
            parts.append(torch.softmax(scores, dim=-1) @ value[:, part])
        attended = linear(f"{name}.attention.output.dense", torch.cat(parts, dim=-1))
        attended = norm(f"{name}.attention.output.LayerNorm", attended + vectors)
        if has_norms:
            attended = norm(f"{name}.layer_norm_1", vectors + attended)
            both = linear(f"{name}.mlp.up_gated_layer", attended)
            result = linear(f"{name}.mlp.down_layer", both[:, :inner] * functional.gelu(both[:, inner:]))
            vectors = norm(f"{name}.layer_norm_2", attended + result)
        else:
            both = linear(f"{name}.mlp.gated_layers", attended)
            result = linear(f"{name}.mlp.wo", functional.gelu(both[:, :inner]) * both[:, inner:])
            vectors = norm(f"{name}.mlp.layernorm", result + attended)
    return vectors


def slopes(heads: int) -> list[float]:
    """Of each head, by hand from the paper on ALiBi for the numbers of heads that are tested."""
    four = [1 / 4, 1 / 16, 1 / 64, 1 / 256]
    eight = [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    return {4: four, 8: eight, 6: [*four, 1 / 2, 1 / 8]}[heads]


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    values = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape) * 0.2
    if "norm" in name.lower() and name.endswith("weight"):
        values += 1
    return torch.from_numpy(values.astype(np.float32) * (5 if name.startswith("classifier") else 1))
