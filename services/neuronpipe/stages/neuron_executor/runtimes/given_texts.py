"""Computes texts of given tokens as the executor does, to measure the difference of a decoder to transformers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderModel, DecoderRun

# Prompts are computed in parts of this number of tokens, as the executor computes long prompts.
_PART_TOKENS = 24
# If the logits of two tokens differ by less than this share of the largest logit, float32 may choose either.
_TIE = 1e-5


@dataclass(frozen=True, slots=True)
class GivenText:
    """A text to compute.

    - `prompt`: the tokens before it.
    - `source`: the source, or empty.
    - `tokens`: int64 [tokens].
    - `logits`: float32 [tokens, vocabulary], of which the tokens are the best.
    """

    prompt: Sequence[int]
    source: Sequence[int]
    tokens: NDArray[np.int64]
    logits: NDArray[Any]


def computed_logits(model: DecoderModel, texts: Sequence[GivenText]) -> list[NDArray[np.float32]]:
    """Computes the logits of each token of each text, [tokens, vocabulary].

    Texts for which the cache has room share steps.
    """
    return [logits for group in _groups(model, texts) for logits in _computed(model, group)]


def largest_logit(texts: Sequence[GivenText]) -> float:
    return max(float(np.abs(text.logits).max()) for text in texts)


def largest_difference(computed: Sequence[NDArray[Any]], texts: Sequence[GivenText]) -> float:
    """Returns the largest difference of a logit from the given logit."""
    return float(np.max([np.abs(logits - text.logits).max() for logits, text in zip(computed, texts, strict=True)]))


def token_agreement(computed: Sequence[NDArray[Any]], texts: Sequence[GivenText]) -> tuple[float, int]:
    """Returns the share of equal or equally good tokens, and the number of all tokens."""
    same = total = 0
    limit = _TIE * largest_logit(texts)
    for logits, text in zip(computed, texts, strict=True):
        chosen, rows = logits.argmax(axis=1), np.arange(len(text.tokens))
        gaps = text.logits[rows, text.tokens] - text.logits[rows, chosen]
        same += int(np.count_nonzero((chosen == text.tokens) | (gaps <= limit)))
        total += len(text.tokens)
    return same / total, total


def _blocks(model: DecoderModel, text: GivenText) -> tuple[int, int]:
    """Counts the blocks that a text takes, and the blocks that its source takes."""
    whole = len(text.prompt) + len(text.tokens) - 1
    return -(-whole // model.block_tokens), -(-len(text.source) // model.block_tokens)


def _groups(model: DecoderModel, texts: Sequence[GivenText]) -> Iterator[Sequence[GivenText]]:
    """Yields the texts in order, in groups for which the cache has room."""
    group: list[GivenText] = []
    for text in texts:
        if sum(sum(_blocks(model, member)) for member in [*group, text]) > model.blocks:
            yield group
            group = []
        group.append(text)
    yield group


def _computed(model: DecoderModel, texts: Sequence[GivenText]) -> list[NDArray[np.float32]]:
    """Computes the logits of each token of texts for which the cache has room together."""
    whole = [[*text.prompt, *text.tokens[:-1].tolist()] for text in texts]
    text_counts, source_counts = zip(*(_blocks(model, text) for text in texts), strict=True)
    counts = [*text_counts, *source_counts]
    firsts = np.cumsum([0, *counts])
    blocks = [list(range(first + count - 1, first - 1, -1)) for first, count in zip(firsts, counts, strict=False)]
    sources = blocks[len(texts) :]
    for text, source_blocks in zip(texts, sources, strict=True):
        if source_blocks:
            model.read(text.source, source_blocks)
    done, computed = [0] * len(whole), [[] for _ in whole]  # type: list[int], list[list[NDArray[np.float32]]]
    while any(count < len(ids) for count, ids in zip(done, whole, strict=True)):
        runs, rows = [], []
        for row, (ids, text) in enumerate(zip(whole, texts, strict=True)):
            if done[row] == len(ids):
                continue
            in_prompt = len(text.prompt) - done[row]
            part = ids[done[row] : done[row] + (min(_PART_TOKENS, in_prompt) if in_prompt > 0 else 1)]
            scored = int(done[row] + len(part) >= len(text.prompt))
            runs.append(
                DecoderRun(
                    token_ids=part,
                    past=done[row],
                    blocks=blocks[row],
                    scored=scored,
                    source_tokens=len(text.source),
                    source_blocks=sources[row],
                )
            )
            rows.append(row)
            done[row] += len(part)
        scores = iter(model.compute(runs).logits.copy())
        for row, run in zip(rows, runs, strict=True):
            if run.scored:
                computed[row].append(next(scores))
    return [np.stack(rows) for rows in computed]
