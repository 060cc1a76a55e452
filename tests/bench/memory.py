"""Memory and latency that stay: a server after thousands of texts of all lengths, and one caller from its first answer.

Run: python -m tests.bench.memory [--dtypes int8,float32] [--texts N] [--rounds N] [--out FOLDER]
It prints a page, and writes it as memory.md.

Each dtype has two servers. The first is called at once by one caller with a synchronous client of grpcio. When its
shapes are prepared, its answers and those of a loop by hand come in turn, text by text. The loop has the tokenizer, and
the same graph with all threads, without padding. The second server gets texts of up to 512 tokens from 32 callers.
"""

import argparse
import json
import pydoc_data.topics
import random
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil

from demo.processes import ServiceProcess
from neuronpipe.api.v1.inference_pb2 import InferResponse
from neuronpipe.measure.figures import markdown_table
from neuronpipe.measure.machine import describe_machine, resident_mb
from tests.bench.ceiling import open_model
from tests.bench.load import INFER, LoadProcess, System
from tests.bench.peers.environments import CACHE
from tests.bench.systems import (
    MODEL,
    NO_CACHE,
    SOURCE,
    computed_dtypes,
    find_repository,
    make_request,
    make_texts,
    run_module,
)
from tests.callers.metrics import metric

_MAX_TOKENS = 512
_CALLERS = 32
_FIRST = 50
# A server that prepares its shapes for longer is broken.
_PATIENCE_S = 180.0

_Figures = Mapping[str, float]
# Heading and cell of each column, of the medians of all figures of a dtype.
_COLUMNS: Sequence[tuple[str, Callable[[_Figures], str]]] = (
    ("Start", lambda found: f"{found['start_mb']:.0f}"),
    ("After", lambda found: f"{found['end_mb']:.0f}"),
    ("Ratio", lambda found: f"{found['end_mb'] / found['start_mb']:.2f}"),
    ("Prepared", lambda found: f"{found['prepared_mb']:.0f}"),
    ("One caller", lambda found: f"{found['one_caller_mb']:.0f}"),
    ("First", lambda found: f"{found['first_ms']:.1f}"),
    ("Later", lambda found: f"{found['later_ms']:.1f}"),
    ("Ratio", lambda found: f"{found['first_ms'] / found['later_ms']:.2f}"),
    ("Served", lambda found: f"{found['served_ms']:.2f}"),
    ("By hand", lambda found: f"{found['by_hand_ms']:.2f}"),
    ("Ratio", lambda found: f"{found['served_ms'] / found['by_hand_ms']:.2f}"),
    ("p99 / p50", lambda found: f"{found['p99_ms'] / found['p50_ms']:.2f}"),
)


def _long_repository(dtype: str) -> Path:
    """The model of the other benchmarks, for texts of 512 tokens."""
    repository, source = CACHE / f"repository-{dtype}-{_MAX_TOKENS}", CACHE / f"source-{_MAX_TOKENS}"
    if not (repository / MODEL).is_dir():
        find_repository("fake")  # makes the source
        if not source.is_dir():
            import transformers

            model = transformers.AutoModelForSequenceClassification.from_pretrained(SOURCE)
            model.save_pretrained(source)
            transformers.AutoTokenizer.from_pretrained(SOURCE, model_max_length=_MAX_TOKENS).save_pretrained(source)
        task = ("--task", "text-classification", "--name", MODEL, "--repository", str(repository), "--dtype", dtype)
        run_module("-m", "neuronpipe", "compile", str(source), *task)
    return repository


def _mixed_texts(count: int) -> list[str]:
    """Texts of one to eight paragraphs, the same ones in every run."""
    blocks = [block for text in pydoc_data.topics.topics.values() for block in re.split(r"\n\s*\n", text)]
    paragraphs = [text for text in (re.sub(r"\s+", " ", block).strip() for block in blocks) if 12 < len(text) < 480]
    chooser = random.Random(20261128)
    return [" ".join(chooser.choices(paragraphs, k=chooser.choice((1, 1, 2, 3, 4, 8)))) for _ in range(count)]


class _Server:
    """`serve all`, with its memory and its metrics."""

    def __init__(self, process: ServiceProcess) -> None:
        self.target = process.wait_until_ready().target
        self._process = process

    @classmethod
    @contextmanager
    def started(cls, repository: Path) -> "Iterator[_Server]":
        options = ("--repository", str(repository), *NO_CACHE, "--metrics-listen", "127.0.0.1:0")
        with ServiceProcess("all", *options) as process:
            yield cls(process)

    def resident_mb(self) -> float:
        """The memory that the process has now."""
        return resident_mb(self._process.pid)

    def metric(self, name: str) -> float:
        """The sum of a metric's series."""
        return metric(self._process, name)

    def wait_until_prepared(self) -> None:
        """Waits until all shapes are prepared."""
        limit_s = time.monotonic() + _PATIENCE_S
        while self.metric("neuronpipe_model_shapes_ready") < self.metric("neuronpipe_model_shapes"):
            if time.monotonic() > limit_s:
                raise TimeoutError(f"shapes are not prepared after {_PATIENCE_S:g} s")
            time.sleep(1)


class _ByHand:
    """The tokenizer and the graph, as a program without a server has them."""

    def __init__(self, repository: Path) -> None:
        spec, compiled, self._tokenizer = open_model(repository, streams=1, threads=psutil.cpu_count() or 1)
        self._request, self._inputs = compiled.create_infer_request(), spec.inputs

    def __call__(self, text: str) -> None:
        """Computes the probabilities of a text."""
        ids = np.array([self._tokenizer.encode(text).ids], np.int64)
        values = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        self._request.infer({name: values.get(name, np.zeros_like(ids)) for name in self._inputs}, share_inputs=True)
        scores = np.exp(self._request.get_output_tensor(0).data[0])
        scores /= scores.sum()


def _timed_ms(call: Any, argument: Any) -> float:
    began_s = time.perf_counter()
    call(argument)
    return (time.perf_counter() - began_s) * 1e3


def _one_caller(repository: Path, texts: Sequence[str], rounds: int) -> Iterator[dict[str, float]]:
    """The figures of one caller: of a new server at once, and of one whose shapes are prepared."""
    by_hand = _ByHand(repository)
    for text in texts:
        by_hand(text)
    requests = [make_request(text) for text in texts]
    for _ in range(rounds):
        with _Server.started(repository) as server, grpc.insecure_channel(server.target) as channel:
            call: Any = channel.unary_unary(INFER, response_deserializer=InferResponse.FromString)
            at_once = [_timed_ms(call, request) for request in requests]
            later = [_timed_ms(call, request) for request in requests[_FIRST:]]
            server.wait_until_prepared()
            pairs = [
                (_timed_ms(call, request), _timed_ms(by_hand, text))
                for request, text in zip(requests, texts, strict=True)
            ]
            served, alone = zip(*pairs, strict=True)
            steady = [_timed_ms(call, request) for request in requests * 2]
            yield {
                "first_ms": statistics.median(at_once[:_FIRST]),
                "later_ms": statistics.median(later),
                "served_ms": statistics.median(served),
                "by_hand_ms": statistics.median(alone),
                "p50_ms": statistics.median(steady),
                "p99_ms": float(np.percentile(steady, 99)),
                "lone_graphs": server.metric("neuronpipe_model_lone_graphs"),
                "one_caller_mb": server.resident_mb(),
            }


def _many_callers(repository: Path, count: int) -> dict[str, float]:
    """The memory of a server, before and after texts of all lengths."""
    requests = [make_request(text) for text in _mixed_texts(count)]
    with _Server.started(repository) as server, LoadProcess.started(requests) as loop:
        start_mb = server.resident_mb()
        loop.answers(System("served", server.target), _CALLERS, count)
        end_mb = server.resident_mb()
        server.wait_until_prepared()
        return {"start_mb": start_mb, "end_mb": end_mb, "prepared_mb": server.resident_mb()}


def _page(found: dict[str, Any]) -> Iterator[str]:
    yield from ("# Memory and latency that stay", "", "<!-- Generated by tests/bench/memory.py. -->", "")
    yield f"""\
`serve all` with MiniLM on OpenVINO. Memory in MB: at the start, after {found["texts"]:,} texts of up to {_MAX_TOKENS}
tokens from {_CALLERS} callers, and their ratio; when all shapes are prepared; and of another server, for texts of up to
128 tokens, after one caller. p50 in ms of one caller (synchronous grpcio): the first {_FIRST} answers of a new server,
later ones, and their ratio; served and by hand (the tokenizer, and the same graph with all threads, without padding),
in turn, and their ratio; p99 relative to p50.
"""
    rows = []
    for dtype, figures in found["dtypes"].items():
        turns, many = figures["one"], figures["many"]
        medians = {**many, **{name: statistics.median(turn[name] for turn in turns) for name in turns[0]}}
        rows.append((dtype, *(cell(medians) for _, cell in _COLUMNS)))
    yield from markdown_table(("", *(name for name, _ in _COLUMNS)), rows)
    yield from ("", f"Command: `{found['command']}`", "")
    yield from markdown_table(("Machine", ""), found["machine"].items())


def main() -> None:
    """Measures, and writes the page."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.memory", description="Measures memory and latency.")
    parser.add_argument("--dtypes", default=",".join(computed_dtypes()), help="default: all that this CPU computes in")
    parser.add_argument("--texts", type=int, default=6000, help="texts of all lengths (default: 6000)")
    parser.add_argument("--rounds", type=int, default=3, help="servers for one caller (default: 3)")
    parser.add_argument("--out", type=Path, default=CACHE, help="folder to write to")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "command": shlex.join(["python", "-m", "tests.bench.memory", *sys.argv[1:]]),
        "machine": describe_machine(),
        "texts": options.texts,
        "dtypes": {},
    }
    texts = make_texts()[:200]
    for dtype in options.dtypes.split(","):
        found["dtypes"][dtype] = {
            "one": list(_one_caller(find_repository(dtype), texts, options.rounds)),
            "many": _many_callers(_long_repository(dtype), options.texts),
        }
        print(json.dumps(found["dtypes"][dtype]), file=sys.stderr, flush=True)
    page = "\n".join(_page(found)) + "\n"
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "memory.md").write_text(page)
    print(page)


if __name__ == "__main__":
    main()
