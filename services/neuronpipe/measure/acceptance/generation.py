"""What the measuring process measures of a model that generates: its tokens, new ones a second, and prompts."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from neuronpipe.bundles.buckets import Bucket
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderModel, Run
from neuronpipe.stages.neuron_executor.runtimes.given_texts import (
    GivenText,
    computed_logits,
    largest_difference,
    largest_logit,
    token_agreement,
)

# Prompts are computed in parts of so many tokens.
_PART_TOKENS = 64


def parity(model: DecoderModel, texts: Sequence[GivenText]) -> dict[str, Any]:
    """How far the model's logits and tokens are from those that were given; see run.py."""
    found = computed_logits(model, texts)
    return {
        "texts": len(texts),
        "cores": 1,
        "largest_output": largest_logit(texts),
        "largest_difference": largest_difference(found, texts),
        "agreement": token_agreement(found, texts)[0],
        "largest_difference_of_cores": 0.0,
    }


def counts(model: DecoderModel, shape: Bucket, source: Sequence[int]) -> list[int]:
    """How many texts are to be answered side by side: one, and as many as the shape says or the cache has room for.

    Raises SetupError where it has none.
    """
    room = (model.blocks - _blocks(model, len(source))) // _blocks(model, shape.tokens)
    if room < 1:
        raise SetupError(f"{shape.tokens} tokens of a text: the cache holds {model.blocks * model.block_tokens}")
    return sorted({1, min(shape.batch, room)})


def throughput(
    model: DecoderModel, shape: Bucket, count: int, source: Sequence[int], vocabulary: int, seconds: float
) -> dict[str, float]:
    """Answers so many texts side by side for a time, each of half the shape's tokens after a prompt of the other half.

    Latency is that of a step. `source`: of a model with an encoder; all texts share it.
    """
    held = _blocks(model, shape.tokens)
    of_source = list(range(count * held, count * held + _blocks(model, len(source))))
    blocks = [range(row * held, (row + 1) * held) for row in range(count)]
    if of_source:
        model.read(source, of_source)

    def runs(first: int, length: int, *, is_scored: bool) -> Iterator[Run]:
        ids = [token % vocabulary for token in range(first, first + length)]
        for own in blocks:
            yield Run(ids, first, list(own), is_scored, len(source), of_source)

    prompt, prompt_s, steps = max(1, shape.tokens // 2), list[float](), list[float]()
    end_s = time.monotonic() + seconds
    while not steps or time.monotonic() < end_s:
        parts = range(0, prompt, _PART_TOKENS)
        prompt_s.append(
            sum(
                _timed(lambda run=run: model.compute([run]))  # type: ignore[misc]
                for first in parts
                for run in runs(first, min(_PART_TOKENS, prompt - first), is_scored=False)
            )
        )
        for position in range(prompt, shape.tokens):
            step = list(runs(position, 1, is_scored=True))
            steps.append(_timed(lambda step=step: model.compute(step)))  # type: ignore[misc]
            if time.monotonic() >= end_s:
                break
    p50, p95, p99 = (round(1000 * float(value), 3) for value in np.percentile(steps, (50, 95, 99)))
    return {
        "throughput_per_s": round(count * len(steps) / sum(steps), 1),
        "p50_ms": p50,
        "p95_ms": p95,
        "p99_ms": p99,
        "prompt_tokens_per_s": round(count * prompt * len(prompt_s) / sum(prompt_s), 1),
    }


def _blocks(model: DecoderModel, tokens: int) -> int:
    return -(-tokens // model.block_tokens)


def _timed(work: Callable[[], object]) -> float:
    began_s = time.monotonic()
    work()
    return time.monotonic() - began_s
