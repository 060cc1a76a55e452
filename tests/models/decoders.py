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

_ENDS = {"bos_token_id": 0, "eos_token_id": 2}
_SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_GPT_NEOX = {**_SIZES, "intermediate_size": 128, "max_position_embeddings": _TOKENS}
_LLAMA = {**_GPT_NEOX, "num_key_value_heads": 2}
# Prompts of five windows and more have room.
_WINDOW = 24
_TWO_KINDS = ["sliding_attention", "full_attention"]
_GLOBAL_AND_LOCAL = [[["global", "local"], 1]]
_GEMMA = {**_LLAMA, **_ENDS, "pad_token_id": 1, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": _WINDOW}
_PHI_3 = {**_LLAMA, "pad_token_id": 1, "eos_token_id": 2}
# As Llama 3.2.
_LLAMA_3_FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA_3 = {"rope_type": "llama3", **_LLAMA_3_FACTORS, "original_max_position_embeddings": 64}
# As Phi-3.5: short and long texts have other factors for each of the eight pairs of a head.
_LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
_LAYERS = {"num_layers": 2, "max_position_embeddings": _TOKENS}

# Name → the class of its configuration, and the values.
DECODERS: Mapping[str, tuple[Callable[..., Any], Mapping[str, Any]]] = {
    "gpt2": (transformers.GPT2Config, {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": _TOKENS, **_ENDS}),
    "llama": (transformers.LlamaConfig, _LLAMA),
    "llama-tied": (transformers.LlamaConfig, {**_LLAMA, "tie_word_embeddings": True, "rope_scaling": _LLAMA_3}),
    "mistral": (transformers.MistralConfig, {**_LLAMA, "sliding_window": _WINDOW}),
    "qwen2": (transformers.Qwen2Config, _LLAMA),
    "qwen3": (transformers.Qwen3Config, {**_LLAMA, "head_dim": 16}),
    "phi3": (transformers.Phi3Config, _PHI_3),
    "phi3-longrope": (
        transformers.Phi3Config,
        {**_PHI_3, "original_max_position_embeddings": _TOKENS // 2, "rope_scaling": _LONGROPE},
    ),
    "phi": (transformers.PhiConfig, {**_LLAMA, "partial_rotary_factor": 0.5}),
    "gemma3": (transformers.Gemma3TextConfig, {**_GEMMA, "layer_types": _TWO_KINDS}),
    "gpt-neox": (transformers.GPTNeoXConfig, _GPT_NEOX),
    # A token goes through two of four experts.
    "mixtral": (transformers.MixtralConfig, {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3-moe": (
        transformers.Qwen3MoeConfig,
        {**_LLAMA, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
    # Layers with masks of their own, one of them of a window.
    "gpt-neo": (
        transformers.GPTNeoConfig,
        {"hidden_size": 64, **_LAYERS, "num_heads": 4, "attention_types": _GLOBAL_AND_LOCAL, "window_size": _WINDOW}
        | _ENDS,
    ),
    # Positions of sines.
    "xglm": (
        transformers.XGLMConfig,
        {"d_model": 64, **_LAYERS, "attention_heads": 4, "ffn_dim": 128, "pad_token_id": 1},
    ),
    # Its decoder is a part of its base model.
    "opt": (
        transformers.OPTConfig,
        {**_SIZES, "ffn_dim": 128, "max_position_embeddings": _TOKENS, "word_embed_proj_dim": 64},
    ),
    # OpenVINO's paged attention computes it wrongly.
    "gemma2": (transformers.Gemma2Config, {**_GEMMA, "layer_types": _TWO_KINDS}),
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
    make_config, values = DECODERS[name]
    config = make_config(vocab_size=len(tokenizer), **values)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
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
