"""Memory of `serve all` with a model that has a large table of words, in each dtype.

Run: `python -m tests.bench.word_tables [--models NAME,…] [--dtypes float32,int8] [--seconds 10]`

"XLM-R's vocabulary" is a BERT of two layers with random weights from a seed; MiniLM is as published. Each row is a
process of its own: its resident memory once it serves, and after one caller's texts of mixed lengths; the part without
a file behind it; that caller's p50; and the agreement with PyTorch in float32, as the compiler measures it. Nothing is
written but the table.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
import transformers

from demo.model import find_minilm
from tests.bench.load import LoadProcess
from tests.bench.systems import embedding_request, make_texts, serving_all
from tests.models.compiling import compile_model
from tests.models.tokenizers import word_piece

_SEED = 20261128
_NAME = "embedder"


def _make_large(folder: Path) -> Path:
    torch.manual_seed(_SEED)
    config = transformers.BertConfig(vocab_size=250_002, hidden_size=768, num_hidden_layers=2)
    transformers.BertModel(config).save_pretrained(folder)
    word_piece(max_tokens=512).save_pretrained(folder)
    return folder


_MODELS: Mapping[str, Callable[[Path], Path]] = {
    "XLM-R's vocabulary": _make_large,
    "MiniLM": lambda folder: find_minilm(),
}


def _memory_mb(pid: int) -> tuple[float, float]:
    """The resident memory of a process, and the part of it that no file is behind."""
    lines = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    found = {words[0]: int(words[1]) * 1024 / 1e6 for words in lines if words[0] in ("VmRSS:", "RssAnon:")}
    return found["VmRSS:"], found["RssAnon:"]


def _rows(name: str, dtypes: Sequence[str], texts: Sequence[str], seconds: float) -> Iterator[str]:
    first, requests = 0.0, [embedding_request(_NAME, text) for text in texts]
    with tempfile.TemporaryDirectory() as temporary, LoadProcess.started(requests) as loop:
        source = _MODELS[name](Path(temporary) / "source")
        for dtype in dtypes:
            bundle = compile_model(source, Path(temporary) / dtype, "sentence_embedding", name=_NAME, dtype=dtype)
            size = sum(file.stat().st_size for file in bundle.folder.rglob("*.bin"))
            accuracy = bundle.artifact("openvino").accuracy
            assert accuracy
            with serving_all(bundle.folder.parents[1]) as system:
                started, _ = _memory_mb(system.pids[0])
                found = loop.measure(system, 1, seconds)
                after, anonymous = _memory_mb(system.pids[0])
            first = first or after
            yield (
                f"| {name} | {dtype} | {size / 1e6:.0f} | {started:.0f} | {after:.0f} | {anonymous:.0f} | "
                f"{after / first:.2f} | {found.latencies_ms['p50']:.2f} | {accuracy.agreement:.4f} |"
            )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default=",".join(_MODELS))
    parser.add_argument("--dtypes", default="float32,int8")
    parser.add_argument("--seconds", type=float, default=10.0)
    given = parser.parse_args()
    print(
        "| Model | | Bundle, MB | Started, MB | After, MB | Without a file, MB | To the first | p50, ms | Agreement |"
    )
    print("|---|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    texts = make_texts()
    for name in given.models.split(","):
        for row in _rows(name, given.dtypes.split(","), texts, given.seconds):
            print(row, flush=True)


if __name__ == "__main__":
    main()
