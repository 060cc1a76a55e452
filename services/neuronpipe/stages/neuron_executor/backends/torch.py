"""PyTorch on GPUs, one core each, or on the CPU as the reference. Runs exported programs without transformers."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import torch

from neuronpipe.core.errors import SetupError
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends.base import (
    BackendError,
    BackendRequest,
    CoreLost,
    Finish,
    Prepare,
    ResultT,
    check_shapes,
)
from neuronpipe.stages.neuron_executor.runtimes.decoder import decoder_file
from neuronpipe.stages.neuron_executor.runtimes.decoders import GatheredModel
from neuronpipe.stages.neuron_executor.runtimes.host import compute_pool, cpu_threads
from neuronpipe.stages.neuron_executor.runtimes.torch import TorchGraph, is_lost, load_program
from neuronpipe.stages.neuron_executor.shapes import ShapeMenu

# Larger batches are not faster on CPUs (docs/benchmarks/README.md).
_MOST_TOKENS_ON_CPU = 512


class TorchBackend:
    """See Backend. A GPU computes the batches in flight on separate streams.

    So the copies of one batch overlap with the computation of another.
    """

    part_ns: Sequence[int] = ()
    lone_graphs: Mapping[int, int] = MappingProxyType({})

    def __init__(self, request: BackendRequest) -> None:
        path = next((path for path in request.files if path.suffix == ".pt2"), None)
        if path is None:
            raise SetupError(f"model {request.spec.name!r}: its torch artefact names no .pt2 file; compile it again")
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self.cores = _cores(kind, request)
        self.in_flight = request.in_flight
        most_tokens = request.max_batch_tokens
        self.shapes = ShapeMenu(request.spec, most_tokens if kind == "cuda" else min(most_tokens, _MOST_TOKENS_ON_CPU))
        self._outputs = [output.name for output in request.spec.outputs]
        devices = [torch.device(kind, core) if kind == "cuda" else torch.device(kind) for core in range(self.cores)]
        programs = {device: load_program(path, device).module() for device in dict.fromkeys(devices)}
        self._cores = [(device, programs[device]) for device in devices]
        self._streams = _Streams()
        make_pool = compute_pool if kind == "cpu" else ThreadPoolExecutor
        self._threads = make_pool(self.cores * self.in_flight, f"core-{request.spec.name}")

    async def run(self, core: int, prepare: Prepare, finish: Finish[ResultT], *, is_alone: bool = False) -> ResultT:
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: finish(self._compute(core, prepare()))
        )

    def _compute(self, core: int, inputs: Arrays) -> dict[str, Array]:
        device, program = self._cores[core]
        check_shapes(inputs)
        try:
            with torch.inference_mode(), self._streams.use(device) as stream:
                outputs = program(**{name: _to_device(array, device) for name, array in inputs.items()})
                on_host = {name: _to_host(outputs[name]) for name in self._outputs}
                if stream is not None:
                    stream.synchronize()
                return {name: tensor.numpy() for name, tensor in on_host.items()}
        except (RuntimeError, IndexError, AssertionError) as error:
            if is_lost(error, device):
                raise CoreLost(f"{device} was lost") from error
            raise BackendError(f"PyTorch could not compute a batch on {device}") from error

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._cores.clear()


def load_decoder(request: BackendRequest, *, max_tokens: int, max_bytes: int) -> GatheredModel:
    """Loads a model that generates; see `load_decoder` of the package."""
    file = decoder_file(request.spec.name, "torch", request.files)
    return GatheredModel(TorchGraph(file, request.threads, max_tokens, max_bytes))


def _cores(kind: str, request: BackendRequest) -> int:
    """Returns the number of cores. On the CPU, also sets the number of threads for all models of the process.

    Raises SetupError if there are more cores than GPUs.
    """
    if kind == "cuda":
        devices = torch.cuda.device_count()
        if request.cores > devices:
            raise SetupError(f"cores: {request.cores}, there are {devices} GPUs")
        return request.cores or devices
    threads, cores = cpu_threads(request.threads, request.cores), request.cores or 1
    torch.set_num_threads(max(1, threads // cores))
    return cores


class _Streams(threading.local):
    """A stream for each thread and GPU, kept as long as the thread lives.

    A new stream for each batch would cost driver calls.
    """

    def __init__(self) -> None:
        self._by_device: dict[torch.device, Any] = {}

    @contextlib.contextmanager
    def use(self, device: torch.device) -> Iterator[Any]:
        """Makes this thread's stream the current stream; yields None on the CPU."""
        if device.type != "cuda":
            yield None
            return
        if device not in self._by_device:
            self._by_device[device] = torch.cuda.Stream(device)
        stream = self._by_device[device]
        with torch.cuda.stream(stream):
            yield stream


def _to_device(array: Array, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    # Only a copy from pinned memory runs beside the computation of another stream.
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
