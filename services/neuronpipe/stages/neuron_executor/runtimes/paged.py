"""A decoder on OpenVINO whose key-value caches are blocks: any rows of any sequences are computed in one step.

A bundle contains the stateful graph, because OpenVINO 2026.4 cannot read a paged graph that it has written. Loading
makes the graph paged. A graph that gathers the blocks itself (decoders.py) stays as it is.
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
    DecoderRun,
    TokenScores,
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

# Places of the attention's inputs, and the name under which a graph stores the windows of its layers. Source:
# PagedAttentionExtension in openvino/core/src/op/paged_attention.cpp.
_KEYS, _WINDOW = 3, 10
_WINDOWS = "neuronpipe_windows"
# Bytes of a cache line.
_CACHE_LINE = 64
# The inputs that locate the keys and values of runs.
_PLACES = ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "max_context_len")


class _OpenVinoStep:
    """The compiled graph of a step with its scores, and the graph of the encoder if the model has an encoder.

    `properties`: the properties with which they are compiled, see `computable`.
    """

    def __init__(
        self, model_file: Path, properties: Mapping[str, str], change: Callable[["openvino.Model"], None]
    ) -> None:
        """`change`: changes the graph before it is compiled. Raises SetupError if the graph cannot be loaded."""
        encoder_file = model_file.with_name(f"{ENCODER}.xml")
        try:
            graph = engine().read_model(model_file)
            change(graph)
            _add_scores(graph)
            # The threads wait for each other at each node. A thread that is pinned to a CPU which another process uses
            # keeps all of them waiting. Beside a process that took one of two CPUs, 32 texts got 470 tokens a second,
            # and without pins 600 to 750. On idle CPUs pins made no difference (2026-11-30).
            places = {"NUM_STREAMS": "1", "ENABLE_CPU_PINNING": "NO"}
            self.properties = {**computable(properties, [graph]), **places}
            self._compiled = engine().compile_model(graph, "CPU", self.properties)
            self._encoder = _encoder_request(encoder_file, self.properties) if encoder_file.exists() else None
        except RuntimeError as error:
            raise SetupError(
                f"{model_file}: OpenVINO {openvino.__version__} cannot load it; compile the model again with this "
                "version"
            ) from error

    def _hold(self, caches: Sequence[tuple[str, "openvino.Tensor"]]) -> None:
        """Sets the memory of the caches, by the names of inputs."""
        self._caches = caches
        self._request = self._new_request()
        # Kept because the request reads the inputs in their memory.
        self._inputs_in_use: Mapping[str, NDArray[Any]] = {}

    def _run(self, inputs: Mapping[str, NDArray[Any]]) -> TokenScores:
        self._inputs_in_use = inputs
        try:
            compute(self._request, inputs)
        except RuntimeError:
            self._request = self._new_request()  # like a stream, the old request may fail for ever with other inputs
            raise
        return TokenScores._make(self._request.get_tensor(name).data for name in TokenScores._fields)

    def _encode(self, token_ids: NDArray[np.int64]) -> NDArray[Any]:
        """Computes the cross keys and values of a source, [1, tokens]: [2 * layers, heads, tokens, width]."""
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
    """A decoder with OpenVINO's paged attention; see DecoderModel."""

    block_tokens = BLOCK_TOKENS
    part_tokens = PART_TOKENS
    scores_all = True

    def __init__(self, model_file: Path, properties: Mapping[str, str], max_tokens: int, max_bytes: int) -> None:
        """Allocates blocks for `max_tokens` tokens, or as many as fit into `max_bytes`.

        Raises SetupError if the graph cannot be loaded, or if fewer than two blocks fit.
        """
        source_caches: list[str] = []

        def make_paged(graph: "openvino.Model") -> None:
            paged_attention_transformation(graph)
            _use_windows(graph)
            source_caches.extend(_separate_sources(graph))

        super().__init__(model_file, properties, make_paged)
        self._inputs = {port.any_name for port in self._compiled.inputs}
        caches = [
            (port, [int(axis.get_length()) for axis in list(port.get_partial_shape())[1:]])
            for port in self._compiled.inputs
            if "_cache." in port.any_name and port.any_name not in source_caches
        ]
        block_bytes = sum(int(np.prod(shape)) * port.get_element_type().size for port, shape in caches)
        self.blocks = block_count(model_file, block_bytes, max_tokens, max_bytes)
        kind = caches[0][0].get_element_type()
        self._arrays = [_zeros((self.blocks, *shape), _stored_as(port.get_element_type())) for port, shape in caches]
        tensors = [openvino.Tensor(array, array.shape, kind) for array in self._arrays]
        names = [port.any_name for port, _ in caches]
        # A block holds either a part of a text or a part of a source, so one memory serves both.
        self._source_arrays = self._arrays if source_caches else []
        self._hold([*zip(names, tensors, strict=True), *zip(source_caches, tensors, strict=bool(source_caches))])

    def read(self, token_ids: Sequence[int], blocks: Sequence[int]) -> None:
        for array, computed in zip(self._source_arrays, self._encode(np.array([token_ids], np.int64)), strict=True):
            for number, block in enumerate(blocks):
                part = computed[:, number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
                array[block, :, : part.shape[1]] = part

    def copy(self, blocks: Sequence[tuple[int, int]]) -> None:
        for source, target in blocks:
            for array in self._arrays:
                array[target] = array[source]

    def compute(self, runs: Sequence[DecoderRun]) -> TokenScores:
        inputs = _inputs(runs) | (_source_inputs(runs, self._source_arrays) if self._source_arrays else {})
        scores = self._run({name: array for name, array in inputs.items() if name in self._inputs})
        return scores.at(slice(sum(run.scored for run in runs)))


class OpenVinoGraph(_OpenVinoStep):
    """See GatheringGraph. OpenVINO shares the cache, which is an array of NumPy."""

    def __init__(self, model_file: Path, properties: Mapping[str, str], max_tokens: int, max_bytes: int) -> None:
        """See PagedModel."""
        super().__init__(model_file, properties, lambda graph: None)
        parts, _, *axes = list(self._compiled.input("cache").get_partial_shape())
        shape = [int(axis.get_length()) for axis in (parts, *axes)]
        blocks = block_count(model_file, 4 * int(np.prod(shape)), max_tokens, max_bytes)
        self.cache: Any = _zeros((shape[0], blocks, *shape[1:]), np.float32)
        self._hold([("cache", openvino.Tensor(self.cache, shared_memory=True))])

    def step(self, inputs: dict[str, NDArray[np.int64]]) -> tuple[TokenScores, Any]:
        return self._run(inputs), self._request.get_tensor("new").data

    def read(self, token_ids: NDArray[np.int64]) -> Any:
        return self._encode(token_ids)


def _zeros(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """Makes zeros that begin at a cache line.

    NumPy's arrays begin 16 bytes later, and a step took 2 to 4 % longer with them. The zeros are written here so that
    the system assigns the memory now. Otherwise the first steps that use a block would wait for it.
    """
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.empty(size + _CACHE_LINE, np.uint8)
    memory.fill(0)
    begin = -memory.ctypes.data % _CACHE_LINE
    aligned: NDArray[Any] = memory[begin : begin + size].view(dtype)
    return aligned.reshape(shape)


def _stored_as(kind: "openvino.Type") -> Any:
    """Returns NumPy's dtype for a cache. NumPy has no bfloat16."""
    return np.uint16 if kind == openvino.Type.bf16 else kind.to_dtype()


def _encoder_request(file: Path, properties: Mapping[str, str]) -> "openvino.InferRequest":
    """Makes a request of an encoder's graph.

    In OpenVINO 2026.4, a request whose first source has a single token computes all longer sources wrongly.
    """
    request = engine().compile_model(file, "CPU", properties).create_infer_request()
    request.infer({0: np.zeros((1, BLOCK_TOKENS), np.int64)})
    return request


def _inputs(runs: Sequence[DecoderRun]) -> dict[str, NDArray[np.int64] | NDArray[np.int32]]:
    """Makes the inputs of a paged graph for the runs of a step."""
    # Collected in lists: an array for the single token of each text would take longer.
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
        # At least one row, because not every kernel accepts an axis of length 0.
        "scored_rows": np.array(scored or [0], np.int64),
        "max_context_len": np.array(longest, np.int32),
        "past_lens": np.array([run.past for run in runs], np.int32),
        "subsequence_begins": np.array(begins, np.int32),
        "block_indices": np.array(blocks, np.int32),
        "block_indices_begins": np.array(block_begins, np.int32),
    }


def _source_inputs(runs: Sequence[DecoderRun], arrays: Sequence[NDArray[np.float32]]) -> dict[str, NDArray[Any]]:
    """Makes the further inputs of a graph with sources.

    For its attention to sources each token is a sequence of its own, whose past is the source without its last token.
    The token brings the key and value of that last token, which are then written to their place again.
    """
    rows = [run for run in runs for _ in run.token_ids]
    tokens = np.array([run.source_tokens for run in rows], np.int32)
    blocks = [np.asarray(run.source_blocks, np.int32) for run in rows]
    last = np.array([source_blocks[-1] for source_blocks in blocks]), (tokens - 1) % BLOCK_TOKENS
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
    """Gives the attention to sources its own inputs. Returns the names of its caches, keys and values alternating."""
    inputs = {name: opset13.parameter([] if name == _PLACES[-1] else [-1], np.int32) for name in _PLACES}
    caches: list[str] = []
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "PagedAttentionExtension" or not _is_of_source(node):
            continue
        for port in node.inputs():
            source = port.get_source_output()
            name = source.any_name if source.get_node().get_type_name() == "Parameter" else ""
            if name in inputs:
                port.replace_source_output(inputs[name].output(0))
            elif "_cache." in name:
                caches.append(name)
    if caches:
        for name, parameter in inputs.items():
            parameter.output(0).get_tensor().set_names({f"source_{name}"})
        graph.add_parameters([*inputs.values()])
        graph.validate_nodes_and_infer_types()
    return caches


def _is_of_source(attention: "openvino.Node") -> bool:
    """Returns whether the keys of an attention come from the input source_last."""
    node = attention.input_value(1).get_node()
    while node.get_input_size():
        node = node.input_value(0).get_node()
    return bool(node.get_type_name() == "Parameter" and "source_last" in node.output(0).names)


def _add_scores(graph: "openvino.Model") -> None:
    """Adds the outputs of TokenScores other than the logits."""
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
    row_axis = opset13.constant(np.array([1], np.int64))
    best = opset13.reduce_max(logits, row_axis, keep_dims=True)
    sums = opset13.reduce_sum(opset13.exp(opset13.subtract(logits, best)), row_axis)
    added = {"top_logits": top.output(0), "top_ids": top.output(1), "log_sums": opset13.log(sums).output(0)}
    for name, output in added.items():
        result = opset13.result(output)
        result.output(0).get_tensor().set_names({name})
        output.get_tensor().set_names({name})
        graph.add_results([result])
    graph.validate_nodes_and_infer_types()
