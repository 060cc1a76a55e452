"""Tiny decoders with random weights from a fixed seed, and their tokenizers."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.models.compiling import compile_model
from tests.models.tokenizers import byte_level_bpe

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
# Prompts of five windows and more have room.
_WINDOW = 24
_GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "bos_token_id": 0,
    "sliding_window": _WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    **_LLAMA,
}

DECODERS: Mapping[str, Callable[[int], Any]] = {
    "gpt2": lambda vocabulary: transformers.GPT2Config(
        vocab_size=vocabulary, n_embd=64, n_layer=2, n_head=4, n_positions=_TOKENS, bos_token_id=0, eos_token_id=2
    ),
    "llama": lambda vocabulary: transformers.LlamaConfig(vocab_size=vocabulary, **_LLAMA),
    # As Llama 3.2.
    "llama-tied": lambda vocabulary: transformers.LlamaConfig(
        vocab_size=vocabulary,
        tie_word_embeddings=True,
        rope_scaling={
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        **_LLAMA,
    ),
    "mistral": lambda vocabulary: transformers.MistralConfig(vocab_size=vocabulary, sliding_window=_WINDOW, **_LLAMA),
    "qwen2": lambda vocabulary: transformers.Qwen2Config(vocab_size=vocabulary, **_LLAMA),
    "qwen3": lambda vocabulary: transformers.Qwen3Config(vocab_size=vocabulary, head_dim=16, **_LLAMA),
    "phi3": lambda vocabulary: transformers.Phi3Config(vocab_size=vocabulary, pad_token_id=1, eos_token_id=2, **_LLAMA),
    # As Phi-3.5: short and long texts have other factors for each of the eight pairs of a head.
    "phi3-longrope": lambda vocabulary: transformers.Phi3Config(
        vocab_size=vocabulary,
        pad_token_id=1,
        eos_token_id=2,
        original_max_position_embeddings=_TOKENS // 2,
        rope_scaling={"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
        **_LLAMA,
    ),
    "phi": lambda vocabulary: transformers.PhiConfig(vocab_size=vocabulary, partial_rotary_factor=0.5, **_LLAMA),
    "gemma3": lambda vocabulary: transformers.Gemma3TextConfig(vocab_size=vocabulary, **_GEMMA),
    "gpt-neox": lambda vocabulary: transformers.GPTNeoXConfig(
        vocab_size=vocabulary, **{name: value for name, value in _LLAMA.items() if name != "num_key_value_heads"}
    ),
    # A token goes through two of four experts.
    "mixtral": lambda vocabulary: transformers.MixtralConfig(
        vocab_size=vocabulary, num_local_experts=4, num_experts_per_tok=2, **_LLAMA
    ),
    "qwen3-moe": lambda vocabulary: transformers.Qwen3MoeConfig(
        vocab_size=vocabulary, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, **_LLAMA
    ),
    # Layers with masks of their own, one of them of a window.
    "gpt-neo": lambda vocabulary: transformers.GPTNeoConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=_WINDOW,
        max_position_embeddings=_TOKENS,
        bos_token_id=0,
        eos_token_id=2,
    ),
    # Positions of sines.
    "xglm": lambda vocabulary: transformers.XGLMConfig(
        vocab_size=vocabulary,
        d_model=64,
        num_layers=2,
        attention_heads=4,
        ffn_dim=128,
        max_position_embeddings=_TOKENS,
        pad_token_id=1,
    ),
    # Its decoder is a part of its base model.
    "opt": lambda vocabulary: transformers.OPTConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        ffn_dim=128,
        max_position_embeddings=_TOKENS,
        word_embed_proj_dim=64,
    ),
    # OpenVINO's paged attention computes it wrongly.
    "gemma2": lambda vocabulary: transformers.Gemma2Config(vocab_size=vocabulary, **_GEMMA),
}


CHAT_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or () %}{{ 'tool: ' + tool.function.name }}{% endfor %}"
    "{% for message in messages %}{% if message['role'] == 'nobody' %}"
    "{{ raise_exception('nobody speaks') }}{% endif %}{{ message['role'] + ': ' + (message['content'] or '') }}"
    "{% if message['tool_calls'] %}{{ message['tool_calls'] | tojson }}{% endif %}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def save_decoder(name: str, folder: Path, *, chat_template: str = "", **generation: Any) -> Path:
    """Writes a decoder with its tokenizer. `generation`: fields of its generation_config."""
    tokenizer = byte_level_bpe(max_tokens=_TOKENS)
    if chat_template:
        tokenizer.chat_template = chat_template
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


def make_writer(folder: Path) -> None:
    """A decoder with a template for chats in `source`, and as the model `writer` in `repository`."""
    source = save_decoder("llama", folder / "source", chat_template=CHAT_TEMPLATE)
    compile_model(source, folder / "repository", name="writer", dtype="")
