"""A decoder on OpenVINO whose key-value caches are blocks: any rows of any sequences are computed in one step.

A bundle holds the stateful graph, because OpenVINO 2026.4 cannot read a paged one that it has written. The graph
becomes a paged one here, when it is loaded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from neuronpipe.core.errors import SetupError
from neuronpipe.runtimes.decoder import Run, Scores
from neuronpipe.runtimes.openvino import engine, openvino, opset13, paged_attention_transformation

# Tokens in a block, of OpenVINO's attention on CPUs.
BLOCK_TOKENS = 32
# The best tokens that the graph finds for each row: more than transformers' default of top_k, 50. To sort 32 rows of
# 152,000 logits in NumPy takes 447 ms. In the order of ids where logits are equal, and 256 of them, a step of 32 rows
# took 33 ms in place of 19 (measured 2026-11-22, 2 virtual cores, vocabulary of 1,200).
TOP_TOKENS = 64


class PagedModel:
    """See DecoderModel."""

    block_tokens = BLOCK_TOKENS

    def __init__(self, model_file: Path, properties: Mapping[str, str], max_tokens: int, max_bytes: int) -> None:
        """Allocates blocks for `max_tokens` tokens, or as many as fit into `max_bytes`.

        Raises SetupError for a graph that cannot be loaded, and if not even two blocks fit.
        """
        try:
            graph = engine().read_model(model_file)
            paged_attention_transformation(graph)
            _add_top_tokens(graph)
            compiled = engine().compile_model(graph, "CPU", {**properties, "NUM_STREAMS": "1"})
        except RuntimeError as error:
            raise SetupError(
                f"{model_file}: OpenVINO {openvino.__version__} cannot load it as a paged graph; compile the "
                "model again with this version"
            ) from error
        held = [
            (port, [int(axis.get_length()) for axis in list(port.get_partial_shape())[1:]])
            for port in compiled.inputs
            if "_cache." in port.any_name
        ]
        self.block_bytes = sum(int(np.prod(shape)) * port.get_element_type().size for port, shape in held)
        self.blocks = min(-(-max_tokens // BLOCK_TOKENS) + 1, max_bytes // self.block_bytes)
        if self.blocks < 2:
            raise SetupError(
                f"{model_file}: a block of its key-value cache takes {self.block_bytes} bytes, and {max_bytes} are "
                "allowed; allow more with --kv-cache-bytes"
            )
        self._compiled = compiled
        self._inputs = {port.any_name for port in compiled.inputs}
        # Memory of zeros is not taken before it is written to.
        arrays = [np.zeros((self.blocks, *shape), port.get_element_type().to_dtype()) for port, shape in held]
        self._caches = [
            (port, openvino.Tensor(array, shared_memory=True)) for (port, _), array in zip(held, arrays, strict=True)
        ]
        self._request = self._new_request()

    def compute(self, runs: Sequence[Run]) -> Scores:
        """See DecoderModel."""
        try:
            self._request.infer({name: array for name, array in _inputs(runs).items() if name in self._inputs})
        except RuntimeError:
            self._request = self._new_request()  # as a stream, it may fail for good with other inputs
            raise
        scored = sum(run.is_scored for run in runs)
        logits, top_ids, top_logits = (
            self._request.get_tensor(name).data[:scored] for name in ("logits", "top_ids", "top_logits")
        )
        return Scores(logits, top_ids, top_logits)

    def _new_request(self) -> "openvino.InferRequest":
        request = self._compiled.create_infer_request()
        for port, tensor in self._caches:
            request.set_tensor(port, tensor)
        return request


def _inputs(runs: Sequence[Run]) -> dict[str, NDArray[np.int64] | NDArray[np.int32]]:
    """The inputs of a paged graph for the runs of a step."""
    lengths = [len(run.token_ids) for run in runs]
    held = [-(-(run.past + length) // BLOCK_TOKENS) for run, length in zip(runs, lengths, strict=True)]
    ends = np.cumsum(lengths)
    # Of at least one, because not every kernel takes an axis of length 0.
    scored = [int(end) - 1 for end, run in zip(ends, runs, strict=True) if run.is_scored] or [0]
    return {
        "input_ids": np.concatenate([np.asarray(run.token_ids, np.int64) for run in runs]),
        "position_ids": np.concatenate(
            [np.arange(run.past, run.past + length) for run, length in zip(runs, lengths, strict=True)]
        ),
        "scored_rows": np.array(scored, np.int64),
        "max_context_len": np.array(
            max(run.past + length for run, length in zip(runs, lengths, strict=True)), np.int32
        ),
        "past_lens": np.array([run.past for run in runs], np.int32),
        "subsequence_begins": np.array([0, *ends], np.int32),
        "block_indices": np.concatenate(
            [np.asarray(run.blocks[:count], np.int32) for run, count in zip(runs, held, strict=True)]
        ),
        "block_indices_begins": np.array([0, *np.cumsum(held)], np.int32),
    }


def _add_top_tokens(graph: "openvino.Model") -> None:
    """Adds the best tokens of each row to the outputs."""
    logits = graph.output("logits").get_node().input_value(0)
    vocabulary = logits.get_partial_shape()[1].get_length()
    top = opset13.topk(
        logits,
        opset13.constant(np.int64(min(TOP_TOKENS, vocabulary))),
        axis=1,
        mode="max",
        sort="value",
        index_element_type="i32",
    )
    for index, name in enumerate(("top_logits", "top_ids")):
        result = opset13.result(top.output(index))
        result.output(0).get_tensor().set_names({name})
        top.output(index).get_tensor().set_names({name})
        graph.add_results([result])
    graph.validate_nodes_and_infer_types()
