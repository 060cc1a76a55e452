"""Compiles a decoder for OpenVINO: a stateful graph, compared with transformers' `generate` as it will run.

The executor makes the graph a paged one when it loads it. That transformation leaves out silently what it does not know
(position biases, sliding windows), so a bundle is only written if every token is the one that `generate` chooses.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache, DynamicLayer

from neuronpipe.bundles.compiler.modules import SourceModule, pretrained_model
from neuronpipe.bundles.compiler.samples import sample_prompts
from neuronpipe.bundles.manifest import Accuracy, Artifact
from neuronpipe.core.errors import SetupError
from neuronpipe.runtimes.decoder import Run
from neuronpipe.runtimes.openvino import apply_make_stateful_transformation, openvino, opset13
from neuronpipe.runtimes.paged import PagedModel

MODEL_FILE = "artifacts/openvino/model.xml"
_WEIGHTS_FILE = "artifacts/openvino/model.bin"
# A cache in 8 bits is a default on some CPUs: 6 of 24 texts were then the same (measured 2026-11-22).
_PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}

_PROMPT_WORDS = (1, 3, 8, 20, 50, 120)
_NEW_TOKENS = 24
# Prompts are computed in parts of so many tokens, as the executor does with long ones.
_PART_TOKENS = 24
# Of two tokens whose logits differ by less than this share of the largest logit, float32 may choose either.
_TIE = 1e-5
# The largest difference of a logit, as a share of the largest one.
_MOST_DIFFERENCE = 1e-3

# Heads, width of the keys and of the values of each layer.
_Shapes = Sequence[tuple[int, int, int]]


class _Step(torch.nn.Module):
    """A decoder as a function of its tokens and its cache, with scores for some rows only.

    In the stateful graph a row is a sequence. In the paged one it is a token, so that `scored_rows`, int64 [scored],
    chooses the tokens of which logits are computed.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        beam_idx: torch.Tensor,
        scored_rows: torch.Tensor,
        *past: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        cache = DynamicCache()
        for keys, values in zip(past[::2], past[1::2], strict=True):
            layer = DynamicLayer()
            layer.keys, layer.values = keys.index_select(0, beam_idx), values.index_select(0, beam_idx)
            layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
            cache.layers.append(layer)
        # A mask of four dimensions is taken as it is; transformers' own cannot be traced.
        total, new = attention_mask.shape[1], input_ids.shape[1]
        is_before = torch.arange(total)[None, :] <= (total - new + torch.arange(new))[:, None]
        is_seen = is_before[None, None] & attention_mask[:, None, None, :].bool()
        mask: Any = torch.where(is_seen, 0.0, torch.finfo(torch.float32).min)
        kinds = set(getattr(self.model.config, "layer_types", None) or ())
        if len(kinds) > 1:
            mask = dict.fromkeys(kinds, mask)

        def choose(module: torch.nn.Module, args: Any, output: Any) -> Any:
            output["last_hidden_state"] = output["last_hidden_state"].index_select(0, scored_rows)
            return output

        handle = self.model.base_model.register_forward_hook(choose)
        try:
            result = self.model(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
            )
        finally:
            handle.remove()
        return (result["logits"][:, -1], *(array for layer in cache.layers for array in (layer.keys, layer.values)))


def convert(module: SourceModule, folder: Path) -> Artifact:
    """Writes the stateful graph into a bundle's folder and describes it. Raises SetupError."""
    model = pretrained_model(module.module)
    try:
        model.set_attn_implementation("sdpa")
        shapes = _cache_shapes(model)
        graph = _traced(model, shapes)
        _make_stateful(graph, shapes)
    except Exception as error:  # the tracer, the model's own code and OpenVINO raise different exceptions
        raise SetupError(
            f"{module.architecture} cannot be compiled for text generation: OpenVINO {openvino.__version__} finds no "
            "attention in it that can have a cache in blocks"
        ) from error
    (folder / MODEL_FILE).parent.mkdir(parents=True)
    openvino.save_model(graph, folder / MODEL_FILE, compress_to_fp16=False)
    return Artifact(
        backend="openvino",
        dtype="float32",
        files=(MODEL_FILE, _WEIGHTS_FILE),
        properties=_PROPERTIES,
        versions={
            "openvino": openvino.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )


def _cache_shapes(model: Any) -> _Shapes:
    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.tensor([[0, 0]]), past_key_values=cache, use_cache=True)
    return [(one.keys.shape[1], one.keys.shape[3], one.values.shape[3]) for one in cache.layers]


def _traced(model: Any, shapes: _Shapes) -> Any:
    """The graph whose inputs and outputs are the cache, too, by name."""
    rows, before, new = 2, 3, 2
    past = [torch.randn(rows, heads, before, width) for heads, *widths in shapes for width in widths]
    example = (
        torch.zeros(rows, new, dtype=torch.int64),
        torch.ones(rows, before + new, dtype=torch.int64),
        torch.arange(before, before + new).expand(rows, new).contiguous(),
        torch.arange(rows),
        torch.arange(rows),
        *past,
    )
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")  # of every Python value that the tracer treats as constant, as in openvino.py
        graph = openvino.convert_model(_Step(model).eval(), example_input=example)
    free = {"input_ids": [-1, -1], "attention_mask": [-1, -1], "position_ids": [-1, -1], "beam_idx": [-1]}
    inputs: dict[str, tuple[list[int], Any]] = {
        name: (shape, openvino.Type.i64) for name, shape in (free | {"scored_rows": [-1]}).items()
    }
    for name, (heads, width) in zip(
        _state_names("past", shapes), [(heads, width) for heads, *widths in shapes for width in widths], strict=True
    ):
        inputs[name] = ([-1, heads, -1, width], openvino.Type.f32)
    for port, (name, (shape, kind)) in zip(graph.inputs, inputs.items(), strict=True):
        port.get_tensor().set_names({name})
        port.get_node().set_partial_shape(openvino.PartialShape(shape))
        port.get_node().set_element_type(kind)
    for port, name in zip(graph.outputs, ["logits", *_state_names("present", shapes)], strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    return graph


def _state_names(word: str, shapes: _Shapes) -> list[str]:
    return [f"{word}.{layer}.{kind}" for layer in range(len(shapes)) for kind in ("key", "value")]


def _make_stateful(graph: Any, shapes: _Shapes) -> None:
    """Keeps the cache inside the graph, empty at first. The paged transformation looks for such a begin."""
    apply_make_stateful_transformation(
        graph, dict(zip(_state_names("past", shapes), _state_names("present", shapes), strict=True))
    )
    rows = opset13.gather(
        opset13.shape_of(graph.input("input_ids"), output_type="i64"), opset13.constant([0]), opset13.constant(0)
    )
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            axes = [
                opset13.constant(np.array([axis.min_length])) for axis in list(node.get_output_partial_shape(0))[1:]
            ]
            empty = opset13.broadcast(opset13.constant(np.float32(0)), opset13.concat([rows, *axes], axis=0))
            node.set_arguments([empty])
    graph.validate_nodes_and_infer_types()


def compare(module: SourceModule, artifact: Artifact, folder: Path) -> Accuracy:
    """Compares the tokens after sample prompts with those of `generate`, greedy, and the logits.

    Raises SetupError for a difference that is not a tie.
    """
    prompts = [ids[: module.max_tokens - _NEW_TOKENS - 1] for ids in sample_prompts(module, _PROMPT_WORDS)]
    new_tokens = max(1, min(_NEW_TOKENS, module.max_tokens - max(map(len, prompts)) - 1))
    expected = [_reference(module, ids, new_tokens) for ids in prompts]
    blocks_tokens = sum(len(ids) + new_tokens + 32 for ids in prompts)
    model = PagedModel(folder / MODEL_FILE, artifact.properties, blocks_tokens, 1 << 40)
    found = _forced(model, prompts, [tokens for tokens, _ in expected])
    largest = max(float(np.abs(logits).max()) for _, logits in expected)
    difference = max(float(np.abs(one - logits).max()) for one, (_, logits) in zip(found, expected, strict=True))
    same = total = 0
    for logits, (tokens, reference) in zip(found, expected, strict=True):
        chosen = logits.argmax(axis=1)
        gaps = reference[np.arange(len(tokens)), tokens] - reference[np.arange(len(tokens)), chosen]
        same += int(np.count_nonzero((chosen == tokens) | (gaps <= _TIE * largest)))
        total += len(tokens)
    if same < total or not difference <= _MOST_DIFFERENCE * largest:
        raise SetupError(
            f"{module.architecture} cannot be compiled for text generation: with a cache in blocks, {total - same} of "
            f"{total} tokens differ from transformers' generate, and logits by up to {difference:.2e}"
        )
    return Accuracy(
        samples=len(prompts),
        sample_texts="built-in sample text",
        sample_shapes=tuple((1, len(ids) + new_tokens) for ids in prompts),
        largest_output=largest,
        largest_difference=difference,
        computed_dtype="float32",
        agreement=same / total,
    )


def _reference(module: SourceModule, prompt: Sequence[int], new_tokens: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The tokens that `generate` adds, and their logits, [tokens, vocabulary]."""
    model = pretrained_model(module.module)
    config = transformers.GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
    )
    own, model.generation_config = model.generation_config, config  # or the model's own values fill what is not set
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ids = torch.tensor([list(prompt)])
            result = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    finally:
        model.generation_config = own
    logits = torch.cat(result.logits).float().numpy()
    return result.sequences[0, len(prompt) :].numpy(), logits


def _forced(
    model: PagedModel, prompts: Sequence[Sequence[int]], tokens: Sequence[NDArray[np.int64]]
) -> list[NDArray[np.float32]]:
    """The logits of each of the given tokens after its prompt, [tokens, vocabulary]. All sequences share the steps."""
    whole = [[*prompt, *chosen[:-1].tolist()] for prompt, chosen in zip(prompts, tokens, strict=True)]
    counts = [-(-len(ids) // model.block_tokens) for ids in whole]
    firsts = np.cumsum([0, *counts])
    blocks = [list(range(first + count - 1, first - 1, -1)) for first, count in zip(firsts, counts, strict=False)]
    done, found = [0] * len(whole), [[] for _ in whole]  # type: list[int], list[list[NDArray[np.float32]]]
    while any(count < len(ids) for count, ids in zip(done, whole, strict=True)):
        runs, rows = [], []
        for row, ids in enumerate(whole):
            if done[row] == len(ids):
                continue
            in_prompt = len(prompts[row]) - done[row]
            part = ids[done[row] : done[row] + (min(_PART_TOKENS, in_prompt) if in_prompt > 0 else 1)]
            runs.append(Run(part, done[row], blocks[row], is_scored=done[row] + len(part) >= len(prompts[row])))
            rows.append(row)
            done[row] += len(part)
        scores = iter(model.compute(runs).logits.copy())
        for row, run in zip(rows, runs, strict=True):
            if run.is_scored:
                found[row].append(next(scores))
    return [np.stack(rows) for rows in found]
