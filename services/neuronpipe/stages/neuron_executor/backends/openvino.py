"""OpenVINO on CPUs: a compiled model with a stream for each core, and one with a single stream.

The latter runs a batch while no other batch waits. It is compiled when the first such batch comes, so that a process
that starts for a waiting request answers it sooner.
"""

import asyncio
from collections.abc import Sequence

from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log_fault, log_warning
from neuronpipe.stages.neuron_executor.backends.base import (
    BackendError,
    BackendRequest,
    Finish,
    Prepare,
    ResultT,
    check_shapes,
)
from neuronpipe.stages.neuron_executor.backends.part_turns import PartTurns
from neuronpipe.stages.neuron_executor.runtimes.host import compute_pool, cpu_threads
from neuronpipe.stages.neuron_executor.runtimes.openvino import computable, engine, has_bfloat16, openvino
from neuronpipe.stages.neuron_executor.runtimes.parts import HIDDEN

# Lengths in steps: every new shape costs OpenVINO 1.5 ms once (measured 2026-11-21), and padding by up to 3 tokens
# costs little.
_TOKEN_STEP = 4

_PRECISION = "INFERENCE_PRECISION_HINT"


class OpenVinoBackend:
    """See Backend."""

    buckets = None
    in_flight = 1

    def __init__(self, request: BackendRequest) -> None:
        files = [path for path in request.files if path.suffix == ".xml"]
        if not files:
            raise SetupError(f"model {request.spec.name!r}: its openvino artefact names no .xml file; compile it again")
        self._cpus, self.cores = _resources(request)
        self._turns = PartTurns(request.spec.name, len(files), self.cores)
        self._config = dict(request.properties)
        # One more compiles while the others compute.
        self._threads = compute_pool(self.cores + 1, f"core-{request.spec.name}")
        try:
            # The model is read once, so its weights are in memory once, however often the model is compiled.
            self._models = [engine().read_model(path) for path in files]
            self._inputs = [[port.any_name for port in model.inputs] for model in self._models]
            # OpenVINO's own threads inherit the priority of the thread that creates them.
            self._threads.submit(self._compile).result()
        except RuntimeError as error:
            self._threads.shutdown()
            raise SetupError(
                f"{files[0]}: OpenVINO {openvino.__version__} cannot load it; compile the model again with this version"
            ) from error
        if unknown := {name for names in self._inputs for name in names} - {HIDDEN, *request.spec.inputs}:
            self._threads.shutdown()
            raise SetupError(
                f"{files[0]}: takes {', '.join(sorted(unknown))}, which the manifest does not name; compile the model "
                "again"
            )
        self._max_tokens = request.spec.max_tokens
        self._outputs = [output.name for output in request.spec.outputs]
        self._warn_of_precision(request)

    def _compile(self) -> None:
        """Streams of one thread have the highest throughput. Parts of a model share the threads."""
        models = self._compiled(self._turns.pipelines, self._cpus // self._turns.parts)
        # For each core, a request for each part.
        self._requests = [[model.create_infer_request() for model in models] for _ in range(self.cores)]
        self._wide_requests: Sequence[openvino.InferRequest] = ()
        self._is_widening = self.cores == 1

    def _widen(self) -> None:
        """A batch alone is faster with all threads (1.9 times on two CPUs)."""
        try:
            self._wide_requests = [model.create_infer_request() for model in self._compiled(1, self._cpus)]
        except RuntimeError as error:
            log_fault("batches that are alone run on one core: OpenVINO could not compile the model again", error)

    def _compiled(self, streams: int, threads: int) -> list[openvino.CompiledModel]:
        config = self._config | {"NUM_STREAMS": str(streams), "INFERENCE_NUM_THREADS": str(threads)}
        if self._turns.parts > 1:
            # Each part alone would pin its threads to the same CPUs: 99 texts a second in place of 140 (MiniLM, two
            # CPUs, measured 2026-11-24).
            config["ENABLE_CPU_PINNING"] = "NO"
        return [engine().compile_model(model, "CPU", computable(config)) for model in self._models]

    @property
    def part_ns(self) -> Sequence[int]:
        return self._turns.part_ns

    def round_tokens(self, tokens: int) -> int:
        return min(-(-tokens // _TOKEN_STEP) * _TOKEN_STEP, self._max_tokens)

    async def run(self, core: int, prepare: Prepare, finish: Finish[ResultT], *, is_alone: bool = False) -> ResultT:
        requests = (is_alone and self._wide_requests) or self._requests[core]
        if is_alone and not self._is_widening:
            self._is_widening = True
            self._threads.submit(self._widen)
        # Not start_async with a callback: on OpenVINO 2026.4 a batch that fails does not call back. Nor is it faster: a
        # synchronous batch is computed by the thread that asks for it, with those of its stream.
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._compute, core, requests, prepare, finish
        )

    def _compute(
        self, core: int, requests: Sequence[openvino.InferRequest], prepare: Prepare, finish: Finish[ResultT]
    ) -> ResultT:
        values = dict(prepare())
        check_shapes(values)
        try:
            for core_of_part, request, names in zip(self._turns.cores_of(core), requests, self._inputs, strict=True):
                with self._turns.take(core_of_part):
                    request.infer({name: values[name] for name in names}, share_inputs=True)
                if request is not requests[-1]:
                    values[HIDDEN] = request.get_tensor(HIDDEN).data
        except RuntimeError as error:
            # On OpenVINO 2026.4 a stream on which a batch failed may fail for good with other batches. Compiling took
            # 0.2 s with MiniLM.
            self._compile()
            raise BackendError("OpenVINO could not compute a batch") from error
        return finish({name: requests[-1].get_tensor(name).data for name in self._outputs})

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
        del self._requests, self._wide_requests, self._models

    def _warn_of_precision(self, request: BackendRequest) -> None:
        asked = request.properties.get(_PRECISION, "f32")
        if asked == "bf16" and not has_bfloat16():
            log_warning("this CPU has no bfloat16 instructions; the model computes in float32", model=request.spec.name)


def _resources(request: BackendRequest) -> tuple[int, int]:
    """Threads and streams to use. Raises SetupError for more than there are CPUs."""
    threads = cpu_threads(request.threads, request.cores)
    return threads, request.cores or threads
