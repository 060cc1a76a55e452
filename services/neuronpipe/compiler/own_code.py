"""Reads models that are published with code of their own, which is not run.

The configuration of each known kind is rewritten: in the names of transformers, which has the same model under another
name, or in the names of our own graph. All other kinds are refused by their configuration (source.py).
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import transformers

from neuronpipe.compiler.architectures import MASKED_DECODERS
from neuronpipe.compiler.foreign_forms import foreign_form
from neuronpipe.compiler.onnx import graph_file
from neuronpipe.compiler.own_graphs import (
    FEED_FORWARD_TYPES,
    NomicExpertsConfig,
    NomicExpertsModel,
    register_own_graphs,
)
from neuronpipe.compiler.saved_files import read_object, refusing
from neuronpipe.compiler.sentence_transformers import read_tensors, transformer_folder
from neuronpipe.compiler.source import ModelSource
from neuronpipe.core.errors import SetupError

# The names of Nomic's own code → the names of transformers. Source: configuration_hf_nomic_bert.py.
_NOMIC_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
}
# Features of Nomic's code that transformers lacks → the value that disables them.
_NOMIC_VALUES: Mapping[str, Any] = {
    "activation_function": "swiglu",
    "causal": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "parallel_block": False,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "use_rms_norm": False,
}
# The same for Nomic's models with experts (own_graphs.py).
_NOMIC_EXPERTS_VALUES: Mapping[str, Any] = {
    **_NOMIC_VALUES,
    "activation_function": "gelu",
    "expert_choice_router": False,
    "ffn_div": 1,
    "mlp_fc1_bias": True,
    "mlp_fc2_bias": True,
    "moe_normalize_expert_weights": False,
    "num_shared_experts": 0,
    "qkv_proj_bias": True,
}
_GTE_VALUES: Mapping[str, Any] = {
    "layer_norm_type": "layer_norm",
    "logn_attention_clip1": False,
    "logn_attention_scale": False,
    "pack_qkv": True,
    "position_embedding_type": "rope",
}
# The same for XLM-R in Jina's code, xlm-roberta-flash-implementation. Source: modeling_xlm_roberta.py.
_FLASH_CONFIGURATION, _FLASH_WITH_LORA = "XLMRobertaFlashConfig", "XLMRobertaLoRA"
_FLASH_VALUES: Mapping[str, Any] = {
    "emb_pooler": None,
    "fused_mlp": False,
    "hidden_act": "gelu",
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "truncate_dim": None,
}
# Parts of the names of its weights → the names of transformers. Source: convert_roberta_weights_to_flash.py.
_FLASH_PRODUCT = ".mixer.Wqkv."
_FLASH_NAMES = {
    ".emb_ln.": ".embeddings.LayerNorm.",
    ".encoder.layers.": ".encoder.layer.",
    ".mixer.out_proj.": ".attention.output.dense.",
    ".norm1.": ".attention.output.LayerNorm.",
    ".norm2.": ".output.LayerNorm.",
    ".mlp.fc1.": ".intermediate.dense.",
    ".mlp.fc2.": ".output.dense.",
}
_OWN_CODE = "auto_map"
# Fields that set whether the tokens of a decoder see the tokens behind them.
_DIRECTIONS = ("is_causal", "use_bidirectional_attention")
# The class of gte-Qwen2 and stella_en_1.5B_v5, whose forward has is_causal=False.
_SEES_ALL_TOKENS = "modeling_qwen.Qwen2Model"

KNOWN_FORM = "known_form"


def in_known_form(source: ModelSource, scratch: Path) -> ModelSource:
    """Returns the model itself, or a model of a known kind as a folder in `scratch` with links. Raises SetupError."""
    register_own_graphs()
    if write := foreign_form(source.folder):
        linked = with_links(source, scratch)
        write(linked.folder)
        return linked
    if graph_file(source.folder) is not None:  # the model's code computes the graph
        return source
    model_folder = transformer_folder(source.folder)
    content = read_object(model_folder / "config.json")
    known_form = _known_configuration(source.folder, model_folder, content) if isinstance(content, dict) else None
    if known_form is None:
        return source
    linked = with_links(source, scratch)
    config = linked.folder / model_folder.relative_to(source.folder) / "config.json"
    config.unlink()
    config.write_text(json.dumps({name: value for name, value in known_form.items() if name != _OWN_CODE}))
    if _is_flash(content) and known_form["model_type"] == "xlm-roberta":
        _rename_flash_weights(config.parent)
    return linked


def with_links(source: ModelSource, scratch: Path) -> ModelSource:
    """Returns the model as a folder in `scratch` with links to its files; the model itself if it is there."""
    folder = scratch / KNOWN_FORM
    if source.folder == folder:
        return source
    ignored = shutil.ignore_patterns("onnx", "openvino", ".git", ".cache")
    shutil.copytree(source.folder.resolve(), folder, copy_function=os.symlink, ignore=ignored)
    return dataclasses.replace(source, folder=folder)


def _known_configuration(folder: Path, model_folder: Path, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    kinds: Mapping[tuple[str, str], Callable[[Path, Path, Mapping[str, Any]], Mapping[str, Any] | None]] = {
        ("nomic_bert", "NomicBert"): _nomic_configuration,
        ("new", "New"): _gte_configuration,
        ("gte", "Gte"): _gte_configuration,
        ("bert", "JinaBert"): _jina_configuration,
        ("xlm-roberta", "XLMRoberta"): _flash_configuration,
        ("llama_bidirec", "LlamaBidirectional"): _bidirectional_configuration,
        **{(kind, ""): _decoder_configuration for kind in MASKED_DECODERS},
    }
    class_names = [
        str(name).rpartition(".")[2]
        for kind, name in (content.get(_OWN_CODE) or {}).items()
        if kind.startswith("AutoModel")
    ]
    saved_kind = content.get("model_type") or ("xlm-roberta" if _is_flash(content) else None)
    for (kind, prefix), rewrite in kinds.items():
        if saved_kind == kind and all(name.startswith(prefix) for name in class_names):
            return rewrite(folder, model_folder, content)
    return None


def _nomic_configuration(folder: Path, model_folder: Path, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Rewrites nomic-embed-text, and models made of it, such as snowflake-arctic-embed-m-long."""
    if "n_embd" not in content:
        return None
    has_experts = bool(content.get("num_experts") and content.get("moe_every_n_layers"))
    _require(folder, content, _NOMIC_EXPERTS_VALUES if has_experts else _NOMIC_VALUES)
    renamed = {_NOMIC_NAMES.get(name, name): value for name, value in content.items()}
    if content.get("n_inner") is None:
        renamed["intermediate_size"] = 4 * content["n_embd"]
    # Beyond the trained positions Nomic's code turns less for longer texts: a text depends on others' lengths.
    if content.get("rotary_scaling_factor"):
        renamed["max_position_embeddings"] = content.get("max_trained_positions") or 2048
    rope = {"rope_type": "default", "rope_theta": content.get("rotary_emb_base", 10_000.0)}
    if has_experts:
        _require(folder, content, {"architectures": ["NomicBertModel"]})
        experts = {"model_type": NomicExpertsConfig.model_type, "architectures": [NomicExpertsModel.__name__]}
        return {**renamed, **experts, "hidden_act": "gelu", "rope_parameters": rope}
    return {**renamed, "hidden_act": "silu", "rope_parameters": rope}


def _gte_configuration(folder: Path, model_folder: Path, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Rewrites GTE and models made of it, such as snowflake-arctic-embed-m-v2.0."""
    if "rope_parameters" in content:
        return None
    _require(folder, content, _GTE_VALUES)
    theta, scaling = float(content.get("rope_theta", 10_000.0)), content.get("rope_scaling") or {}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    if scaling:
        _require(folder, scaling, {"type": "ntk", "mixed_b": None}, "rope_scaling.")
        width, factor = content["hidden_size"] // content["num_attention_heads"], float(scaling["factor"])
        # Source: NTKScalingRotaryEmbedding of GTE's modeling.py: a larger base, and frequencies divided by a number.
        rope = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / width)}
    architectures = [re.sub("^New", "Gte", name) for name in content.get("architectures") or ()]
    other_fields = {name: value for name, value in content.items() if name not in ("rope_theta", "rope_scaling")}
    return {**other_fields, "model_type": "gte", "architectures": architectures, "rope_parameters": rope}


def _jina_configuration(folder: Path, model_folder: Path, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Rewrites jina-embeddings-v2 and jina-reranker-v1."""
    if content.get("position_embedding_type") != "alibi":
        return None
    if (kind := content.get("feed_forward_type", "original")) not in FEED_FORWARD_TYPES:
        advice = f"of Jina's BERT those with {' and '.join(FEED_FORWARD_TYPES)} are supported"
        raise SetupError(f"{folder}: config.json has feed_forward_type {kind!r}; {advice}")
    # Two kinds of code are published; the configuration does not name the kind.
    has_norms = any("layer_norm_q" in name for name in _weight_names(model_folder))
    return {**content, "model_type": "jina_bert", "has_query_norms": has_norms}


def _is_flash(content: Mapping[str, Any]) -> bool:
    return str((content.get(_OWN_CODE) or {}).get("AutoConfig")).endswith(f".{_FLASH_CONFIGURATION}")


def _flash_configuration(folder: Path, model_folder: Path, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Rewrites XLM-R in Jina's code: jina-reranker-v2, and with rotary positions jina-colbert-v2.

    transformers has the second as the body of jina-embeddings-v3.
    """
    if not _is_flash(content) or any(_FLASH_WITH_LORA in str(name) for name in content[_OWN_CODE].values()):
        return None
    _require(folder, content, _FLASH_VALUES)
    if content.get("position_embedding_type") != "rotary":
        _require(folder, content, {"position_embedding_type": "absolute"})
        return {**content, "model_type": "xlm-roberta"}
    width = content["hidden_size"] // content["num_attention_heads"]
    _require(folder, content, {"rotary_emb_dim": width})
    rope = {"rope_type": "default", "rope_theta": content.get("rotary_emb_base", 10_000.0)}
    architectures = [re.sub("^XLMRoberta", "JinaEmbeddingsV3", name) for name in content.get("architectures") or ()]
    described = {"model_type": "jina_embeddings_v3", "architectures": architectures, "rope_parameters": rope}
    return {**content, **described}


def _rename_flash_weights(folder: Path) -> None:
    """Replaces the links to weights in `folder` by a file with the names of transformers. Raises SetupError."""
    with refusing(f"{folder}: its weights cannot be read", advice="; get its files again"):
        tensors = read_tensors(folder)
    renamed = dict[str, torch.Tensor]()
    for published, tensor in tensors.items():
        name = f".{published}"
        for theirs, ours in _FLASH_NAMES.items():
            name = name.replace(theirs, ours)
        queries = name.replace(_FLASH_PRODUCT, ".attention.self.query.")
        names = [queries] if queries == name else [queries.replace("query", part) for part in ("query", "key", "value")]
        parts = zip(names, tensor.chunk(len(names)), strict=True)
        renamed |= {part_name.removeprefix("."): part.clone() for part_name, part in parts}
    for file in ("model.safetensors", "pytorch_model.bin"):
        (folder / file).unlink(missing_ok=True)
    safetensors.torch.save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def _decoder_configuration(folder: Path, model_folder: Path, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the configuration of a decoder that makes vectors by code of its own, or None for another model.

    The class of such code has a name of transformers, but its tokens may see the tokens behind them.
    """
    code = str((content.get(_OWN_CODE) or {}).get("AutoModel") or "")
    is_embedder = (folder / "modules.json").is_file() and hasattr(transformers, code.rpartition(".")[2])
    if not is_embedder or any(name in content for name in _DIRECTIONS):
        return None
    if not code.endswith(_SEES_ALL_TOKENS):
        raise SetupError(
            f"{folder}: config.json names code of its own (auto_map: {code}), which is not run, and does not say "
            "whether a token sees those behind it; write is_causal there: false if it does, or else true"
        )
    return {**content, "is_causal": False}


def _bidirectional_configuration(
    folder: Path, model_folder: Path, content: Mapping[str, Any]
) -> Mapping[str, Any] | None:
    """Rewrites llama-nemotron-embed: Llama whose tokens see all others. Source: llama_bidirectional_model.py."""
    _require(folder, content, {"architectures": ["LlamaBidirectionalModel"]})
    if not (folder / "modules.json").is_file():  # the code has a pooling of its own, and ours is the mean
        _require(folder, content, {"pooling": "avg"})
    return {**content, "model_type": "llama", "architectures": ["LlamaModel"], "is_causal": False}


def _require(folder: Path, content: Mapping[str, Any], values: Mapping[str, Any], within: str = "") -> None:
    for name, value in values.items():
        if ((saved := content.get(name, value)) or None) != (value or None):
            raise SetupError(
                f"{folder}: config.json has {within}{name} {saved!r}, which only the model's own code computes, and "
                f"that is not run; supported is {value!r}"
            )


def _weight_names(folder: Path) -> set[str]:
    """Reads the names in a model's weight files; none for a damaged file, which is refused when it is loaded."""
    names: set[str] = set()
    try:
        for path in folder.glob("*.safetensors"):
            with safetensors.safe_open(path, "pt") as file:
                names.update(file.keys())
        for path in () if names else folder.glob("pytorch_model*.bin"):
            names.update(torch.load(path, map_location="cpu", weights_only=True, mmap=True))
    except Exception:  # a damaged file, for which each format raises another exception
        return names
    return names
