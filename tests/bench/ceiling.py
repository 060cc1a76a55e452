"""The back end alone: what the machine could do if nothing but the model took time.

OpenVINO, in a process of its own and compiled as the back end compiles it, is given batches that were made beforehand:
the texts sorted by length and cut into batches of a budget of padded tokens. Several budgets are tried at first, and
the best is kept.
"""

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.platform.process.worker import Worker
from neuronpipe.stages.neuron_executor.runtimes.host import available_cpus
from neuronpipe.tasks.inputs.kind import input_kind

# Padded tokens of a batch. 0: every text alone.
BUDGETS = (0, 256, 512, 1024, 2048)
# The first also meets every shape for the first time.
_TRIALS = 2
# Every fourth batch is enough to compare budgets, by tokens a second, padding not counted.
_SAMPLED = 4
# Enough to be sorted well, few enough for whole passes in a turn. The benchmark's texts have the same mix of lengths
# wherever they are cut.
_TEXTS = 512
# As the back end pads.
_TOKEN_STEP = 4

_Batch: TypeAlias = dict[str, Array]


class Ceiling:
    """The process, as its parent sees it."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        # The texts' own tokens a second with each of BUDGETS.
        tried: dict[int, float] = worker.receive()
        self.batch_tokens = max(tried, key=lambda budget: tried[budget])

    def measure(self, seconds: float) -> float:
        """Texts a second: all texts at least once, and again until the seconds have passed."""
        self._worker.send(seconds)
        return float(self._worker.receive())


@contextmanager
def running_ceiling(repository: Path, texts: Sequence[str]) -> Iterator[Ceiling]:
    """The model, loaded, with the best of BUDGETS; ended with the block."""
    with Worker.started(_serve, repository, list(texts[:_TEXTS]), name="ceiling") as worker:
        yield Ceiling(worker)


def _serve(pipe: "Connection[float | dict[int, float], float]", repository: Path, texts: Sequence[str]) -> None:
    import openvino

    cpus = available_cpus()
    spec, compiled, tokenizer = open_model(repository, streams=cpus, threads=cpus)
    queue = openvino.AsyncInferQueue(compiled, cpus)
    sequences: list[Arrays] = [
        {"input_ids": np.array(encoded.ids, np.int32)} for encoded in tokenizer.encode_batch(list(texts))
    ]

    def batches(budget: int) -> list[_Batch]:
        cut = list(cut_sorted([len(sequence["input_ids"]) for sequence in sequences], budget))
        # Shuffled, so that long batches do not all come at the end.
        random.Random(0).shuffle(cut)
        kind = input_kind(spec)
        return [kind.pad([sequences[index] for index in rows], padded) for rows, padded in cut]

    def passes_per_s(pool: Sequence[_Batch], seconds: float) -> float:
        began_s = time.perf_counter()
        passes = 0
        while not passes or time.perf_counter() - began_s < seconds:
            for batch in pool:
                queue.start_async(batch, share_inputs=True)
            passes += 1
        queue.wait_all()
        return passes / (time.perf_counter() - began_s)

    pools = {budget: batches(budget) for budget in BUDGETS}
    tried = dict.fromkeys(BUDGETS, 0.0)
    for _ in range(_TRIALS):
        for budget, pool in pools.items():
            sample = pool[::_SAMPLED]
            tokens = sum(int(batch["attention_mask"].sum()) for batch in sample)
            tried[budget] = max(tried[budget], tokens * passes_per_s(sample, 0))
    best = pools[max(tried, key=lambda budget: tried[budget])]
    passes_per_s(best, 0)
    pipe.send(tried)
    while True:
        pipe.send(len(sequences) * passes_per_s(best, pipe.recv()))


def open_model(repository: Path, *, streams: int, threads: int) -> tuple[ModelSpec, Any, Any]:
    """The model of a repository, its graph as OpenVINO compiles it, and its tokenizer, which does not pad."""
    import openvino
    import tokenizers

    (bundle,) = read_repository(repository)
    artifact = bundle.artifact("openvino")
    with bundle.artifact_files(artifact) as files:
        model_file = next(path for path in files if path.suffix == ".xml")
    config = {**artifact.properties, "INFERENCE_NUM_THREADS": str(threads), "NUM_STREAMS": str(streams)}
    compiled = openvino.Core().compile_model(model_file, "CPU", config)
    tokenizer = tokenizers.Tokenizer.from_buffer(bundle.tokenizer_json())
    tokenizer.no_padding()
    tokenizer.enable_truncation(bundle.spec.max_tokens)
    return bundle.spec, compiled, tokenizer


def cut_sorted(lengths: Sequence[int], budget: int) -> Iterator[tuple[list[int], int]]:
    """Batches of texts by number, shortest first, each with its padded length; as many as the budget of padded tokens
    takes, or one.
    """
    rows: list[int] = []
    padded = 0
    for index in sorted(range(len(lengths)), key=lambda index: lengths[index]):
        new_padded = -(-lengths[index] // _TOKEN_STEP) * _TOKEN_STEP
        if rows and new_padded * (len(rows) + 1) > budget:
            yield rows, padded
            rows = []
        rows, padded = [*rows, index], new_padded
    if rows:
        yield rows, padded
