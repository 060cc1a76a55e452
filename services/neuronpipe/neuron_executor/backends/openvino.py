"""OpenVINO on CPUs: one compiled model with as many streams as it has cores, and one with a single stream for a batch that is alone."""

import asyncio
import sys
from concurrent.futures import ThreadPoolExecutor

from neuronpipe.core.errors import SetupError
from neuronpipe.core.logs import log_warning
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.neuron_executor.backends.base import BackendError, LoadRequest
from neuronpipe.neuron_executor.backends.cpus import available_cpus

# OpenVINO reports over the network that it is imported, unless this package of its is missing: then it takes the stub in
# openvino/tools/ovc/telemetry_stub.py. The documented way out, `opt_in_out --opt_out`, writes to the user's home.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

import openvino  # noqa: E402

# Lengths in steps: every new shape costs OpenVINO 1.5 ms once (measured 2026-11-21), and padding by up to 3 tokens costs little.
_TOKEN_STEP = 4

_PRECISION = "INFERENCE_PRECISION_HINT"


class OpenVinoBackend:
    """See Backend."""

    def __init__(self, request: LoadRequest) -> None:
        model_file = next((path for path in request.files if path.suffix == ".xml"), None)
        if model_file is None:
            raise SetupError(f"model {request.spec.name!r}: its openvino artefact names no .xml file; compile it again")
        threads, streams = _resources(request)
        config = dict(request.properties) | {"INFERENCE_NUM_THREADS": str(threads)}
        engine = openvino.Core()
        try:
            # Read once, the weights are held once, however often the model is compiled.
            model = engine.read_model(model_file)
            self._compiled = [engine.compile_model(model, "CPU", config | {"NUM_STREAMS": str(streams)})]
            self._requests = [self._compiled[0].create_infer_request() for _ in range(streams)]
            if streams > 1:
                self._compiled.append(engine.compile_model(model, "CPU", config | {"NUM_STREAMS": "1"}))
        except RuntimeError as error:
            raise SetupError(
                f"{model_file}: OpenVINO {openvino.__version__} cannot load it; compile the model again with this version"
            ) from error
        # Streams of one thread compute the most; alone, a batch is done sooner with all threads (1.9 times on two CPUs).
        self._wide_request = self._compiled[-1].create_infer_request()
        self._threads = ThreadPoolExecutor(max_workers=streams, thread_name_prefix=f"core-{request.spec.name}")
        self._max_tokens = request.spec.max_tokens
        self._outputs = [output.name for output in request.spec.outputs]
        self._warn_of_precision(request)

    @property
    def cores(self) -> int:
        """See Backend."""
        return len(self._requests)

    def round_tokens(self, tokens: int) -> int:
        """See Backend."""
        return min(-(-tokens // _TOKEN_STEP) * _TOKEN_STEP, self._max_tokens)

    async def run(self, core: int, inputs: Arrays, *, is_alone: bool = False) -> dict[str, Array]:
        """See Backend."""
        request = self._wide_request if is_alone else self._requests[core]
        # Not start_async with a callback: on OpenVINO 2026.4 a batch that fails does not call back. Nor is it faster: a synchronous batch
        # is computed by the thread that asks for it, with those of its stream.
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._compute, request, inputs)

    def _compute(self, request: openvino.InferRequest, inputs: Arrays) -> dict[str, Array]:
        try:
            request.infer(dict(inputs), share_inputs=True)
        except RuntimeError as error:
            raise BackendError("OpenVINO could not compute a batch") from error
        # The request's tensors are overwritten by its next batch.
        return {name: request.get_tensor(name).data.copy() for name in self._outputs}

    def close(self) -> None:
        """See Backend."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._requests.clear()
        del self._wide_request
        self._compiled.clear()

    def _warn_of_precision(self, request: LoadRequest) -> None:
        asked = request.properties.get(_PRECISION, "f32")
        if asked == "bf16" and "BF16" not in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            log_warning("this CPU has no bfloat16 instructions; the model computes in float32", model=request.spec.name)


def _resources(request: LoadRequest) -> tuple[int, int]:
    """Threads and streams to use. Raises SetupError for more than there are CPUs."""
    cpus = available_cpus()
    threads = request.threads or cpus
    streams = request.cores or threads
    if threads > cpus:
        raise SetupError(f"threads: {threads}, there are {cpus} CPUs for this process")
    if streams > threads:
        raise SetupError(f"cores: {streams}, each needs a thread of its own and there are {threads}")
    return threads, streams
