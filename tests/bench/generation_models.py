"""The models of the section `generation`: random weights, and a tokenizer of which every token is text by itself, so
that none is held back for the rest of its character.

Run: python -m tests.bench.generation_models FOLDER [tiny]   `tiny` makes one model, which hardly computes
"""

import json
import pydoc_data.topics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from demo.writer import train_tokenizer
from tests.bench.generation_alone import BART, ENDING, LLAMA, TINY, VOCABULARY
from tests.bench.generation_peers import EXPECTED_FILE
from tests.bench.peers.generating import BEAMS
from tests.models.compiling import compile_model

_LAYERS, _WIDTH, _HEADS, _INNER = 6, 512, 8, 2048
_LLAMA_TOKENS, _BART_TOKENS = 4096, 512
_PROMPT, _NEW = list(range(5, 45)), 16


def make_models(folder: Path, configs: Mapping[str, Any]) -> None:
    """Saves models in `sources`, as transformers reads them, compiles them into `repository`, and writes what
    transformers generates for a prompt into EXPECTED_FILE. `configs`: by the names of the models.
    """
    expected = {}
    for name, config in configs.items():
        tokens = _BART_TOKENS if name == BART else _LLAMA_TOKENS
        torch.manual_seed(0)
        kind: Any = transformers.BartForConditionalGeneration if name == BART else transformers.LlamaForCausalLM
        source = folder / "sources" / name
        model = kind(config).eval()
        model.save_pretrained(source)
        expected[name] = {"prompt": _PROMPT, "token_ids": _generated(model)}
        _train_manual_tokenizer(tokens).save_pretrained(source)
        compile_model(source, folder / "repository", name=name, dtype="float32")
    (folder / EXPECTED_FILE).write_text(json.dumps(expected))


def _train_manual_tokenizer(max_tokens: int) -> Any:
    """Trains a tokenizer on Python's manual, for a model that takes `max_tokens`."""
    special = ["<start>", "<pad>", "<end>"]
    names = dict(zip(("bos_token", "pad_token", "eos_token"), special, strict=True))
    return train_tokenizer(manual(), VOCABULARY, special, model_max_length=max_tokens, **names)


def manual() -> list[str]:
    """The topics of Python's help(), in ASCII, each on a line: its tokens matter, not its words."""
    topics: dict[str, str] = pydoc_data.topics.topics
    return [" ".join(topics[name].encode("ascii", "ignore").decode().split()) for name in sorted(topics)]


def _generated(model: Any) -> list[int]:
    prompt = torch.tensor([_PROMPT])
    options = {"max_new_tokens": _NEW, "min_new_tokens": _NEW, "do_sample": False, "pad_token_id": 1}
    beams = BEAMS if model.config.is_encoder_decoder else 1
    with torch.inference_mode():
        found = model.generate(prompt, attention_mask=torch.ones_like(prompt), num_beams=beams, **options)
    token_ids: list[int] = found[0, -_NEW:].tolist()
    return token_ids


def _llama(
    end: int | None, *, layers: int = _LAYERS, width: int = _WIDTH, heads: int = _HEADS, inner: int = _INNER
) -> transformers.LlamaConfig:
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": inner}
    sizes = {"vocab_size": VOCABULARY, "hidden_size": width, "max_position_embeddings": _LLAMA_TOKENS, **shape}
    return transformers.LlamaConfig(**sizes, bos_token_id=0, eos_token_id=end)


def _bart() -> transformers.BartConfig:
    side = {"layers": _LAYERS, "attention_heads": _HEADS, "ffn_dim": _INNER}
    sides = {f"{name}_{key}": size for name in ("encoder", "decoder") for key, size in side.items()}
    tokens = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2}
    sizes = {"vocab_size": VOCABULARY, "d_model": _WIDTH, "max_position_embeddings": _BART_TOKENS, **sides}
    return transformers.BartConfig(**sizes, **tokens, forced_eos_token_id=None)


if __name__ == "__main__":
    if sys.argv[2:] == [TINY]:
        make_models(Path(sys.argv[1]), {TINY: _llama(None, layers=2, width=32, heads=2, inner=64)})
    else:
        make_models(Path(sys.argv[1]), {LLAMA: _llama(None), ENDING: _llama(2), BART: _bart()})
