"""infinity with its torch engine, or with its folder's graph, or, for an ONNX graph, with its engine `optimum`."""

import importlib
import os
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from infinity_emb import cli
from infinity_emb.transformer.abstract import BaseClassifer

from tests.bench.peers.classifier import GRAPH_FILE, load_graph
from tests.bench.peers.embedders_alone import ONNX_FILE
from tests.bench.peers.launching import end_with_parent, read_settings, say_ready_when_healthy
from tests.servers.ports import free_port


def _use_graphs(threads: int) -> None:
    """Makes infinity load graphs, each with some threads, where it would load classifiers of torch."""

    class GraphClassifier(BaseClassifer):
        def __init__(self, *, engine_args: Any) -> None:
            self._classify = load_graph(engine_args.model_name_or_path, threads)

        def encode_pre(self, sentences: list[str]) -> list[str]:
            return sentences

        def encode_core(self, features: list[str]) -> list[tuple[str, float]]:
            return self._classify(features)

        def encode_post(self, embedding: list[tuple[str, float]]) -> list[list[dict[str, str | float]]]:
            return [[{"label": label, "score": score}] for label, score in embedding]

        def tokenize_lengths(self, sentences: Sequence[str]) -> list[int]:
            return [len(sentence) for sentence in sentences]

    class Engine(Enum):
        graph = GraphClassifier

        @staticmethod
        def from_inference_engine(engine: object) -> "Engine":
            return Engine.graph

    # A function of the same name hides the module from `import`.
    module: Any = importlib.import_module("infinity_emb.inference.select_model")
    module.PredictEngine = Engine


def main() -> None:
    """Serves POST /classify or /embeddings until SIGTERM."""
    # Not ranked: single runs on 2 shared cores (2026-11-21): 8 callers got 45 to 55 texts/s with two threads, 44 with
    # one. One worker.
    settings = read_settings(threads=2, max_batch_size=32, compile=0)
    end_with_parent()
    kind: tuple[str, ...] = ("torch", "--no-bettertransformer")
    source, name = settings.source, Path(settings.source).name
    if (Path(source) / GRAPH_FILE).is_file():
        _use_graphs(settings.threads)
    elif (Path(source) / ONNX_FILE).is_file():
        # onnxruntime takes all CPUs. optimum 2 finds a graph only by its path within the model's folder; infinity gives
        # it the path from here.
        os.chdir(source)
        source = "."
        kind = ("optimum", "--onnx-do-not-prefer-quantized", "--pooling-method", "mean")
    else:
        import torch

        torch.set_num_threads(settings.threads)
    port = free_port()
    say_ready_when_healthy(port)
    served = ("--model-id", source, "--served-model-name", name)
    engine = ("--engine", *kind, "--device", "cpu", "--dtype", "float32")
    batches = ("--batch-size", str(settings.max_batch_size), "--compile" if settings.compile else "--no-compile")
    listen = ("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning")
    sys.argv = ["infinity_emb", "v2", *served, *engine, *batches, *listen]
    cli.cli()


if __name__ == "__main__":
    main()
