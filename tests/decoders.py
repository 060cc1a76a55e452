"""Tiny decoders with random weights from a fixed seed, and their tokenizers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.trained_tokenizers import byte_level_bpe

# Weights are this many times as large as the architecture draws them, so that texts do not repeat one token.
_SCALE = 4.0
_TOKENS = 192

_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": _TOKENS,
}

DECODERS: Mapping[str, Callable[[int], Any]] = {
    "gpt2": lambda vocabulary: transformers.GPT2Config(
        vocab_size=vocabulary, n_embd=64, n_layer=2, n_head=4, n_positions=_TOKENS, bos_token_id=0, eos_token_id=2
    ),
    "llama": lambda vocabulary: transformers.LlamaConfig(vocab_size=vocabulary, **_LLAMA),
    "mistral": lambda vocabulary: transformers.MistralConfig(vocab_size=vocabulary, **_LLAMA),
    "qwen2": lambda vocabulary: transformers.Qwen2Config(vocab_size=vocabulary, **_LLAMA),
    "qwen3": lambda vocabulary: transformers.Qwen3Config(vocab_size=vocabulary, head_dim=16, **_LLAMA),
    "phi3": lambda vocabulary: transformers.Phi3Config(vocab_size=vocabulary, pad_token_id=1, eos_token_id=2, **_LLAMA),
    "gpt-neox": lambda vocabulary: transformers.GPTNeoXConfig(
        vocab_size=vocabulary, **{name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"}
    ),
    # Compiled bundles of it would be wrong.
    "opt": lambda vocabulary: transformers.OPTConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=128,
        max_position_embeddings=_TOKENS,
        word_embed_proj_dim=64,
    ),
}


def save_decoder(name: str, folder: Path, **generation: Any) -> Path:
    """Writes a decoder with its tokenizer. `generation`: fields of its generation_config."""
    tokenizer = byte_level_bpe(max_tokens=_TOKENS)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(DECODERS[name](len(tokenizer))).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(_SCALE)
    model.generation_config = transformers.GenerationConfig(**{"eos_token_id": 2, **generation})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
