"""Fill-mask: the tokens that fit instead of a text's masks.

Equal to transformers' FillMaskPipeline with `top_k` and `targets`: the text is read with all of its masks, and a
token's probability is its share of the whole vocabulary, even if targets are given. Differences:

- The pipeline's `sequence` is left out. The caller has the text, and each mask's start and end locate its token.
- A target outside the vocabulary is refused. The pipeline replaces it by the first token of its spelling.
- A text that is too long is refused unless truncation is requested, and always if a mask would be dropped.
- Special tokens except the mask are text (see tasks/base.py).

Each mask is a sequence of its own. The model's input `mask_position` marks the mask, so that an output is one row of
logits, and all inputs have the same shape (docs/decisions/0013).
"""

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import FilledMask, FillMaskInput, FillMaskResult, TokenScore
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.model import ModelSpec, TaskFacts
from neuronpipe.core.tensors import Array, Arrays, ArraySets
from neuronpipe.tasks.base import (
    Annotations,
    Encoded,
    LocatedText,
    Task,
    TextTokenizer,
    check_text,
    check_truncation,
    cut_located,
    sequence,
    traits_of,
)

# The pipeline's default.
_DEFAULT_TOP_K = 5

_MAX_TOP_K = 100
_MAX_TARGETS = 100
# A mask's logits are 1 MB for 250,000 tokens; the logits of all masks travel in one message of at most 64 MiB.
_MAX_MASKS = 16

# Block size of _largest: about the square root of a vocabulary's size.
_BLOCK = 128


class FillMaskFacts(TaskFacts):
    """Facts about a model for fill-mask."""

    encoded = ("mask_token_id",)
    public_fields = ("mask_token",)

    mask_token: str
    mask_token_id: int


def check(input: FillMaskInput, model: ModelSpec) -> None:
    check_text("text", input.text)
    check_truncation(input)
    if input.top_k > _MAX_TOP_K:
        raise InvalidInput("top_k", f"{input.top_k}, the limit is {_MAX_TOP_K}")
    if len(input.targets) > _MAX_TARGETS:
        raise InvalidInput("targets", f"{len(input.targets)} targets, the limit is {_MAX_TARGETS}")


def encode(input: FillMaskInput, tokenizer: TextTokenizer, model: ModelSpec) -> Encoded:
    """Returns one sequence for each mask, with `mask_position` int32 [tokens], 1 at that mask.

    The annotations are `place` int32 [2], the start and end of the mask in the text, in code points, and `target_ids`
    int32 [targets].
    """
    targets = np.array(_target_ids(input, tokenizer), np.int32)
    whole = tokenizer.locate(input.text)
    mask_count = len(_masks(whole, model))
    if not mask_count:
        raise InvalidInput("text", f"has no mask; the mask of this model is {FillMaskFacts.of(model).mask_token}")
    if mask_count > _MAX_MASKS:
        raise InvalidInput("text", f"{mask_count} masks, the limit is {_MAX_MASKS}")
    part = cut_located(whole, model, input.truncation)
    masks = _masks(part, model)
    if len(masks) < mask_count:
        raise InvalidInput("truncation", f"drops {mask_count - len(masks)} of the text's {mask_count} masks")
    read = sequence(part, model)
    return Encoded(
        [{**read, "mask_position": (np.arange(len(part.token_ids)) == mask).astype(np.int32)} for mask in masks],
        [
            {"place": np.array([part.char_start[mask], part.char_end[mask]], np.int32), "target_ids": targets}
            for mask in masks
        ],
        part.truncated_tokens,
    )


def decode(input: FillMaskInput, model: ModelSpec, annotations: ArraySets, outputs: ArraySets) -> FillMaskResult:
    """Returns the best tokens of each mask from `logits`, float32 [vocabulary], with the `tokens` of decoding_spec."""
    return FillMaskResult(
        masks=[
            _filled(input, model, annotation, output["logits"])
            for annotation, output in zip(annotations, outputs, strict=True)
        ]
    )


def _target_ids(input: FillMaskInput, tokenizer: TextTokenizer) -> list[int]:
    """Returns the token ids of the targets, each once. Raises InvalidInput, which names the target by its index."""
    token_ids: dict[int, None] = {}
    for index, target in enumerate(input.targets):
        token_id = tokenizer.token_id(target)
        if token_id is None:  # spelled as in the vocabulary, or as in a result
            pieces = tokenizer.tokens(target, special_tokens=False).token_ids
            if len(pieces) != 1 or tokenizer.text_of(pieces, special_tokens=False).strip() != target.strip():
                raise InvalidInput(f"targets[{index}]", "is not a token of the model's vocabulary")
            token_id = int(pieces[0])
        token_ids[token_id] = None
    return list(token_ids)


def _masks(text: LocatedText, model: ModelSpec) -> list[int]:
    masks: list[int] = np.flatnonzero(text.token_ids == FillMaskFacts.of(model).mask_token_id).tolist()
    return masks


def _filled(input: FillMaskInput, model: ModelSpec, annotation: Arrays, logits: Array) -> FilledMask:
    candidates, top_k = annotation["target_ids"], input.top_k or _DEFAULT_TOP_K
    chosen = logits[candidates] if candidates.size else logits
    best = _largest(chosen, top_k)
    highest = logits.max()
    scores = np.exp(chosen[best] - highest) / np.exp(logits - highest).sum()
    token_ids = candidates[best] if candidates.size else best
    start, end = annotation["place"].tolist()
    return FilledMask(
        tokens=[
            TokenScore(token=model.tokens[token_id], score=score, token_id=token_id)
            for token_id, score in zip(token_ids.tolist(), scores.tolist(), strict=True)
        ],
        start=start,
        end=end,
    )


def _largest(values: Array, count: int) -> Array:
    """Returns the places of the `count` largest values, largest first. Blocks save 90 % of the time at 30,000."""
    places = np.arange(values.size)
    if values.size > 4 * count * _BLOCK:
        maxima = np.maximum.reduceat(values, places[::_BLOCK])
        blocks = np.argpartition(maxima, maxima.size - count)[-count:]
        places = (blocks[:, np.newaxis] * _BLOCK + places[:_BLOCK]).ravel()
        places = places[places < values.size]
    candidates = values[places]
    largest: Array = places[np.argsort(-candidates, kind="stable")[:count]]
    return largest


traits = traits_of("text", "truncation", "targets")
_ANNOTATIONS: dict[str, str | int] = {"place": 2, "target_ids": "any"}
# The targets are in the annotations.
TASK = Task("fill_mask", check, traits, encode, decode, ("top_k",), FillMaskFacts, Annotations(_ANNOTATIONS))
