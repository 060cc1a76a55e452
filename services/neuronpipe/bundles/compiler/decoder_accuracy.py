"""Compares a compiled model that generates with transformers' `generate`, by the code that serves."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from neuronpipe.bundles.compiler import accuracy
from neuronpipe.bundles.compiler.modules import SourceModule, pretrained_model
from neuronpipe.bundles.compiler.samples import sample_prompts
from neuronpipe.bundles.manifest import Accuracy, Artifact
from neuronpipe.core.errors import SetupError
from neuronpipe.runtimes.decoder import DecoderModel, Run
from neuronpipe.runtimes.openvino import has_bfloat16

_PROMPT_WORDS = (1, 3, 8, 20, 50, 120)
_NEW_TOKENS = 24
# Prompts are computed in parts of so many tokens, as the executor does with long ones.
_PART_TOKENS = 24
# Of two tokens whose logits differ by less than this share of the largest logit, float32 may choose either.
_TIE = 1e-5
# The largest difference of a logit, as a share of the largest one.
_MOST_DIFFERENCE = 1e-3
# The least share of the same tokens in a data type other than float32, where nothing else is asked for.
_LEAST_AGREEMENT = 0.9


def compare(
    module: SourceModule, artifact: Artifact, load: Callable[[int], DecoderModel], min_agreement: float | None
) -> Accuracy:
    """Compares the tokens after sample prompts with those of `generate` in float32, greedy, and the logits.

    `load`: gives the model, with a cache for so many tokens, or for fewer if it is fixed.
    Raises SetupError for a difference that is not a tie in float32; in others if less than `min_agreement` of the
    tokens are the same, each after those of `generate` (default: _LEAST_AGREEMENT).
    """
    start = list(module.fact("decoder_start_token_ids"))
    most = module.max_tokens if start else module.max_tokens - _NEW_TOKENS - 1
    inputs = [ids[:most] for ids in sample_prompts(module, _PROMPT_WORDS)]
    room = module.fact("max_text_tokens") or module.max_tokens - max(map(len, inputs)) - 1
    new_tokens = max(1, min(_NEW_TOKENS, room))
    expected = [_reference(module, ids, start, new_tokens) for ids in inputs]
    blocks_tokens = sum(len(ids) + new_tokens + 96 for ids in inputs)
    model = load(blocks_tokens)
    texts = [
        _Text(start or ids, ids if start else [], tokens) for ids, (tokens, _) in zip(inputs, expected, strict=True)
    ]
    found = [logits for group in _groups(model, texts) for logits in _forced(model, group)]
    largest = max(float(np.abs(logits).max()) for _, logits in expected)
    difference = _difference(found, expected)
    agreement, tokens = _agreement(found, expected, largest)
    if artifact.dtype == "float32" and (agreement < 1 or not difference <= _MOST_DIFFERENCE * largest):
        raise SetupError(
            f"{module.architecture} cannot be compiled for {shown(module)}: with a cache in blocks, "
            f"{round(tokens * (1 - agreement))} of {tokens} tokens differ from transformers' generate, and logits by "
            f"up to {difference:.2e}"
        )
    computes = artifact.dtype != "bfloat16" or artifact.backend != "openvino" or has_bfloat16()
    emulated = None if computes else _emulated(module, texts)
    measured = Accuracy(
        samples=len(inputs),
        sample_texts="built-in sample text",
        sample_shapes=tuple((1, len(ids) + new_tokens) for ids in inputs),
        largest_output=largest,
        largest_difference=difference,
        computed_dtype=artifact.dtype if computes else "float32",
        agreement=agreement,
        emulated_difference=emulated and _difference(emulated, expected),
        emulated_agreement=emulated and _agreement(emulated, expected, largest)[0],
    )
    if artifact.dtype != "float32":
        accuracy.check(measured, None, _LEAST_AGREEMENT if min_agreement is None else min_agreement)
    return measured


def shown(module: SourceModule) -> str:
    """The task, for a user."""
    return module.task.replace("_", " ")


_Reference: TypeAlias = Sequence[tuple[NDArray[np.int64], NDArray[Any]]]


def _difference(found: Sequence[NDArray[np.float32]], expected: _Reference) -> float:
    return float(np.max([np.abs(one - logits).max() for one, (_, logits) in zip(found, expected, strict=True)]))


def _agreement(found: Sequence[NDArray[np.float32]], expected: _Reference, largest: float) -> tuple[float, int]:
    """The share of the tokens that are the same, or as good, and their number."""
    same = total = 0
    for logits, (tokens, reference) in zip(found, expected, strict=True):
        chosen = logits.argmax(axis=1)
        gaps = reference[np.arange(len(tokens)), tokens] - reference[np.arange(len(tokens)), chosen]
        same += int(np.count_nonzero((chosen == tokens) | (gaps <= _TIE * largest)))
        total += len(tokens)
    return same / total, total


def _emulated(module: SourceModule, texts: Sequence["_Text"]) -> list[NDArray[np.float32]]:
    """The logits of PyTorch in bfloat16, as those of _forced."""
    model, found = pretrained_model(module.module), []
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        for text in texts:
            whole = torch.tensor([[*text.prompt, *text.tokens[:-1].tolist()]])
            name = "decoder_input_ids" if text.source else "input_ids"
            source = {"input_ids": torch.tensor([[*text.source]])} if text.source else {}
            logits = model(**source, **{name: whole})["logits"][0, len(text.prompt) - 1 :]
            found.append(logits.float().numpy())
    return found


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


def _blocks(model: DecoderModel, text: _Text) -> tuple[int, int]:
    """The blocks that a text takes, and those of its source."""
    whole = len(text.prompt) + len(text.tokens) - 1
    return -(-whole // model.block_tokens), -(-len(text.source) // model.block_tokens)


def _groups(model: DecoderModel, texts: Sequence[_Text]) -> Iterator[Sequence[_Text]]:
    """The texts, in order, in groups for which the cache has room."""
    group: list[_Text] = []
    for text in texts:
        if sum(sum(_blocks(model, one)) for one in [*group, text]) > model.blocks:
            yield group
            group = []
        group.append(text)
    yield group


def _forced(model: DecoderModel, texts: Sequence[_Text]) -> list[NDArray[np.float32]]:
    """The logits of each token of each text, [tokens, vocabulary]. All texts share the steps."""
    whole = [[*text.prompt, *text.tokens[:-1].tolist()] for text in texts]
    own, of_sources = zip(*(_blocks(model, text) for text in texts), strict=True)
    counts = [*own, *of_sources]
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
