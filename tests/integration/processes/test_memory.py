"""The memory of an executor after thousands of texts of all lengths is within the formula, and has ended to grow."""

import asyncio
import pydoc_data.topics
import random
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from demo.model import find_minilm
from demo.processes import ServiceProcess
from neuronpipe.api.v1.tasks_pb2 import Truncation
from neuronpipe.bundles.repository import read_repository
from neuronpipe.client import AsyncClient
from neuronpipe.stages.neuron_executor.memory import plan_memory
from neuronpipe.stages.settings import EngineSettings
from tests.callers.metrics import metric
from tests.models.compiling import compile_model

_SEED = 20261128
_TEXTS, _CALLERS = 2000, 32
# The shapes of two cores take half a minute on a busy machine.
_PATIENCE_S = 240.0
_GRAPHS = "neuronpipe_model_lone_graph_memory"


def _texts(generator: random.Random) -> list[str]:
    words = " ".join(pydoc_data.topics.topics.values()).split()
    starts = [generator.randrange(len(words) - 400) for _ in range(_TEXTS)]
    return [" ".join(words[start : start + generator.choice((3, 10, 20, 40, 80, 160, 400))]) for start in starts]


async def _send(target: str, texts: Sequence[str], callers: int) -> None:
    remaining = iter(texts)
    async with AsyncClient(target) as client:

        async def caller() -> None:
            for text in remaining:
                await client.embed("minilm", text, truncation=Truncation.TRUNCATION_RIGHT)

        await asyncio.gather(*(caller() for _ in range(callers)))


@pytest.mark.long
@pytest.mark.timeout(600)
def test_memory_after_thousands_of_mixed_texts_stays_within_the_formula(tmp_path: Path) -> None:
    compile_model(find_minilm(), tmp_path, "sentence_embedding", name="minilm", dtype="int8")
    repository = ("--repository", str(tmp_path))
    most_bytes = plan_memory(read_repository(tmp_path), EngineSettings()).total
    texts = _texts(random.Random(_SEED))
    near = ("--tokenizer-target", "local", "--postprocessor-target", "local")
    with ServiceProcess("neuron-executor", *repository, "--metrics-listen", "127.0.0.1:0") as executor:
        target = executor.wait_until_ready().target
        with ServiceProcess("gateway", *repository, *near, "--executor-target", target) as gateway:
            gateway.wait_for("all stages reached")
            asyncio.run(_send(gateway.wait_until_ready().target, texts, _CALLERS))
            asyncio.run(_send(gateway.target, texts[:200], 1))
            limit_s = time.monotonic() + _PATIENCE_S
            while metric(executor, "neuronpipe_model_shapes_ready") < metric(executor, "neuronpipe_model_shapes"):
                assert time.monotonic() < limit_s, "the shapes are never prepared"
                time.sleep(0.5)
            process = psutil.Process(executor.pid)
            prepared_bytes, graph_bytes = process.memory_info().rss, metric(executor, _GRAPHS)
            assert prepared_bytes <= most_bytes
            assert graph_bytes > 0
            for callers in (_CALLERS, 1):
                asyncio.run(_send(gateway.target, texts[: _TEXTS if callers > 1 else 200], callers))
            # No shape is left to prepare. Graphs of single lengths may still be compiled in the background.
            grown_bytes, new_graph_bytes = (
                process.memory_info().rss - prepared_bytes,
                metric(executor, _GRAPHS) - graph_bytes,
            )
            assert grown_bytes <= new_graph_bytes + (32 << 20)
            assert prepared_bytes + grown_bytes <= most_bytes
            assert graph_bytes + new_graph_bytes <= EngineSettings().lone_graph_bytes
