"""A model that generates and hardly computes, with a vocabulary of 1,200.

Run: python -m tests.bench.tiny_writer FOLDER
"""

import sys
from pathlib import Path

import torch
import transformers

from neuronpipe.compiler import CompileRequest, compile_bundle
from tests.bench.generation_alone import TINY, VOCABULARY
from tests.bench.generation_models import train_manual_tokenizer


def make_tiny_writer(folder: Path) -> None:
    """Saves the model in `source`, and compiles it into `repository`."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).eval().save_pretrained(folder / "source")
    train_manual_tokenizer(1024).save_pretrained(folder / "source")
    request = CompileRequest(
        source=str(folder / "source"), task="", repository=folder / "repository", name=TINY, dtype="float32"
    )
    compile_bundle(request, lambda line: print(line, file=sys.stderr))


if __name__ == "__main__":
    make_tiny_writer(Path(sys.argv[1]))
