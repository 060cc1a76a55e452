"""Compares a compiled model that generates with transformers' `generate`, by the code that serves."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from neuronpipe.bundles.manifest import Accuracy, Artifact
from neuronpipe.compiler import accuracy
from neuronpipe.compiler.architectures import layer_windows
from neuronpipe.compiler.modules import SourceModule, pretrained_model
from neuronpipe.compiler.samples import sample_prompts
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderModel
from neuronpipe.stages.neuron_executor.runtimes.given_texts import (
    GivenText,
    computed_logits,
    largest_difference,
    largest_logit,
    token_agreement,
)
from neuronpipe.stages.neuron_executor.runtimes.openvino import has_bfloat16

_PROMPT_WORDS = (1, 3, 8, 20, 50, 120)
# One more prompt is as long as the model takes, up to so many tokens: what is wrong with length shows there. To see
# beyond a sliding window it is longer, as long as that is within reach.
_LONG_TOKENS, _MOST_LONG_TOKENS = 1500, 4600
_BEYOND_WINDOW_TOKENS = 64
_NEW_TOKENS = 24
# Blocks that are not full.
_ROOM_TOKENS = 96
# The largest difference of a logit, as a share of the largest one.
_MOST_DIFFERENCE = 1e-3
# The least share of the same tokens in a data type other than float32, where nothing else is asked for.
_LEAST_AGREEMENT = 0.9


def sample_texts(module: SourceModule) -> list[GivenText]:
    """Sample prompts, and what `generate` adds to them in float32, greedy."""
    start = list(module.fact("decoder_start_token_ids"))
    most = module.max_tokens if start else module.max_tokens - _NEW_TOKENS - 1
    longest = min(most, _long_tokens(module))
    inputs = [ids[:longest] for ids in sample_prompts(module, (*_PROMPT_WORDS, longest))]
    if len(inputs[-2]) == longest:
        del inputs[-1]
    room = module.fact("max_text_tokens") or module.max_tokens - max(map(len, inputs)) - 1
    new_tokens = max(1, min(_NEW_TOKENS, room))
    return [
        GivenText(start or ids, ids if start else [], *_reference(module, ids, start, new_tokens)) for ids in inputs
    ]


def compare(
    module: SourceModule,
    texts: Sequence[GivenText],
    artifact: Artifact,
    load: Callable[[int], DecoderModel],
    min_agreement: float | None,
) -> Accuracy:
    """Compares the tokens and logits of texts with those of `generate`; see sample_texts.

    `load`: gives the model, with a cache for so many tokens, or for fewer if it is fixed.
    Raises SetupError for a difference that is not a tie in float32; in others if less than `min_agreement` of the
    tokens are the same, each after those of `generate` (default: _LEAST_AGREEMENT).
    """
    lengths = [len(text.source or text.prompt) + len(text.tokens) for text in texts]
    found = computed_logits(load(sum(lengths) + _ROOM_TOKENS * len(texts)), texts)
    largest, difference = largest_logit(texts), largest_difference(found, texts)
    agreement, tokens = token_agreement(found, texts)
    if artifact.dtype == "float32" and (agreement < 1 or not difference <= _MOST_DIFFERENCE * largest):
        raise SetupError(
            f"{module.architecture} cannot be compiled for {shown(module)}: with a cache in blocks, "
            f"{round(tokens * (1 - agreement))} of {tokens} tokens differ from transformers' generate, and logits by "
            f"up to {difference:.2e}"
        )
    computes = artifact.dtype != "bfloat16" or artifact.backend != "openvino" or has_bfloat16()
    emulated = None if computes else _emulated(module, texts)
    measured = Accuracy(
        samples=len(texts),
        sample_texts="built-in sample text",
        sample_shapes=tuple((1, length) for length in lengths),
        largest_output=largest,
        largest_difference=difference,
        computed_dtype=artifact.dtype if computes else "float32",
        agreement=agreement,
        emulated_difference=emulated and largest_difference(emulated, texts),
        emulated_agreement=emulated and token_agreement(emulated, texts)[0],
    )
    if artifact.dtype != "float32":
        accuracy.check(measured, None, _LEAST_AGREEMENT if min_agreement is None else min_agreement)
    return measured


def _long_tokens(module: SourceModule) -> int:
    """How long the longest prompt is, at most."""
    window = 0 if module.config.is_encoder_decoder else max(layer_windows(module.config))
    return min(max(_LONG_TOKENS, window + _BEYOND_WINDOW_TOKENS), _MOST_LONG_TOKENS)


def shown(module: SourceModule) -> str:
    """The task, for a user."""
    return module.task.replace("_", " ")


def _emulated(module: SourceModule, texts: Sequence[GivenText]) -> list[NDArray[np.float32]]:
    """The logits of PyTorch in bfloat16, [tokens, vocabulary] of each text."""
    model, found = pretrained_model(module.module), []
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        for text in texts:
            whole = torch.tensor([[*text.prompt, *text.tokens[:-1].tolist()]])
            name = "decoder_input_ids" if text.source else "input_ids"
            source = {"input_ids": torch.tensor([[*text.source]])} if text.source else {}
            logits = model(**source, **{name: whole})["logits"][0, len(text.prompt) - 1 :]
            found.append(logits.float().numpy())
    return found


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
