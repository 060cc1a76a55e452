"""A decoder on OpenVINO whose key-value caches are blocks: any rows of any sequences are computed in one step.

A bundle holds the stateful graph, because OpenVINO 2026.4 cannot read a paged one that it has written. The graph
becomes a paged one here, when it is loaded. A graph that gathers the blocks itself (decoders.py) runs as it is.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.decoder import (
    BLOCK_TOKENS,
    ENCODER,
    PART_TOKENS,
    TOP_TOKENS,
    Run,
    Scores,
    block_count,
)
from neuronpipe.stages.neuron_executor.runtimes.openvino import (
    computable,
    compute,
    engine,
    openvino,
    opset13,
    paged_attention_transformation,
)

# Inputs of the attention, and the name under which a graph says what the windows of its layers are. Source:
# PagedAttentionExtension in openvino/core/src/op/paged_attention.cpp.
_KEYS, _WINDOW = 3, 10
_WINDOWS = "neuronpipe_windows"
# In bytes.
_CACHE_LINE = 64
# The inputs that say where the keys and values of runs are.
_PLACES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "max_context_len")


class _OpenVinoStep:
    """The compiled graph of a step, with its scores, and that of the encoder beside it, if the model has one."""

    def __init__(
        self, model_file: Path, properties: Mapping[str, str], change: Callable[["openvino.Model"], None]
    ) -> None:
        """`change`: is applied to the graph before it is compiled. Raises SetupError for one that cannot be loaded."""
        own = {**computable(properties), "NUM_STREAMS": "1"}
        encoder_file = model_file.with_name(f"{ENCODER}.xml")
        try:
            graph = engine().read_model(model_file)
            change(graph)
            _add_scores(graph)
            self._compiled = engine().compile_model(graph, "CPU", own)
            self._encoder = _encoder_request(encoder_file, own) if encoder_file.exists() else None
        except RuntimeError as error:
            raise SetupError(
                f"{model_file}: OpenVINO {openvino.__version__} cannot load it; compile the model again with this "
                "version"
            ) from error

    def _hold(self, caches: Sequence[tuple[str, "openvino.Tensor"]]) -> None:
        """Sets the memory of the caches, by the names of inputs."""
        self._caches = caches
        self._request = self._new_request()
        # The request's inputs are in their memory.
        self._given: Mapping[str, NDArray[Any]] = {}

    def _run(self, inputs: Mapping[str, NDArray[Any]]) -> Scores:
        self._given = inputs
        try:
            compute(self._request, inputs)
        except RuntimeError:
            self._request = self._new_request()  # as a stream, it may fail for good with other inputs
            raise
        return Scores._make(self._request.get_tensor(name).data for name in Scores._fields)

    def _encode(self, token_ids: NDArray[np.int64]) -> NDArray[Any]:
        """The cross keys and values of a source, [1, tokens]: [2 * layers, heads, tokens, width]."""
        if self._encoder is None:
            raise RuntimeError("the model has no encoder")
        self._encoder.infer({0: token_ids})
        computed: NDArray[Any] = self._encoder.get_output_tensor(0).data
        return computed

    def _new_request(self) -> "openvino.InferRequest":
        request = self._compiled.create_infer_request()
        for name, tensor in self._caches:
            request.set_tensor(name, tensor)
        return request


class PagedModel(_OpenVinoStep):
    """See DecoderModel."""

    block_tokens = BLOCK_TOKENS
    part_tokens = PART_TOKENS
    scores_all = True

    def __init__(self, model_file: Path, properties: Mapping[str, str], max_tokens: int, max_bytes: int) -> None:
        """Allocates blocks for `max_tokens` tokens, or as many as fit into `max_bytes`.

        Raises SetupError for a graph that cannot be loaded, and if not even two blocks fit.
        """
        of_sources: list[str] = []

        def make_paged(graph: "openvino.Model") -> None:
            paged_attention_transformation(graph)
            _use_windows(graph)
            of_sources.extend(_separate_sources(graph))

        super().__init__(model_file, properties, make_paged)
        self._inputs = {port.any_name for port in self._compiled.inputs}
        held = [
            (port, [int(axis.get_length()) for axis in list(port.get_partial_shape())[1:]])
            for port in self._compiled.inputs
            if "_cache." in port.any_name and port.any_name not in of_sources
        ]
        block_bytes = sum(int(np.prod(shape)) * port.get_element_type().size for port, shape in held)
        self.blocks = block_count(model_file, block_bytes, max_tokens, max_bytes)
        kind = held[0][0].get_element_type()
        self._arrays = [_zeros((self.blocks, *shape), _stored_as(port.get_element_type())) for port, shape in held]
        tensors = [openvino.Tensor(array, array.shape, kind) for array in self._arrays]
        names = [port.any_name for port, _ in held]
        # A block holds either a part of a text or a part of a source, so one memory serves both.
        self._source_arrays = self._arrays if of_sources else []
        self._hold([*zip(names, tensors, strict=True), *zip(of_sources, tensors, strict=bool(of_sources))])

    def read(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        """See DecoderModel."""
        for array, found in zip(self._source_arrays, self._encode(np.array([token_ids], np.int64)), strict=True):
            for number, block in enumerate(blocks):
                part = found[:, number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
                array[block, :, : part.shape[1]] = part

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        """See DecoderModel."""
        for source, target in blocks:
            for array in self._arrays:
                array[target] = array[source]

    def compute(self, runs: Sequence[Run]) -> Scores:
        """See DecoderModel."""
        inputs = _inputs(runs) | (_source_inputs(runs, self._source_arrays) if self._source_arrays else {})
        scores = self._run({name: array for name, array in inputs.items() if name in self._inputs})
        return scores.at(slice(sum(run.scored for run in runs)))


class OpenVinoGraph(_OpenVinoStep):
    """See GatheringGraph. The cache is NumPy's, and shared with OpenVINO."""

    def __init__(self, model_file: Path, properties: Mapping[str, str], max_tokens: int, max_bytes: int) -> None:
        """See PagedModel."""
        super().__init__(model_file, properties, lambda graph: None)
        parts, _, *others = list(self._compiled.input("cache").get_partial_shape())
        shape = [int(axis.get_length()) for axis in (parts, *others)]
        blocks = block_count(model_file, 4 * int(np.prod(shape)), max_tokens, max_bytes)
        self.cache: Any = _zeros((shape[0], blocks, *shape[1:]), np.float32)
        self._hold([("cache", openvino.Tensor(self.cache, shared_memory=True))])

    def step(self, inputs: dict[str, NDArray[np.int64]]) -> tuple[Scores, Any]:
        """See GatheringGraph."""
        return self._run(inputs), self._request.get_tensor("new").data

    def read(self, token_ids: NDArray[np.int64]) -> Any:
        """See GatheringGraph."""
        return self._encode(token_ids)


def _zeros(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Zeros from the begin of a cache line on. NumPy's begin 16 bytes later, with which a step took 2 to 4 % longer.

    They are written here, and the memory is taken: else the steps that first use a block would wait for it.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + _CACHE_LINE, np.uint8)
    memory.fill(0)
    begin = -memory.ctypes.data % _CACHE_LINE
    aligned: NDArray[Any] = memory[begin : begin + size].view(dtype)
    return aligned.reshape(shape)


def _stored_as(kind: "openvino.Type") -> Any:
    """NumPy's dtype of a cache; it has no bfloat16."""
    return np.uint16 if kind == openvino.Type.bf16 else kind.to_dtype()


def _encoder_request(file: Path, properties: Mapping[str, str]) -> "openvino.InferRequest":
    """A request of an encoder's graph.

    In OpenVINO 2026.4, a request whose first source has a single token computes all longer ones wrongly.
    """
    request = engine().compile_model(file, "CPU", properties).create_infer_request()
    request.infer({0: np.zeros((1, BLOCK_TOKENS), np.int64)})
    return request


def _inputs(runs: Sequence[Run]) -> dict[str, NDArray[np.int64] | NDArray[np.int32]]:
    """The inputs of a paged graph for the runs of a step."""
    # Of lists: for the single tokens of many texts, an array of each would take longer.
    token_ids: list[int] = []
    positions: list[int] = []
    blocks: list[int] = []
    scored: list[int] = []
    begins, block_begins, longest = [0], [0], 0
    for run in runs:
        end = run.past + len(run.token_ids)
        token_ids += run.token_ids
        positions += range(run.past, end)
        blocks += run.blocks[: -(-end // BLOCK_TOKENS)]
        begins.append(len(token_ids))
        block_begins.append(len(blocks))
        longest = max(longest, end)
        scored += range(len(token_ids) - run.scored, len(token_ids))
    return {
        "input_ids": np.array(token_ids, np.int64),
        "position_ids": np.array(positions, np.int64),
        # Of at least one, because not every kernel takes an axis of length 0.
        "scored_rows": np.array(scored or [0], np.int64),
        "max_context_len": np.array(longest, np.int32),
        "past_lens": np.array([run.past for run in runs], np.int32),
        "subsequence_begins": np.array(begins, np.int32),
        "block_indices": np.array(blocks, np.int32),
        "block_indices_begins": np.array(block_begins, np.int32),
    }


def _source_inputs(runs: Sequence[Run], arrays: Sequence[NDArray[np.float32]]) -> dict[str, NDArray[Any]]:
    """The further inputs of a graph with sources.

    For its attention to sources each token is a sequence of its own, whose past is the source but for the last token.
    It brings what that has, which is then written to its place again.
    """
    rows = [run for run in runs for _ in run.token_ids]
    tokens = np.array([run.source_tokens for run in rows], np.int32)
    blocks = [np.asarray(run.source_blocks, np.int32) for run in rows]
    last = np.array([held[-1] for held in blocks]), (tokens - 1) % BLOCK_TOKENS
    return {
        "source_last": np.stack([array[last[0], :, last[1]] for array in arrays], axis=1),
        "source_past_lens": tokens - 1,
        "source_subsequence_begins": np.arange(len(rows) + 1, dtype=np.int32),
        "source_block_indices": np.concatenate(blocks),
        "source_block_indices_begins": np.cumsum([0, *map(len, blocks)], dtype=np.int32),
        "source_max_context_len": np.array(tokens.max(), np.int32),
    }


def set_windows(graph: "openvino.Model", windows: Sequence[int]) -> None:
    """Writes to a stateful graph how many tokens each layer sees; 0: all. `PagedModel` reads it."""
    graph.set_rt_info(" ".join(map(str, windows)), [_WINDOWS])


def _use_windows(graph: "openvino.Model") -> None:
    """Gives the attention of each layer its window, which the transformation does not find in the masks."""
    if not graph.has_rt_info([_WINDOWS]):
        return
    windows = [int(window) for window in graph.get_rt_info([_WINDOWS]).astype(str).split()]
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "PagedAttentionExtension":
            continue
        name = next(name for name in node.input_value(_KEYS).names if name.startswith("key_cache."))
        layer = int(name.removeprefix("key_cache."))
        node.input(_WINDOW).replace_source_output(opset13.constant(np.int32(windows[layer])).output(0))


def _separate_sources(graph: "openvino.Model") -> list[str]:
    """Gives attention to sources inputs of its own. Returns the names of its caches, keys and values in turns."""
    own = {name: opset13.parameter([] if name == _PLACES[-1] else [-1], np.int32) for name in _PLACES}
    caches: list[str] = []
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "PagedAttentionExtension" or not _is_of_source(node):
            continue
        for port in node.inputs():
            given = port.get_source_output()
            name = given.any_name if given.get_node().get_type_name() == "Parameter" else ""
            if name in own:
                port.replace_source_output(own[name].output(0))
            elif "_cache." in name:
                caches.append(name)
    if caches:
        for name, parameter in own.items():
            parameter.output(0).get_tensor().set_names({f"source_{name}"})
        graph.add_parameters([*own.values()])
        graph.validate_nodes_and_infer_types()
    return caches


def _is_of_source(attention: "openvino.Node") -> bool:
    """Whether the keys of an attention come from the input source_last."""
    node = attention.input_value(1).get_node()
    while node.get_input_size():
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Parameter" and "source_last" in node.output(0).names)


def _add_scores(graph: "openvino.Model") -> None:
    """Adds to the outputs what Scores has beside the logits."""
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
    of_row = opset13.constant(np.array([1], np.int64))
    best = opset13.reduce_max(logits, of_row, keep_dims=True)
    sums = opset13.reduce_sum(opset13.exp(opset13.subtract(logits, best)), of_row)
    added = {"top_logits": top.output(0), "top_ids": top.output(1), "log_sums": opset13.log(sums).output(0)}
    for name, output in added.items():
        result = opset13.result(output)
        result.output(0).get_tensor().set_names({name})
        output.get_tensor().set_names({name})
        graph.add_results([result])
    graph.validate_nodes_and_infer_types()
