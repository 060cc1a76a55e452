"""The graph of gathered.py on OpenVINO."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.decoder import ENCODER, Scores, block_count
from neuronpipe.stages.neuron_executor.runtimes.openvino import compute, engine, openvino
from neuronpipe.stages.neuron_executor.runtimes.paged import add_scores, encoder_request, scores_of, zeros


class OpenVinoGraph:
    """See GatheringGraph. The cache is NumPy's, and shared with OpenVINO."""

    def __init__(self, model_file: Path, properties: Mapping[str, str], max_tokens: int, max_bytes: int) -> None:
        """See PagedModel."""
        try:
            graph = engine().read_model(model_file)
            add_scores(graph)
            compiled = engine().compile_model(graph, "CPU", {**properties, "NUM_STREAMS": "1"})
            encoder_file = model_file.with_name(f"{ENCODER}.xml")
            self._encoder = encoder_request(encoder_file, properties) if encoder_file.exists() else None
        except RuntimeError as error:
            raise SetupError(
                f"{model_file}: OpenVINO {openvino.__version__} cannot load it; compile the model again with this "
                "version"
            ) from error
        parts, _, heads, size, width = list(compiled.input("cache").get_partial_shape())
        fixed = [int(axis.get_length()) for axis in (parts, heads, size, width)]
        blocks = block_count(model_file, 4 * int(np.prod(fixed)), max_tokens, max_bytes)
        self.cache: Any = zeros((fixed[0], blocks, *fixed[1:]), np.float32)
        self._compiled = compiled
        self._request = self._new_request()
        # The request's inputs are in their memory.
        self._given: Mapping[str, NDArray[np.int64]] = {}

    def step(self, inputs: dict[str, NDArray[np.int64]]) -> tuple[Scores, Any]:
        """See GatheringGraph."""
        self._given = inputs
        try:
            compute(self._request, inputs)
        except RuntimeError:
            self._request = self._new_request()  # as a stream, it may fail for good with other inputs
            raise
        return scores_of(self._request), self._request.get_tensor("new").data

    def read(self, token_ids: NDArray[np.int64]) -> Any:
        """See GatheringGraph."""
        if self._encoder is None:
            raise RuntimeError("the model has no encoder")
        self._encoder.infer({0: token_ids})
        return self._encoder.get_output_tensor(0).data

    def _new_request(self) -> "openvino.InferRequest":
        request = self._compiled.create_infer_request()
        request.set_tensor("cache", openvino.Tensor(self.cache, shared_memory=True))
        return request
