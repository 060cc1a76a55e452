"""Chooses the next token of a sequence from its scores, as transformers' `generate` does.

Sources: RepetitionPenaltyLogitsProcessor, MinNewTokensLengthLogitsProcessor, and the warpers of temperature, top_k,
top_p and min_p in transformers/generation/logits_process.py, in this order.
"""

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.items import TokenLogprobs

_Floats = NDArray[np.float32]
_Ids = NDArray[np.int32]


class NotFinite(Exception):
    """The scores are NaN or infinite."""


class TokenChooser:
    """Chooses the tokens of one sequence. A pure function of its arguments: what else is in a batch changes nothing.

    `options`: with every field set. `end_token_ids`: those that end the text.
    """

    def __init__(self, options: GenerationOptions, prompt_tokens: int, end_token_ids: Collection[int]) -> None:
        self._options = options
        self._prompt_tokens = prompt_tokens
        self._end_token_ids = np.array(sorted(end_token_ids), np.int64)

    def choose(self, token_ids: Sequence[int], logits: _Floats, top_ids: _Ids, top_logits: _Floats) -> int:
        """The token after `token_ids`, the prompt and all tokens so far.

        `logits`: float32 [vocabulary]. `top_ids` and `top_logits`: the best of them, best first. Raises NotFinite.
        """
        if not np.isfinite(top_logits[0]):
            raise NotFinite
        options, position = self._options, len(token_ids) - self._prompt_tokens
        may_end = position >= options.min_new_tokens
        is_changed = options.repetition_penalty != 1 or not may_end
        if is_changed:
            logits = self._changed(token_ids, logits, may_end=may_end)
        if not options.do_sample:
            return int(logits.argmax()) if is_changed else int(top_ids[top_logits == top_logits[0]].min())
        if is_changed or not 0 < options.top_k <= len(top_ids):
            top_ids, top_logits = np.arange(len(logits), dtype=np.int32), logits
        order = np.lexsort((top_ids, -top_logits))  # equal ones by their ids, or a draw would depend on their order
        return self._drawn(top_ids[order], top_logits[order], position)

    def _changed(self, token_ids: Sequence[int], logits: _Floats, *, may_end: bool) -> _Floats:
        logits, penalty = logits.copy(), np.float32(self._options.repetition_penalty)
        seen = np.unique(np.asarray(token_ids))
        of_seen = logits[seen]
        logits[seen] = np.where(of_seen < 0, of_seen * penalty, of_seen / penalty)
        if not may_end:
            logits[self._end_token_ids] = -np.inf
        return logits

    def _drawn(self, ids: _Ids, logits: _Floats, position: int) -> int:
        """A token by its probability. `ids` and `logits`: best first."""
        options = self._options
        if options.top_k:
            kept = int(np.count_nonzero(logits >= logits[min(options.top_k, len(logits)) - 1]))  # with equal ones
            ids, logits = ids[:kept], logits[:kept]
        scaled = logits.astype(np.float64) / options.temperature
        weights = np.exp(scaled - scaled[0])
        if options.top_p < 1:
            shares = weights / weights.sum()
            kept = max(1, int(np.count_nonzero(np.cumsum(shares[::-1])[::-1] > 1 - options.top_p)))
            weights = weights[:kept]
        if options.min_p > 0:
            weights = weights[weights >= options.min_p * weights[0]]
        sums = np.cumsum(weights)
        drawn = np.searchsorted(sums, _uniform(options.seed, position) * sums[-1], side="right")
        return int(ids[min(int(drawn), len(weights) - 1)])


def token_logprobs(token_id: int, logits: _Floats, top_ids: _Ids, top_logits: _Floats, count: int) -> TokenLogprobs:
    """The log probabilities of a token and of the `count` best ones, by the scores as `choose` gets them."""
    largest = float(top_logits[0])
    total = largest + float(np.log(np.exp(logits - np.float32(largest), dtype=np.float64).sum()))
    order = np.lexsort((top_ids, -top_logits))[:count]
    best = (top_logits[order].astype(np.float64) - total).tolist()
    return TokenLogprobs(float(logits[token_id]) - total, top_ids[order].tolist(), best)


def _uniform(seed: int, position: int, sequence: int = 0) -> float:
    """A number from 0 to 1, below 1. Philox is counter-based, so it depends on nothing but these."""
    key, counter = np.array([seed, sequence], np.uint64), np.array([position, 0, 0, 0], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())
