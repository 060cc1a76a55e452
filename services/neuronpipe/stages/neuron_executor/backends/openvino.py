"""OpenVINO on CPUs: a graph with a stream for each core, a graph with a single stream, and graphs of single lengths.

The graph with a single stream runs a batch with all threads while no other batch waits. If that batch is a single text,
a graph of its length runs it.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from neuronpipe.core.errors import SetupError
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.stages.neuron_executor.backends.base import (
    BackendError,
    BackendRequest,
    Finish,
    Prepare,
    ResultT,
    check_shapes,
)
from neuronpipe.stages.neuron_executor.backends.lone_graphs import LoneGraphs
from neuronpipe.stages.neuron_executor.backends.part_turns import PartTurns
from neuronpipe.stages.neuron_executor.runtimes.decoder import GATHERED, DecoderModel, decoder_file
from neuronpipe.stages.neuron_executor.runtimes.host import compute_pool, cpu_threads, resident_bytes
from neuronpipe.stages.neuron_executor.runtimes.openvino import computable, engine, openvino, read, warn_of_float32
from neuronpipe.stages.neuron_executor.runtimes.parts import HIDDEN
from neuronpipe.stages.neuron_executor.shapes import ShapeMenu
from neuronpipe.tasks.inputs.kind import input_kind

# Limit of a batch's tokens for each thread of a stream. Batches of 256 to 512 tokens were the fastest
# (docs/benchmarks/README.md).
_MOST_TOKENS = 512
# A text of 16 tokens takes 23 µs in a batch of 512 tokens; in a batch of 4096 tokens the text takes 12 µs (256
# dimensions, 2026-11-30, 2 busy virtual CPUs).
_MOST_TOKENS_STATIC = 2048


class OpenVinoBackend:
    in_flight = 1

    def __init__(self, request: BackendRequest) -> None:
        files = [path for path in request.files if path.suffix == ".xml"]
        if not files:
            raise SetupError(f"model {request.spec.name!r}: its openvino artefact names no .xml file; compile it again")
        self._cpus, self.cores = _resources(request)
        self._turns = PartTurns(request.spec.name, len(files), self.cores)
        self._config = dict(request.properties)
        threads_of_stream = max(1, self._cpus // self._turns.parts // self._turns.pipelines)
        most_tokens = _MOST_TOKENS_STATIC if request.spec.is_static else _MOST_TOKENS
        self.shapes = ShapeMenu(request.spec, min(request.max_batch_tokens, most_tokens * threads_of_stream))
        # Only models in one part that take only texts have graphs of single lengths.
        self._kind = input_kind(request.spec) if len(files) == 1 and request.spec.image is None else None
        # The additional thread compiles while the others compute.
        self._threads = compute_pool(self.cores + 1, f"core-{request.spec.name}")
        try:
            # The model is read once, so its weights are in memory once, however often the model is compiled.
            self._models = [read(path) for path in files]
            self._inputs = [[port.any_name for port in model.inputs] for model in self._models]
            self._check_inputs(files[0], request)
            # OpenVINO's own threads inherit the priority of the thread that creates them.
            graph_bytes = self._threads.submit(self._compile).result()
        except SetupError:
            self._threads.shutdown()
            raise
        except RuntimeError as error:
            self._threads.shutdown()
            raise SetupError(
                f"{files[0]}: OpenVINO {openvino.__version__} cannot load it; compile the model again with this version"
            ) from error
        self._outputs = [output.name for output in request.spec.outputs]
        self._lone = (
            LoneGraphs(self._compile_length, self._threads.submit, request.lone_graphs, graph_bytes)
            if self._kind
            else None
        )
        threads = {"INFERENCE_NUM_THREADS": str(self._cpus // self._turns.parts)}
        warn_of_float32(request.spec.name, self._config, computable(self._config | threads, self._models))

    def _check_inputs(self, file: Path, request: BackendRequest) -> None:
        if unknown := {name for names in self._inputs for name in names} - {HIDDEN, *request.spec.inputs}:
            raise SetupError(
                f"{file}: takes {', '.join(sorted(unknown))}, which the manifest does not name; compile the model again"
            )

    def _compile(self) -> int:
        """Compiles the graphs of any shape at the same time. Returns the bytes that one graph takes."""
        before_bytes = resident_bytes()
        # With all threads, a batch that is alone takes half of the time on two CPUs.
        wide = self._threads.submit(self._compiled, 1, self._cpus) if self.cores > 1 else None
        # Streams of one thread have the highest throughput. Parts of a model share the threads.
        models = self._compiled(self._turns.pipelines, self._cpus // self._turns.parts)
        # For each core, a request for each part.
        self._requests = [[model.create_infer_request() for model in models] for _ in range(self.cores)]
        self._wide_requests: Sequence[openvino.InferRequest] = self._requests[0]
        if wide:
            self._wide_requests = [model.create_infer_request() for model in wide.result()]
        if self._kind:
            self._wide_requests[0].infer(self._example(self.shapes.lengths[0]))  # allocates memory
        return (resident_bytes() - before_bytes) // (2 if wide else 1)

    def _compile_length(self, tokens: int) -> openvino.InferRequest:
        model = self._models[0].clone()
        model.reshape({name: [1, tokens] for name in self._inputs[0]})
        request = self._compiled(1, self._cpus, [model])[0].create_infer_request()
        request.infer(self._example(tokens))
        return request

    def _example(self, tokens: int) -> dict[str, Array]:
        """Returns the inputs of a text of this padded length."""
        assert self._kind  # noqa: S101
        return self._kind.pad([self._kind.shortest()], tokens)

    def _compiled(
        self, streams: int, threads: int, models: Sequence[openvino.Model] = ()
    ) -> list[openvino.CompiledModel]:
        config = self._config | {"NUM_STREAMS": str(streams), "INFERENCE_NUM_THREADS": str(threads)}
        if self._turns.parts > 1:
            # Otherwise each part would pin its threads to the same CPUs: 99 texts per second instead of 140 (MiniLM,
            # two CPUs, measured 2026-11-24).
            config["ENABLE_CPU_PINNING"] = "NO"
        models = models or self._models
        config = computable(config, models)
        return [engine().compile_model(model, "CPU", config) for model in models]

    @property
    def part_ns(self) -> Sequence[int]:
        return self._turns.part_ns

    @property
    def lone_graphs(self) -> Mapping[int, int]:
        return self._lone.sizes if self._lone else {}

    async def run(self, core: int, prepare: Prepare, finish: Finish[ResultT], *, is_alone: bool = False) -> ResultT:
        # Not start_async with a callback: on OpenVINO 2026.4 a batch that fails does not call back. A callback is also
        # no faster: the calling thread computes a synchronous batch together with the threads of its stream.
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._compute, core, is_alone, prepare, finish
        )

    def _compute(self, core: int, is_alone: bool, prepare: Prepare, finish: Finish[ResultT]) -> ResultT:
        values = dict(prepare())
        check_shapes(values)
        requests = self._lone_requests(values) if is_alone else self._requests[core]
        try:
            for core_of_part, request, names in zip(self._turns.cores_of(core), requests, self._inputs, strict=True):
                with self._turns.take(core_of_part):
                    request.infer({name: values[name] for name in names}, share_inputs=True)
                if request is not requests[-1]:
                    values[HIDDEN] = request.get_tensor(HIDDEN).data
        except RuntimeError as error:
            # On OpenVINO 2026.4 a stream on which a batch failed may fail for ever with other batches. Compiling took
            # 0.2 s with MiniLM.
            self._compile()
            if self._lone:
                self._lone.forget()
            raise BackendError("OpenVINO could not compute a batch") from error
        return finish({name: requests[-1].get_tensor(name).data for name in self._outputs})

    def _lone_requests(self, values: Arrays) -> Sequence[openvino.InferRequest]:
        """Returns the requests that compute a batch that is alone."""
        rows, tokens = next(iter(values.values())).shape[:2]
        graph = self._lone.find(tokens) if self._lone and rows == 1 else None
        return [graph] if graph else self._wide_requests

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        if self._lone:
            self._lone.close()
        del self._requests, self._wide_requests, self._models


def load_decoder(request: BackendRequest, *, max_tokens: int, max_bytes: int) -> DecoderModel:
    """Loads a model that generates; see `load_decoder` of the package."""
    from neuronpipe.stages.neuron_executor.runtimes.decoders import GatheredModel
    from neuronpipe.stages.neuron_executor.runtimes.paged import OpenVinoGraph, PagedModel

    file = decoder_file(request.spec.name, "openvino", request.files)
    properties = {**request.properties, "INFERENCE_NUM_THREADS": str(request.threads)}

    def load_graph() -> DecoderModel:
        step = (OpenVinoGraph if file.stem == GATHERED else PagedModel)(file, properties, max_tokens, max_bytes)
        warn_of_float32(request.spec.name, properties, step.properties)
        return GatheredModel(step) if isinstance(step, OpenVinoGraph) else step

    with compute_pool(1, "load") as pool:  # the runtime's own threads inherit its priority
        return pool.submit(load_graph).result()


def _resources(request: BackendRequest) -> tuple[int, int]:
    """Returns the numbers of threads and streams to use. Raises SetupError if there are fewer CPUs."""
    threads = cpu_threads(request.threads, request.cores)
    return threads, request.cores or threads
