"""Embedders of the newer architectures beside sentence-transformers: throughput, latency, memory, size, compile time.

Run: `python -m tests.bench.embedders [--models NAME,…] [--rounds 3] [--seconds 3]`

The models have six layers of width 384 with random weights, as MiniLM has, and the tokenizers of the tests. In each
round, sentence-transformers in a process of its own, with batches of 32 sorted by length and then text by text, and
`serve all` in every data type, with 32 callers and one, take turns over the same English texts: ratios are of turns in
the same round, and medians over the rounds. Memory is the resident size after the last turn. Writes nothing.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from neuronpipe.measure.machine import resident_mb
from neuronpipe.platform.process.worker import Worker
from tests.bench.load import LoadProcess
from tests.bench.measurements import ratios
from tests.bench.peers.embedders_alone import measure
from tests.bench.systems import DTYPES, embedding_request, make_texts, run_module, serving_all

_MODEL = "embedder"
_CALLERS = 32
_TEXTS = 512
_MAX_TOKENS = 512
_SIZES: Mapping[str, Any] = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
_ENCODER = {**_SIZES, "intermediate_size": 1536, "max_position_embeddings": _MAX_TOKENS}
_DECODER = {**_ENCODER, "num_key_value_heads": 4, "head_dim": 32}
# Name → the model type, the tokenizer of the tests, its configuration, and how its vectors are pooled.
_MODELS: Mapping[str, tuple[str, str, Mapping[str, Any], str]] = {
    "BERT": ("bert", "word_piece", _ENCODER, "mean"),
    "ModernBERT": ("modernbert", "word_piece", {**_ENCODER, "intermediate_size": 576}, "mean"),
    "Nomic BERT": ("nomic_bert", "word_piece", _ENCODER, "mean"),
    "GTE": ("gte", "unigram", _ENCODER, "cls"),
    "Jina v3": ("jina_embeddings_v3", "unigram", _ENCODER, "mean"),
    "EuroBERT": ("eurobert", "byte_level_bpe", _ENCODER, "mean"),
    "Qwen3": ("qwen3", "byte_level_bpe", _DECODER, "lasttoken"),
    "Gemma 3, bidirectional": (
        "gemma3_text",
        "byte_level_bpe",
        {**_DECODER, "query_pre_attn_scalar": 32, "use_bidirectional_attention": True},
        "mean",
    ),
}


def special_ids(tokenizer: Any) -> dict[str, int]:
    """The special tokens of a tokenizer, as configurations of models name them."""
    begin, end = tokenizer.cls_token_id, tokenizer.sep_token_id
    ends = {"bos_token_id": begin, "cls_token_id": begin, "eos_token_id": end, "sep_token_id": end}
    return {"pad_token_id": tokenizer.pad_token_id, **ends}


def _make(pipe: "Connection[None, None]", name: str, folder: Path) -> None:
    """Makes a folder as sentence-transformers saves one. In a process of its own, as it needs torch."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as parts

    from tests.models import tokenizers as makers
    from tests.models.repository import save

    kind, tokens, values, pooling = _MODELS[name]
    tokenizer = getattr(makers, tokens)(max_tokens=_MAX_TOKENS)
    config = transformers.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **special_ids(tokenizer), **values)
    body = save(transformers.AutoModel.from_config(config), folder / "body", tokenizer)
    transformer = parts.Transformer(str(body), max_seq_length=_MAX_TOKENS)
    modules = [transformer, parts.Pooling(config.hidden_size, pooling_mode=pooling), parts.Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "source"))
    pipe.send(None)


def _serve_reference(pipe: "Connection[tuple[float, float], float]", source: Path, texts: Sequence[str]) -> None:
    """For each turn of some seconds: texts a second of sentence-transformers in batches, and the p50 of a text, ms."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(source), device="cpu")
    # A call has all texts, which the model sorts by length, or one.
    embed = partial(model.encode, batch_size=_CALLERS, show_progress_bar=False)
    embed(texts[:_CALLERS])
    while True:
        seconds = pipe.recv()
        rate_per_s, _ = measure(embed, texts, len(texts), seconds)
        pipe.send((rate_per_s, measure(embed, texts, 1, seconds)[1]))


def _compile(source: Path, folder: Path, dtype: str) -> float:
    """The seconds that it took."""
    began_s = time.monotonic()
    command = ("-m", "neuronpipe", "compile", str(source), "--name", _MODEL, "--repository", str(folder))
    run_module(*command, "--task", "sentence-embedding", "--dtype", dtype)
    return time.monotonic() - began_s


def _rows(name: str, texts: Sequence[str], rounds: int, seconds: float) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        with Worker.started(_make, name, folder, name="model") as maker:
            maker.receive()
        compile_s = {dtype: _compile(folder / "source", folder / dtype, dtype) for dtype in DTYPES}
        reference = stack.enter_context(
            Worker.started(_serve_reference, folder / "source", texts, name="sentence-transformers")
        )
        systems = {dtype: stack.enter_context(serving_all(folder / dtype)) for dtype in DTYPES}
        loop = stack.enter_context(LoadProcess.started([embedding_request(_MODEL, text) for text in texts]))
        # Of each system: texts a second, and p50.
        turns: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in ("", *DTYPES)}
        for _ in range(rounds):
            reference.send(seconds)
            turns[""].append(reference.receive())
            for dtype, system in systems.items():
                many, alone = (loop.measure(system, callers, seconds) for callers in (_CALLERS, 1))
                if many.errors or alone.errors:
                    raise RuntimeError(f"{name}, {dtype}: {many.errors + alone.errors} calls failed")
                turns[dtype].append((many.throughput_per_s, alone.latencies_ms["p50"]))
        theirs = list(zip(*turns.pop(""), strict=True))
        rate, p50 = map(statistics.median, theirs)
        yield f"| {name} | sentence-transformers | {rate:.0f} | | {p50:.1f} | | {resident_mb(reference.pid):.0f} | | |"
        for dtype, found in turns.items():
            ours = list(zip(*found, strict=True))
            rate, p50 = map(statistics.median, ours)
            of_rate, of_p50 = (statistics.median(ratios(*pair)) for pair in zip(ours, theirs, strict=True))
            size_mb = sum(path.stat().st_size for path in (folder / dtype).rglob("*") if path.is_file()) / 1e6
            yield (
                f"| | {dtype} | {rate:.0f} | {of_rate:.2f} | {p50:.1f} | {of_p50:.2f} | "
                f"{resident_mb(systems[dtype].pids[0]):.0f} | {size_mb:.0f} | {compile_s[dtype]:.0f} |"
            )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=";".join(_MODELS), help="separated by semicolons")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    given = parser.parse_args()
    texts = make_texts()[:_TEXTS]
    print(
        "| Model | System | Texts/s, 32 callers | to theirs | p50 ms, 1 caller | to theirs | Memory, MB | Bundle, MB | "
        "Compiled in, s |\n|---|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    for name in given.models.split(";"):
        for row in _rows(name, texts, given.rounds, given.seconds):
            print(row, flush=True)


if __name__ == "__main__":
    main()
