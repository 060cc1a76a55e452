"""Nomic BERT with experts as it is published: a small model in its files' names, and what it computes, written plainly.

Sources: modeling_hf_nomic_bert.py of nomic-bert-2048, and nomic.rs of text-embeddings-inference.
"""

import json
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

_WIDTH, _HEADS, _INNER, _LAYERS, _EXPERTS, _TAKEN = 32, 4, 64, 4, 8, 2
_BASE = 10_000.0


def make_source(folder: Path, task: str, tokenizer: Any) -> Path:
    """A small model and the tokenizer, as nomic-embed-text-v2-moe."""
    config = {
        "model_type": "nomic_bert",
        "architectures": ["NomicBertModel"],
        "auto_map": {
            "AutoConfig": "nomic-ai/nomic-bert-2048--configuration_hf_nomic_bert.NomicBertConfig",
            "AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel",
        },
        "activation_function": "gelu",
        "causal": False,
        "expert_choice_router": False,
        "ffn_div": 1,
        "layer_norm_epsilon": 1e-5,
        "max_trained_positions": 2048,
        "mlp_fc1_bias": True,
        "mlp_fc2_bias": True,
        "moe_every_n_layers": 2,
        "moe_impl": "megablocks",
        "moe_normalize_expert_weights": False,
        "moe_top_k": _TAKEN,
        "n_embd": _WIDTH,
        "n_head": _HEADS,
        "n_inner": _INNER,
        "n_layer": _LAYERS,
        "n_positions": 64,
        "num_experts": _EXPERTS,
        "num_shared_experts": 0,
        "pad_token_id": tokenizer.pad_token_id,
        "parallel_block": False,
        "prenorm": False,
        "qkv_proj_bias": True,
        "rotary_emb_base": _BASE,
        "rotary_emb_fraction": 1.0,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "rotary_scaling_factor": None,
        "type_vocab_size": 1,
        "use_rms_norm": None,
        "vocab_size": len(tokenizer),
    }
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    shapes = _shapes(len(tokenizer))
    save_file({name: _random(name, shape) for name, shape in shapes.items()}, folder / "model.safetensors")
    return folder


def _shapes(vocabulary: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word_embeddings.weight": (vocabulary, _WIDTH),
        "embeddings.token_type_embeddings.weight": (1, _WIDTH),
        "emb_ln.weight": (_WIDTH,),
        "emb_ln.bias": (_WIDTH,),
    }
    for layer in range(_LAYERS):
        linears = {"attn.Wqkv": (3 * _WIDTH, _WIDTH), "attn.out_proj": (_WIDTH, _WIDTH)}
        names: dict[str, tuple[int, ...]] = {
            f"{norm}.{kind}": (_WIDTH,) for norm in ("norm1", "norm2") for kind in ("weight", "bias")
        }
        if layer % 2 == 1:
            names["mlp.router.layer.weight"] = (_EXPERTS, _WIDTH)
            names |= {f"mlp.experts.mlp.{part}": (_EXPERTS * _INNER, _WIDTH) for part in ("w1", "w2")}
            names["mlp.experts.bias"] = (_WIDTH,)
        else:
            linears |= {"mlp.fc1": (_INNER, _WIDTH), "mlp.fc2": (_WIDTH, _INNER)}
        for name, shape in linears.items():
            names |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        shapes |= {f"encoder.layers.{layer}.{name}": shape for name, shape in names.items()}
    return shapes


def _random(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    is_norm = ("norm" in name or "emb_ln" in name) and name.endswith("weight")
    values = generator.standard_normal(shape) * (1.0 if "router" in name else 0.2) + is_norm
    return torch.from_numpy(np.asarray(values, np.float32))


def token_vectors(folder: Path, text: list[int]) -> torch.Tensor:
    """What the model computes for one text, [tokens, width]."""
    weights = load_file(folder / "model.safetensors")
    vectors = weights["embeddings.word_embeddings.weight"][text] + weights["embeddings.token_type_embeddings.weight"][0]
    vectors = _norm(vectors, weights, "emb_ln")
    for layer in range(_LAYERS):
        own = {
            name.removeprefix(f"encoder.layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"encoder.layers.{layer}.")
        }
        vectors = _norm(vectors + _attention(vectors, own), own, "norm1")
        vectors = _norm(vectors + (_experts if layer % 2 == 1 else _feed_forward)(vectors, own), own, "norm2")
    return vectors


def _norm(vectors: torch.Tensor, weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    return functional.layer_norm(vectors, (_WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], 1e-5)


def _attention(vectors: torch.Tensor, own: dict[str, torch.Tensor]) -> torch.Tensor:
    all_three = vectors @ own["attn.Wqkv.weight"].T + own["attn.Wqkv.bias"]
    query, key, value = (part.reshape(len(vectors), _HEADS, -1).transpose(0, 1) for part in all_three.chunk(3, dim=-1))
    query, key = _turned(query), _turned(key)
    seen = torch.softmax(query @ key.transpose(1, 2) / math.sqrt(query.shape[-1]), -1) @ value
    return seen.transpose(0, 1).reshape(len(vectors), -1) @ own["attn.out_proj.weight"].T + own["attn.out_proj.bias"]


def _turned(heads: torch.Tensor) -> torch.Tensor:
    """By rotary embeddings whose pairs are the two halves."""
    width = heads.shape[-1]
    speeds = _BASE ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(heads.shape[1])[:, None] * speeds
    left, right = heads.chunk(2, dim=-1)
    return torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)


def _feed_forward(vectors: torch.Tensor, own: dict[str, torch.Tensor]) -> torch.Tensor:
    inner = functional.gelu(vectors @ own["mlp.fc1.weight"].T + own["mlp.fc1.bias"])
    return inner @ own["mlp.fc2.weight"].T + own["mlp.fc2.bias"]


def _experts(vectors: torch.Tensor, own: dict[str, torch.Tensor]) -> torch.Tensor:
    first, second = (own[f"mlp.experts.mlp.{name}"].view(_EXPERTS, _INNER, _WIDTH) for name in ("w1", "w2"))
    results = []
    for vector in vectors:
        weights = torch.softmax(own["mlp.router.layer.weight"] @ vector, 0)
        taken = weights.argsort(descending=True)[:_TAKEN].tolist()
        of_each = [weights[expert] * (functional.gelu(first[expert] @ vector) @ second[expert]) for expert in taken]
        results.append(torch.stack(of_each).sum(0) + own["mlp.experts.bias"])
    return torch.stack(results)
