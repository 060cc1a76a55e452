"""Tiny models with an encoder and a decoder, with random weights from a fixed seed, and their tokenizers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.trained_tokenizers import byte_level_bpe, unigram

# As in decoders.py.
_SCALE = 3.0
TOKENS = 160

_SIZES: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
    "max_position_embeddings": TOKENS,
    "bos_token_id": 0,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
MODELS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "bart": (transformers.BartConfig, byte_level_bpe),
    "marian": (transformers.MarianConfig, unigram),
    "pegasus": (transformers.PegasusConfig, unigram),
    "mbart": (transformers.MBartConfig, unigram),
}


def save_encoder_decoder(name: str, folder: Path, **generation: Any) -> Path:
    """Writes a model with its tokenizer. `generation`: fields of its generation_config."""
    make, tokenizer_of = MODELS[name]
    tokenizer = tokenizer_of(max_tokens=TOKENS)
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(make(vocab_size=len(tokenizer), **_SIZES)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.mul_(_SCALE)
    described = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, **generation}
    model.generation_config = transformers.GenerationConfig(**described)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
