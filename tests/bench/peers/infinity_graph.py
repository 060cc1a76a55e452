"""infinity's engine for the OpenVINO graph of our bundle, in place of its torch engine."""

import importlib
from collections.abc import Sequence
from enum import Enum
from typing import Any

from infinity_emb.transformer.abstract import BaseClassifer

from tests.bench.peers.classifier import load_graph

# Of all replicas; set by `install`.
_THREADS = {"threads": 1}


class _GraphClassifier(BaseClassifer):
    def __init__(self, *, engine_args: Any) -> None:
        self._classify = load_graph(engine_args.model_name_or_path, _THREADS["threads"])

    def encode_pre(self, sentences: list[str]) -> list[str]:
        return sentences

    def encode_core(self, features: list[str]) -> list[tuple[str, float]]:
        return self._classify(features)

    def encode_post(self, embedding: list[tuple[str, float]]) -> list[list[dict[str, str | float]]]:
        return [[{"label": label, "score": score}] for label, score in embedding]

    def tokenize_lengths(self, sentences: Sequence[str]) -> list[int]:
        return [len(sentence) for sentence in sentences]


class _Engine(Enum):
    graph = _GraphClassifier

    @staticmethod
    def from_inference_engine(engine: object) -> "_Engine":
        return _Engine.graph


def install(threads: int) -> None:
    """Makes infinity load graphs, each with so many threads, where it would load classifiers of torch."""
    _THREADS["threads"] = threads
    # A function of the same name hides the module from `import`.
    module: Any = importlib.import_module("infinity_emb.inference.select_model")
    module.PredictEngine = _Engine
