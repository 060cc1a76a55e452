"""Four processes that serve the models of a suite, asked over gRPC."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from demo.processes import four_processes
from neuronpipe.api.v1.inference_pb2 import InferOutcome, InferRequest
from neuronpipe.api.v1.tasks_pb2 import TaskInput
from neuronpipe.client import AsyncClient
from tests.models.compiling import compile_model
from tests.models.repository import for_neuron

_BATCH_ITEMS = 128
_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class Served:
    """The models, behind a gateway."""

    client: AsyncClient

    async def infer_all(self, model: str, inputs: Sequence[TaskInput]) -> list[InferOutcome]:
        """The outcomes of one model for all inputs, in order: each a response or an error."""
        requests = [InferRequest(model=model, input=input) for input in inputs]
        outcomes: list[InferOutcome] = []
        for first in range(0, len(requests), _BATCH_ITEMS):
            outcomes += await self.client.infer_batch(requests[first : first + _BATCH_ITEMS], timeout_s=_TIMEOUT_S)
        return outcomes


def serving_texts(
    backend: str,
    folder: Path,
    sources: Mapping[str, tuple[str, Path]],
    bucket: str,
    executor: Sequence[str],
    machine: Mapping[str, str],
) -> AbstractAsyncContextManager[Served]:
    """Serves generating models as `serving` does, of PyTorch, or on the contract double of Neuron with one core and one
    bucket. `executor`: its options. `machine`: the environment.
    """
    if backend == "torch":
        return serving(folder / "repository", sources, {"neuron-executor": executor}, backend, machine)
    options = {"neuron-executor": (*executor, "--cores", "1")}
    environment = {**machine, "NEURON_DOUBLE_FOLDER": str(folder / "neuron")}
    return serving(folder / "repository", sources, options, environment=environment, **for_neuron(folder, bucket))


@asynccontextmanager
async def serving(
    folder: Path,
    sources: Mapping[str, tuple[str, Path]],
    stage_options: Mapping[str, Sequence[str]] = MappingProxyType({}),
    backend: str = "openvino",
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """Compiles models (name in requests → task and source) for a back end in float32, and serves them from four
    processes. `stage_options`, `environment`: of some of them, and of all. `options`: of the compilation.

    Use it in a fixture of the scope "module", with a folder of `tmp_path_factory`.
    """
    for name, (task, source) in sources.items():
        compile_model(source, folder, task, name=name, backend=backend, **options)
    with four_processes(folder, stage_options=stage_options, environment=environment) as processes:
        async with AsyncClient(processes["gateway"].target, timeout_s=_TIMEOUT_S) as client:
            yield Served(client)
