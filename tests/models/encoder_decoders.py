"""Tiny models with an encoder and a decoder, with random weights from a fixed seed, and their tokenizers."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.tokenizers import byte_level_bpe, marian, unigram

# As in decoders.py.
_SCALE = 3.0
TOKENS = 160

_ENDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
_OF_BOTH = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
_ENCODER_AND_DECODER = {f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in _OF_BOTH.items()}
_STARTS = {**_ENDS, "decoder_start_token_id": 2, "forced_eos_token_id": None}
_SIZES: dict[str, Any] = {**_ENCODER_AND_DECODER, **_STARTS, "d_model": 64, "max_position_embeddings": TOKENS}
_BUCKETS = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
_T5_SIZES = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
_T5: dict[str, Any] = {**_T5_SIZES, **_BUCKETS, **_ENDS, "decoder_start_token_id": 1}


def _t5(**settings: Any) -> Any:
    return transformers.T5Config(**{name: value for name, value in settings.items() if name not in _SIZES} | _T5)


def _mt5(**settings: Any) -> Any:
    kept = {name: value for name, value in settings.items() if name not in _SIZES}
    return transformers.MT5Config(**kept | _T5, tie_word_embeddings=False)


MODELS: Mapping[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "bart": (transformers.BartConfig, byte_level_bpe),
    "marian": (transformers.MarianConfig, marian),
    "pegasus": (transformers.PegasusConfig, unigram),
    "mbart": (transformers.MBartConfig, unigram),
    "nllb": (transformers.M2M100Config, unigram),
    "t5": (partial(_t5, feed_forward_proj="relu"), unigram),
    # As Flan-T5.
    "t5-gated": (partial(_t5, feed_forward_proj="gated-gelu", tie_word_embeddings=False), unigram),
    "mt5": (_mt5, unigram),
}


INSTRUCTIONS = {"query": "Represent the question for retrieving documents: ", "title": "Represent the Science title: "}


def save_embedder(folder: Path, base: Path, *, include_prompt: bool = True) -> Path:
    """Writes a T5 encoder of width 32 with the modules of sentence-t5, GTR and Instructor, and INSTRUCTIONS."""
    # The environment of transformers 4 lacks this library.
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.base.modules import Dense, Transformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling

    weight = torch.randn((48, 32), generator=torch.Generator().manual_seed(5))
    dense = Dense(32, 48, bias=False, activation_function=torch.nn.Identity(), init_weight=weight)
    pooling = Pooling(32, "mean", include_prompt=include_prompt)
    modules = [Transformer(str(base)), pooling, dense, Normalize()]
    SentenceTransformer(modules=modules, device="cpu", prompts=INSTRUCTIONS).save(str(folder))
    return folder


def save_encoder_decoder(
    name: str,
    folder: Path,
    *,
    task_specific_params: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    **generation: Any,
) -> Path:
    """Writes a model with its tokenizer, or another one. `generation`: fields of its generation_config."""
    make, tokenizer_of = MODELS[name]
    tokenizer = tokenizer or tokenizer_of(max_tokens=TOKENS)
    torch.manual_seed(0)
    model = transformers.AutoModelForSeq2SeqLM.from_config(make(vocab_size=len(tokenizer), **_SIZES)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and parameter.requires_grad:
                parameter.mul_(_SCALE)
    start = model.config.decoder_start_token_id
    described = {**_ENDS, "decoder_start_token_id": start, **generation}
    model.generation_config = transformers.GenerationConfig(**described)
    model.save_pretrained(folder)
    config = folder / "config.json"
    described = json.loads(config.read_text())
    if name in ("t5-gated", "mt5"):
        # As published. Version 5 of transformers writes that they are tied, and version 4 then scales scores.
        described["tie_word_embeddings"] = False
        head, file = torch.randn(model.lm_head.weight.shape) * _SCALE, folder / "model.safetensors"
        save_file({**load_file(file), "lm_head.weight": head}, file, {"format": "pt"})
    if task_specific_params:
        described["task_specific_params"] = task_specific_params
    config.write_text(json.dumps(described))
    tokenizer.save_pretrained(folder)
    return folder
