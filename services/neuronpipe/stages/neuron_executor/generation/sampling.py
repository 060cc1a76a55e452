"""Chooses the next token of a sequence from its scores, as transformers' `generate` does.

Sources: logit_rules.py, and then the warpers of temperature, top_k, top_p and min_p in
transformers/generation/logits_process.py.
"""

import math
import threading
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.generated import TokenLogprobs
from neuronpipe.stages.neuron_executor.generation.grammars import TextGrammar
from neuronpipe.stages.neuron_executor.generation.logit_rules import Allowed, LogitRules
from neuronpipe.stages.neuron_executor.runtimes.decoder import TokenScores

_Floats = NDArray[np.float32]
_Doubles = NDArray[np.float64]
_Ids = NDArray[np.int32]

# At this temperature, a token whose logit is lower by the least difference of float32 has a weight of 0.
LEAST_TEMPERATURE = 1e-8
# The generator of each thread.
_THREAD = threading.local()


class NotFinite(Exception):
    """The scores contain NaN or infinite values."""


class TokenChooser:
    """Chooses the tokens of one sequence, by a function of the arguments: other sequences of a batch change nothing.

    - `sequence`: the number of this text among the texts drawn for one prompt.
    - `grammar`: the grammar that the text must have, if any.
    """

    def __init__(self, rules: LogitRules, sequence: int = 0, grammar: TextGrammar | None = None) -> None:
        self._rules = rules
        self._grammar = grammar
        self._sequence = sequence
        self._samples = rules.options.do_sample
        # Number of best tokens that are needed; 0: all.
        self._needed = rules.options.top_k if self._samples else 1

    def choose(self, token_ids: Sequence[int], scores: TokenScores, row: int = 0) -> int:
        """Chooses the token after `token_ids`, the prompt and all tokens so far. `row`: the row of the scores.

        Raises NotFinite, and InvalidInput if the grammar allows no token.
        """
        if not math.isfinite(scores.top_logits[row, 0]):
            raise NotFinite
        forced, allowed = self._rules.forced(token_ids, self._grammar)
        if forced is not None:
            return forced
        banned = self._rules.banned.after(token_ids)
        best = None if self._rules.changes.rescores else best_allowed(scores, row, banned, allowed, self._needed)
        if best is None:
            ids, logits = self._rules.changes.apply(token_ids, scores.logits[row], banned, allowed)
            if not self._samples:
                return int(ids[logits.argmax()])
            if 0 < self._needed < len(ids):  # otherwise the whole vocabulary would be sorted
                is_best = logits >= np.partition(logits, -self._needed)[-self._needed]
                ids, logits = ids[is_best], logits[is_best]
        else:
            ids, logits = best
            if not self._samples:
                is_single = len(ids) == 1 or logits[0] > logits[1]
                return int(ids[0] if is_single else ids[logits == logits[0]].min())
        order = np.lexsort((ids, -logits))  # equal logits by token id, so that a draw does not depend on their order
        position = len(token_ids) - self._rules.prompt_tokens
        return self._drawn(ids[order], logits[order], position)

    def _drawn(self, ids: _Ids, logits: _Floats, position: int) -> int:
        """Draws a token by its probability. `ids` and `logits`: best first."""
        options = self._rules.options
        ids, scaled = warped(options, ids, logits)
        sums = np.cumsum(np.exp(scaled))
        number = float(_generator(options.seed, self._sequence, (position, 0)).random())  # from 0 to below 1
        drawn = np.searchsorted(sums, number * sums[-1], side="right")
        return int(ids[min(int(drawn), len(ids) - 1)])


def best_allowed(
    scores: TokenScores, row: int, banned: Collection[int], allowed: Allowed | None, needed: int
) -> tuple[_Ids, _Floats] | None:
    """Returns the graph's best tokens of a row with their logits, without banned and disallowed tokens.

    None if they may not be the `needed` best tokens: there are fewer, or other tokens may equal the last token.
    `needed`: 0 for all.
    """
    ids, logits = scores.top_ids[row], scores.top_logits[row]
    has_all, last = len(ids) == len(scores.logits[row]), logits[-1]
    if allowed is not None:
        ids, logits = ids[allowed[ids]], logits[allowed[ids]]
    if banned:
        is_allowed = ~np.isin(ids, [*banned])
        ids, logits = ids[is_allowed], logits[is_allowed]
    if not 0 < needed <= len(ids):
        return None
    return (ids, logits) if has_all or logits[needed - 1] > last else None


def warped(options: GenerationOptions, ids: _Ids, logits: _Floats, least: int = 1) -> tuple[_Ids, _Doubles]:
    """Returns the tokens that may be drawn, with their differences from the best logit, divided by the temperature.

    `ids` and `logits`: best first. `least`: number of tokens that always stay, if there are as many.
    """
    if options.top_k:
        place = min(max(options.top_k, least), len(logits)) - 1
        logits = logits[: int(np.count_nonzero(logits >= logits[place]))]  # with tokens of equal logits
    # The differences are divided, so that a small temperature leaves the best token with a weight of 1.
    scaled = (logits.astype(np.float64) - float(logits[0])) / max(options.temperature, LEAST_TEMPERATURE)
    weights = np.exp(scaled)
    if options.top_p < 1:
        shares = weights / weights.sum()
        kept = int(np.count_nonzero(np.cumsum(shares[::-1])[::-1] > 1 - options.top_p))
        weights = weights[: max(least, kept)]
    if options.min_p > 0:
        weights = weights[: max(least, int(np.count_nonzero(weights >= options.min_p)))]  # the best token has weight 1
    return ids[: len(weights)], scaled[: len(weights)]


def gumbels(seed: int, position: int, count: int) -> _Doubles:
    """Draws `count` numbers of Gumbel's distribution, which depend on the arguments only.

    Added to logarithms of weights, their order is the order of draws without replacement by these weights (Vieira 2014,
    "Gumbel-max trick and weighted reservoir sampling"; Kool et al. 2019, arXiv:1903.06059).
    """
    # The counter's first word counts the numbers. Its second word is 0 for the numbers of single draws only.
    return _generator(seed, 0, (0, position + 1)).gumbel(size=count)


def token_logprobs(token_id: int, scores: TokenScores, row: int, count: int) -> TokenLogprobs:
    """Returns the log probabilities of a token and of the `count` best tokens, by the scores as `choose` gets them."""
    logits, top_ids, top_logits = scores.logits[row], scores.top_ids[row], scores.top_logits[row]
    total = float(top_logits[0]) + float(scores.log_sums[row])
    order = np.lexsort((top_ids, -top_logits))[:count]
    best = (top_logits[order].astype(np.float64) - total).tolist()
    return TokenLogprobs(float(logits[token_id]) - total, top_ids[order].tolist(), best)


def _generator(seed: int, sequence: int, counter: tuple[int, int]) -> np.random.Generator:
    """Returns a generator of Philox. Its numbers are a function of its key and its counter only.

    Each thread has one generator, whose state this call sets: to make a generator takes five times as long.
    """
    if not hasattr(_THREAD, "generator"):
        _THREAD.generator = np.random.Generator(np.random.Philox(key=0))
        _THREAD.state = _THREAD.generator.bit_generator.state
    state = _THREAD.state
    state["state"]["key"][:] = seed, sequence
    state["state"]["counter"][:] = *counter, 0, 0
    _THREAD.generator.bit_generator.state = state
    generator: np.random.Generator = _THREAD.generator
    return generator
