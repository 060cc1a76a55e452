"""What a text of 8,192 tokens takes: the memory of a process with a back end, and the time.

Run: `python -m tests.bench.long_inputs [--backends openvino,torch] [--models NAME,…] [--tokens 512,2048,8192]`

The models have the widths and heads of published ones, and few layers with random weights: what a batch needs beside
the weights does not depend on the number of layers, because one is computed after the other. Each row is a process of
its own, which loads the model and computes one text of the length; its memory is the largest resident size until then,
less the one after a text of 16 tokens, which is shown too. Nothing is written but the table.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import transformers

from neuronpipe.bundles.repository import read_bundle
from neuronpipe.platform.process.worker import Worker
from neuronpipe.stages.neuron_executor.backends import load_backend
from neuronpipe.stages.neuron_executor.backends.base import BackendRequest, compute
from neuronpipe.tasks.inputs.kind import input_kind
from tests.bench.embedders import special_ids
from tests.models import jina_bert
from tests.models.compiling import compile_model
from tests.models.repository import save
from tests.models.tokenizers import byte_level_bpe, unigram, word_piece

_LONGEST = 8192
_LARGE: Mapping[str, Any] = {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 2}
_BASE: Mapping[str, Any] = {"hidden_size": 768, "num_attention_heads": 12}
# Name → the model type, its tokenizer, and the widths of the published model that it is named after.
_MODELS: Mapping[str, tuple[str, Any, Mapping[str, Any]]] = {
    "bge-m3 (XLM-R)": (
        "xlm-roberta",
        unigram,
        {**_LARGE, "intermediate_size": 4096, "max_position_embeddings": _LONGEST + 2, "type_vocab_size": 1},
    ),
    "ModernBERT-base": (
        "modernbert",
        word_piece,
        {**_BASE, "num_hidden_layers": 4, "intermediate_size": 1152, "max_position_embeddings": _LONGEST},
    ),
    "Qwen3-Embedding-0.6B": (
        "qwen3",
        byte_level_bpe,
        {
            **_LARGE,
            "intermediate_size": 3072,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
    ),
    "jina-embeddings-v2-base": ("jina_bert", word_piece, {}),
}


def _make(name: str, folder: Path) -> Path:
    kind, tokens, values = _MODELS[name]
    tokenizer = tokens(max_tokens=_LONGEST)
    if kind == "jina_bert":
        return jina_bert.make_source(folder, "sentence_embedding", tokenizer, heads=12, head_width=64, inner=3072)
    config = transformers.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **special_ids(tokenizer), **values)
    return save(transformers.AutoModel.from_config(config), folder, tokenizer)


def _measure(pipe: "Connection[tuple[float, float, float], None]", folder: Path, backend: str, tokens: int) -> None:
    """In a process of its own. Sends MB before the text, MB more with it, and its seconds."""
    bundle = read_bundle(folder)
    artifact = bundle.artifact(backend)
    with bundle.artifact_files(artifact) as files:
        loaded = load_backend(
            backend, BackendRequest(bundle.spec, files, artifact.properties, 1, 0, versions=artifact.versions)
        )

    def run(length: int) -> float:
        ids = np.random.default_rng(1).integers(5, bundle.spec.vocabulary_size, length).astype(np.int32)
        inputs = input_kind(bundle.spec).pad([{"input_ids": ids}], loaded.shapes.round_tokens(length))
        began_s = time.perf_counter()
        asyncio.run(compute(loaded, 0, inputs))
        return time.perf_counter() - began_s

    run(16)
    before_mb = _peak_mb()
    took_s = run(tokens)
    loaded.close()
    pipe.send((before_mb, _peak_mb() - before_mb, took_s))


def _peak_mb() -> float:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1e3


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backends", default="openvino,torch")
    parser.add_argument("--models", default=",".join(_MODELS))
    parser.add_argument("--tokens", default="512,2048,8192")
    given = parser.parse_args()
    print("| Model | Back end | Tokens | Memory before, MB | More, MB | Time, s |\n|---|---|---|---|---|---|")
    for name in given.models.split(","):
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            source = _make(name, folder / "source")
            # Short texts to compare on, since the built-in ones are as long as the model takes.
            texts = folder / "texts.txt"
            texts.write_text("".join(f"a short text, number {number}\n" for number in range(64)))
            for backend in given.backends.split(","):
                options = {"name": backend, "backend": backend, "calibration": texts}
                bundle = compile_model(source, folder, "sentence_embedding", **options).folder
                for tokens in given.tokens.split(","):
                    with Worker.started(_measure, bundle, backend, int(tokens), name="back end") as worker:
                        before_mb, more_mb, took_s = worker.receive()
                    row = f"| {name} | {backend} | {tokens} | {before_mb:.0f} | {more_mb:.0f} | {took_s:.1f} |"
                    print(row, flush=True)


if __name__ == "__main__":
    main()
