"""The runtimes that generate, by the names of the back ends. Each is imported only if it is needed."""

from collections.abc import Mapping
from pathlib import Path

from neuronpipe.stages.neuron_executor.runtimes.cpus import compute_pool
from neuronpipe.stages.neuron_executor.runtimes.decoder import GATHERED, DecoderModel
from neuronpipe.stages.neuron_executor.runtimes.gathered import GatheredModel


def load(
    name: str, model_file: Path, properties: Mapping[str, str], *, threads: int, max_tokens: int, max_bytes: int
) -> DecoderModel:
    """Loads the graph of a step, with that of the encoder beside it if there is one.

    It allocates blocks for `max_tokens` tokens, or as many as fit into `max_bytes`. Raises SetupError for a graph that
    cannot be loaded, and if not even two blocks fit; ModuleNotFoundError without the runtime.
    """
    if name == "torch":
        from neuronpipe.stages.neuron_executor.runtimes.gathered_torch import TorchGraph

        return GatheredModel(TorchGraph(model_file, threads, max_tokens, max_bytes))
    from neuronpipe.stages.neuron_executor.runtimes.gathered_openvino import OpenVinoGraph
    from neuronpipe.stages.neuron_executor.runtimes.paged import PagedModel

    properties = {**properties, "INFERENCE_NUM_THREADS": str(threads)}

    def load_graph() -> DecoderModel:
        if model_file.stem == GATHERED:
            return GatheredModel(OpenVinoGraph(model_file, properties, max_tokens, max_bytes))
        return PagedModel(model_file, properties, max_tokens, max_bytes)

    with compute_pool(1, "load") as pool:  # whose priority the runtime's own threads inherit
        return pool.submit(load_graph).result()
