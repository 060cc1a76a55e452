"""Compiles a model that generates for OpenVINO: stateful graphs, compared with transformers' `generate` as it will run.

The executor makes the graph a paged one when it loads it. That transformation leaves out silently what it does not know
(position biases, sliding windows), so a bundle is only written if every token is the one that `generate` chooses.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.cache_utils import DynamicCache

from neuronpipe.bundles.compiler import encoder_decoders
from neuronpipe.bundles.compiler.modules import SourceModule, pretrained_model
from neuronpipe.bundles.compiler.samples import sample_prompts
from neuronpipe.bundles.compiler.stateful import arrays_of, cache_of, causal_mask, shapes_of, traced
from neuronpipe.bundles.manifest import Accuracy, Artifact
from neuronpipe.core.errors import SetupError
from neuronpipe.runtimes.decoder import Run
from neuronpipe.runtimes.openvino import openvino
from neuronpipe.runtimes.paged import MODEL, PagedModel

_FOLDER = "artifacts/openvino"
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
        cache = cache_of([array.index_select(0, beam_idx) for array in past])
        mask: Any = causal_mask(attention_mask, input_ids.shape[1])
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
        return (result["logits"][:, -1], *arrays_of(cache))


def convert(module: SourceModule, folder: Path) -> Artifact:
    """Writes the graphs into a bundle's folder and describes them. Raises SetupError."""
    model = pretrained_model(module.module)
    try:
        model.set_attn_implementation("sdpa")
        graphs = encoder_decoders.graphs(model) if model.config.is_encoder_decoder else {MODEL: _graph(model)}
    except Exception as error:  # the tracer, the model's own code and OpenVINO raise different exceptions
        raise SetupError(
            f"{module.architecture} cannot be compiled for {_shown(module)}: OpenVINO {openvino.__version__} finds no "
            "attention in it that can have a cache in blocks"
        ) from error
    (folder / _FOLDER).mkdir(parents=True)
    for name, graph in graphs.items():
        openvino.save_model(graph, folder / _FOLDER / f"{name}.xml", compress_to_fp16=False)
    return Artifact(
        backend="openvino",
        dtype="float32",
        files=tuple(f"{_FOLDER}/{name}.{kind}" for name in graphs for kind in ("xml", "bin")),
        properties=_PROPERTIES,
        versions={
            "openvino": openvino.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    )


def _graph(model: Any) -> Any:
    cache = DynamicCache()
    with torch.inference_mode():
        model(input_ids=torch.tensor([[0, 0]]), past_key_values=cache, use_cache=True)
    return traced(_Step(model), shapes_of(cache))


def _shown(module: SourceModule) -> str:
    return module.task.replace("_", " ")


def compare(module: SourceModule, artifact: Artifact, folder: Path) -> Accuracy:
    """Compares the tokens after sample prompts with those of `generate`, greedy, and the logits.

    Raises SetupError for a difference that is not a tie.
    """
    start = list(module.fact("decoder_start_token_ids"))
    most = module.max_tokens if start else module.max_tokens - _NEW_TOKENS - 1
    inputs = [ids[:most] for ids in sample_prompts(module, _PROMPT_WORDS)]
    room = module.fact("max_text_tokens") or module.max_tokens - max(map(len, inputs)) - 1
    new_tokens = max(1, min(_NEW_TOKENS, room))
    expected = [_reference(module, ids, start, new_tokens) for ids in inputs]
    blocks_tokens = sum(len(ids) + new_tokens + 96 for ids in inputs)
    model = PagedModel(folder / artifact.files[0], artifact.properties, blocks_tokens, 1 << 40)
    texts = [
        _Text(start or ids, ids if start else [], tokens) for ids, (tokens, _) in zip(inputs, expected, strict=True)
    ]
    found = _forced(model, texts)
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
            f"{module.architecture} cannot be compiled for {_shown(module)}: with a cache in blocks, {total - same} of "
            f"{total} tokens differ from transformers' generate, and logits by up to {difference:.2e}"
        )
    return Accuracy(
        samples=len(inputs),
        sample_texts="built-in sample text",
        sample_shapes=tuple((1, len(ids) + new_tokens) for ids in inputs),
        largest_output=largest,
        largest_difference=difference,
        computed_dtype="float32",
        agreement=same / total,
    )


@dataclass(frozen=True, slots=True)
class _Text:
    """A text to compute: the tokens before it, its source if it has one, and its tokens."""

    prompt: Sequence[int]
    source: Sequence[int]
    tokens: NDArray[np.int64]


def _reference(
    module: SourceModule, ids: Sequence[int], start: Sequence[int], new_tokens: int
) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """The tokens that `generate` adds, and their logits, [tokens, vocabulary]."""
    model = pretrained_model(module.module)
    config = transformers.GenerationConfig(
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        do_sample=False,
        num_beams=1,
        eos_token_id=None,
        pad_token_id=0,
        decoder_start_token_id=start[0] if start else None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    own, model.generation_config = model.generation_config, config  # or the model's own values fill what is not set
    try:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = torch.tensor([list(ids)])
            result = model.generate(given, attention_mask=torch.ones_like(given), generation_config=config)
    finally:
        model.generation_config = own
    logits = torch.cat(result.logits).float().numpy()
    return result.sequences[0, -len(logits) :].numpy(), logits


def _forced(model: PagedModel, texts: Sequence[_Text]) -> list[NDArray[np.float32]]:
    """The logits of each token of each text, [tokens, vocabulary]. All texts share the steps."""
    size = model.block_tokens
    whole = [[*text.prompt, *text.tokens[:-1].tolist()] for text in texts]
    counts = [-(-len(ids) // size) for ids in [*whole, *(text.source for text in texts)]]
    firsts = np.cumsum([0, *counts])
    blocks = [list(range(first + count - 1, first - 1, -1)) for first, count in zip(firsts, counts, strict=False)]
    sources = blocks[len(texts) :]
    for text, held in zip(texts, sources, strict=True):
        if held:
            model.read(text.source, held)
    done, found = [0] * len(whole), [[] for _ in whole]  # type: list[int], list[list[NDArray[np.float32]]]
    while any(count < len(ids) for count, ids in zip(done, whole, strict=True)):
        runs, rows = [], []
        for row, (ids, text) in enumerate(zip(whole, texts, strict=True)):
            if done[row] == len(ids):
                continue
            in_prompt = len(text.prompt) - done[row]
            part = ids[done[row] : done[row] + (min(_PART_TOKENS, in_prompt) if in_prompt > 0 else 1)]
            is_scored = done[row] + len(part) >= len(text.prompt)
            runs.append(Run(part, done[row], blocks[row], is_scored, len(text.source), sources[row]))
            rows.append(row)
            done[row] += len(part)
        scores = iter(model.compute(runs).logits.copy())
        for row, run in zip(rows, runs, strict=True):
            if run.is_scored:
                found[row].append(next(scores))
    return [np.stack(rows) for rows in found]
