"""XLM-R as Jina publishes it, in the names of its own code: jina-reranker-v2 and jina-colbert-v2."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

_CODE = "jinaai/xlm-roberta-flash-implementation--"
# Source: convert_roberta_weights_to_flash.py of xlm-roberta-flash-implementation. transformers saves the models with
# rotary positions in these names (jina_embeddings_v3 in its conversion_mapping.py).
_NAMES = (
    (r"embeddings\.LayerNorm", "emb_ln"),
    (r"encoder\.layer\.", "encoder.layers."),
    (r"attention\.output\.dense", "mixer.out_proj"),
    (r"attention\.output\.LayerNorm", "norm1"),
    (r"output\.LayerNorm", "norm2"),
    (r"intermediate\.dense", "mlp.fc1"),
    (r"output\.dense", "mlp.fc2"),
    (r"attention\.self\.query", "mixer.Wqkv"),
)
_PARTS = ("query", "key", "value")


def publish(source: Path, model_class: str, **changes: Any) -> None:
    """Rewrites a folder of transformers, with learned or rotary positions. `changes`: of the configuration."""
    config = json.loads((source / "config.json").read_text())
    del config["model_type"]  # jina-reranker-v2 names none
    rope = config.pop("rope_parameters", None)
    positions = {"position_embedding_type": "rotary" if rope else "absolute"}
    if rope:
        positions["rotary_emb_base"] = rope["rope_theta"]
    code = {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig"}
    code["AutoModel"] = "modeling_xlm_roberta.XLMRobertaModel"
    auto_map = {name: f"{_CODE}{value}" for name, value in code.items()}
    own = {"architectures": [model_class], "auto_map": auto_map, "use_flash_attn": True}
    (source / "config.json").write_text(json.dumps(config | own | positions | changes))
    tensors = load_file(source / "model.safetensors")
    joined = {name: _joined(tensors, name) for name in tensors if not re.search(r"self\.(key|value)", name)}
    save_file({_own_name(name): tensor for name, tensor in joined.items()}, source / "model.safetensors")


def _joined(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """The weights of queries, keys and values as one product; other weights as they are."""
    return torch.cat([tensors[name.replace("query", part)] for part in _PARTS]) if "query" in name else tensors[name]


def _own_name(name: str) -> str:
    for pattern, own in _NAMES:
        name = re.sub(pattern, own, name)
    return name if name.startswith(("roberta.", "classifier.", "linear.")) else f"roberta.{name}"
