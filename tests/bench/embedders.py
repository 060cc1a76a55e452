"""Embedders of the newer architectures beside sentence-transformers: throughput, latency, memory, size, compile time.

Run: `python -m tests.bench.embedders [--models NAME,…] [--rounds 3] [--seconds 3]`

The models have six layers of width 384 with random weights, as MiniLM has, and the tokenizers of the tests. In each
round, sentence-transformers in a process of its own, with batches of 32 sorted by length and then text by text, and
`serve all` in every data type, with 32 callers and one, take turns over the same English texts: ratios are of turns in
the same round, and medians over the rounds. Memory is the resident size after the last turn. Writes nothing.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.tasks_pb2 import SentenceEmbeddingInput, TaskInput, Truncation
from tests.bench.closed_loop import ClosedLoop
from tests.bench.peers.environments import ROOT
from tests.bench.systems import DTYPES, read_texts, serving_all

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


def _make(name: str, folder: Path) -> None:
    """A folder as sentence-transformers saves one. In a process of its own, as it needs torch."""
    import transformers
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules as parts

    from tests.models import tokenizers as makers
    from tests.models.repository import save

    kind, tokens, values, pooling = _MODELS[name]
    tokenizer = getattr(makers, tokens)(max_tokens=_MAX_TOKENS)
    special = {"pad_token_id": tokenizer.pad_token_id, "bos_token_id": tokenizer.cls_token_id}
    special |= {"cls_token_id": tokenizer.cls_token_id, "eos_token_id": tokenizer.sep_token_id}
    special["sep_token_id"] = tokenizer.sep_token_id
    config = transformers.AutoConfig.for_model(kind, vocab_size=len(tokenizer), **special, **values)
    body = save(transformers.AutoModel.from_config(config), folder / "body", tokenizer)
    transformer = parts.Transformer(str(body), max_seq_length=_MAX_TOKENS)
    modules = [transformer, parts.Pooling(config.hidden_size, pooling_mode=pooling), parts.Normalize()]
    SentenceTransformer(modules=modules, device="cpu").save(str(folder / "source"))


def _serve_reference(source: str, texts_file: str) -> None:
    """Answers each line, with the seconds of a turn, with what sentence-transformers does in it."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(source, device="cpu")
    texts = Path(texts_file).read_text().splitlines()[:_TEXTS]
    model.encode(texts[:_CALLERS], batch_size=_CALLERS)
    for line in sys.stdin:
        seconds = float(line)
        began_s, done, alone_ms = time.perf_counter(), 0, list[float]()
        while time.perf_counter() - began_s < seconds:
            model.encode(texts, batch_size=_CALLERS, show_progress_bar=False)
            done += len(texts)
        rate_per_s = done / (time.perf_counter() - began_s)
        ends_s = time.perf_counter() + seconds
        while time.perf_counter() < ends_s:
            one_s = time.perf_counter()
            model.encode(texts[len(alone_ms) % len(texts)], show_progress_bar=False)
            alone_ms.append(1000 * (time.perf_counter() - one_s))
        print(json.dumps([rate_per_s, statistics.median(alone_ms)]), flush=True)


class _Reference:
    """sentence-transformers, as its process's parent sees it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.pid = process.pid
        self._process = process

    def measure(self, seconds: float) -> tuple[float, float]:
        """Texts a second in batches, and the p50 of one text in ms."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()
        rate_per_s, p50_ms = json.loads(self._process.stdout.readline())
        return rate_per_s, p50_ms


@contextmanager
def _reference(source: Path, texts: Path) -> Iterator[_Reference]:
    command = [sys.executable, "-m", __spec__.name, "--reference", str(source), str(texts)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT
    ) as process:
        try:
            yield _Reference(process)
        finally:
            process.kill()


def _compile(source: Path, folder: Path, dtype: str) -> float:
    """The seconds that it took."""
    began_s = time.monotonic()
    command = ("-m", "neuronpipe", "compile", str(source), "--name", _MODEL, "--repository", str(folder))
    subprocess.run(
        [sys.executable, *command, "--task", "sentence-embedding", "--dtype", dtype],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    return time.monotonic() - began_s


def _request(text: str) -> bytes:
    input = TaskInput(sentence_embedding=SentenceEmbeddingInput(text=text, truncation=Truncation.TRUNCATION_RIGHT))
    return InferRequest(model=_MODEL, input=input).SerializeToString()


def _mb(pid: int) -> float:
    return float(psutil.Process(pid).memory_info().rss) / 1e6


def _rows(name: str, texts_file: Path, texts: Sequence[str], rounds: int, seconds: float) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        subprocess.run([sys.executable, "-m", __spec__.name, "--make", name, temporary], check=True, cwd=ROOT)
        compile_s = {dtype: _compile(folder / "source", folder / dtype, dtype) for dtype in DTYPES}
        reference = stack.enter_context(_reference(folder / "source", texts_file))
        systems = {dtype: stack.enter_context(serving_all(folder / dtype)) for dtype in DTYPES}
        loop = stack.enter_context(ClosedLoop.started([_request(text) for text in texts[:_TEXTS]]))
        theirs: list[tuple[float, float]] = []
        ours: dict[str, list[tuple[float, float]]] = {dtype: [] for dtype in DTYPES}
        for _ in range(rounds):
            theirs.append(reference.measure(seconds))
            for dtype, system in systems.items():
                many, one = (loop.measure(system, callers, seconds) for callers in (_CALLERS, 1))
                if many.errors or one.errors:
                    raise RuntimeError(f"{name}, {dtype}: {many.errors + one.errors} calls failed")
                ours[dtype].append((many.throughput_per_s, one.latencies_ms["p50"]))
        rate, p50 = (statistics.median(column) for column in zip(*theirs, strict=True))
        yield f"| {name} | sentence-transformers | {rate:.0f} | | {p50:.1f} | | {_mb(reference.pid):.0f} | | |"
        for dtype, turns in ours.items():
            rate, p50 = (statistics.median(column) for column in zip(*turns, strict=True))
            of_rate = statistics.median(own[0] / other[0] for own, other in zip(turns, theirs, strict=True))
            of_p50 = statistics.median(own[1] / other[1] for own, other in zip(turns, theirs, strict=True))
            size_mb = sum(path.stat().st_size for path in (folder / dtype).rglob("*") if path.is_file()) / 1e6
            yield (
                f"| | {dtype} | {rate:.0f} | {of_rate:.2f} | {p50:.1f} | {of_p50:.2f} | "
                f"{_mb(systems[dtype].pids[0]):.0f} | {size_mb:.0f} | {compile_s[dtype]:.0f} |"
            )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=";".join(_MODELS), help="separated by semicolons")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--reference", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.make:
        _make(given.make[0], Path(given.make[1]))
        return
    if given.reference:
        _serve_reference(*given.reference)
        return
    texts_file, texts = read_texts()
    print(
        "| Model | System | Texts/s, 32 callers | to theirs | p50 ms, 1 caller | to theirs | Memory, MB | Bundle, MB | "
        "Compiled in, s |\n|---|---|---:|---:|---:|---:|---:|---:|---:|"
    )
    for name in given.models.split(";"):
        for row in _rows(name, texts_file, texts, given.rounds, given.seconds):
            print(row, flush=True)


if __name__ == "__main__":
    main()
