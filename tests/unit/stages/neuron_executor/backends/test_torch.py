"""backends/torch.py: what a GPU's streams are made of. What the back end computes is in tests/contract."""

import contextlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch

from neuronpipe.stages.neuron_executor.backends.torch import _Streams


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """The devices that streams were made for, on a machine that need not have a GPU."""
    made: list[torch.device] = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            made.append(device)

    @contextlib.contextmanager
    def current(stream: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", current)
    return made


def test_every_thread_has_one_stream_for_each_gpu_however_many_batches_it_runs(made: list[torch.device]) -> None:
    streams, both, gpus = _Streams(), Barrier(2), [torch.device("cuda", 0), torch.device("cuda", 1)]

    def run_batches() -> set[int]:
        both.wait(20)  # or one thread might run everything
        found = set()
        for _ in range(10):
            for gpu in gpus:
                with streams.use(gpu) as stream:
                    found.add(id(stream))
        return found

    with ThreadPoolExecutor(2) as threads:
        first, second = [future.result() for future in [threads.submit(run_batches) for _ in range(2)]]
    assert len(first) == len(second) == 2
    assert not first & second
    assert sorted(made, key=str) == [gpu for gpu in gpus for _ in range(2)]


def test_the_cpu_has_no_streams(made: list[torch.device]) -> None:
    with _Streams().use(torch.device("cpu")) as stream:
        assert stream is None
    assert made == []
