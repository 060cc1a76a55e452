"""A small GLiNER of spans, with the files that the package gliner writes."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

from neuronpipe.compiler.gliner import GlinerModel
from tests.models.repository import SMALL

# What its encoder has beyond the sizes.
DEBERTA_3: dict[str, Any] = {
    "type_vocab_size": 0,
    "relative_attention": True,
    "position_buckets": 16,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}


def make_source(folder: Path, task: str, tokenizer: Any) -> Path:
    """A model on DeBERTa-v3 without a recurrent layer, and the tokenizer with the two marks of its sequences."""
    tokenizer.add_tokens(["<<ENT>>", "<<SEP>>"], special_tokens=True)
    encoder = transformers.DebertaV2Config(
        vocab_size=len(tokenizer),
        max_position_embeddings=tokenizer.model_max_length,
        pad_token_id=tokenizer.pad_token_id,
        **SMALL,
        **DEBERTA_3,
    )
    described = {
        "model_type": "gliner_uni_encoder_span",
        "encoder_config": encoder.to_dict(),
        "vocab_size": len(tokenizer),
        "class_token_index": len(tokenizer) - 2,
        "span_mode": "markerV0",
        "hidden_size": 24,
        "max_width": 4,
        "max_len": 48,
        "num_rnn_layers": 0,
    }
    torch.manual_seed(49)
    model = GlinerModel(encoder, described)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.1)
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    save_file(model.state_dict(), folder / "model.safetensors")
    (folder / "gliner_config.json").write_text(json.dumps(described))
    return folder
