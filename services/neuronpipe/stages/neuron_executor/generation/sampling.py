"""Chooses the next token of a sequence from its scores, as transformers' `generate` does.

Sources, in this order: the processors SequenceBias, RepetitionPenalty, NoRepeatNGram, EncoderNoRepeatNGram, NoBadWords,
MinNewTokensLength, ForcedBOSToken, ForcedEOSToken, ExponentialDecayLengthPenalty, SuppressTokens,
SuppressTokensAtBegin and LogitNormalization, and the warpers of temperature, top_k, top_p and min_p in
transformers/generation/logits_process.py. `logit_bias` is a SequenceBias of single tokens. The penalties of presence
and frequency follow the repetition penalty, and count the tokens of the text, as in vLLM
(vllm/model_executor/layers/utils.py, apply_penalties).
"""

import contextlib
import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.generated import TokenLogprobs
from neuronpipe.stages.neuron_executor.generation.grammars import TextGrammar
from neuronpipe.stages.neuron_executor.runtimes.decoder import TokenScores
from neuronpipe.tasks.text_options import GenerationFacts

_Floats = NDArray[np.float32]
_Doubles = NDArray[np.float64]
_Ids = NDArray[np.int32]
# Whether each token of the vocabulary is allowed.
_Allowed = NDArray[np.bool_]

# At this temperature, a token whose logit is lower by the least difference of float32 has a weight of 0.
LEAST_TEMPERATURE = 1e-8
# The generator of each thread.
_THREAD = threading.local()
# The facts of a model whose generation_config is empty.
NO_FACTS = GenerationFacts()


class NotFinite(Exception):
    """The scores contain NaN or infinite values."""


class LogitRules:
    """The tokens that may follow the tokens of one sequence.

    - `options`: with every field set.
    - `end_token_ids`: tokens that end the text.
    """

    def __init__(
        self,
        options: GenerationOptions,
        prompt_tokens: int,
        end_token_ids: Collection[int],
        facts: GenerationFacts = NO_FACTS,
        read_ids: Sequence[int] = (),
    ) -> None:
        """`facts`: the facts of the model. `read_ids`: the prompt, or the source in a model with an encoder."""
        self.options = options
        self.prompt_tokens = prompt_tokens
        self.end_token_ids = frozenset(end_token_ids)
        self._end_token_ids = sorted(end_token_ids)
        # Fields are read once, because reading a field of a message takes as long as the rest of a choice.
        self.penalty = options.repetition_penalty
        self._min_new_tokens, self._last = options.min_new_tokens, options.max_new_tokens - 1
        self._ngram_size = options.no_repeat_ngram_size
        self._first_id = options.forced_bos_token_id if options.HasField("forced_bos_token_id") else None
        self._last_id = options.forced_eos_token_id if options.HasField("forced_eos_token_id") else None
        words = [list(word.token_ids) for word in options.bad_words_ids]
        self._bad_words = [word for word in words if len(word) > 1 or word[0] not in end_token_ids]
        self._suppressed, self._suppressed_first = [*facts.suppress_tokens], [*facts.begin_suppress_tokens]
        # If the first token is forced, the first free choice is the token after it.
        is_forced = prompt_tokens == 1 and self._first_id is not None
        self._first_length = prompt_tokens + is_forced
        self._read_size = facts.encoder_no_repeat_ngram_size
        self._read_ngrams = _ngrams(read_ids, self._read_size)
        self._biases = {word: np.float32(bias) for word, bias in facts.sequence_bias}
        self._bias_ids = np.array([entry.token_id for entry in options.logit_bias], np.int64)
        self._bias_values = np.array([entry.bias for entry in options.logit_bias], np.float32)
        self._presence, self._frequency = options.presence_penalty, options.frequency_penalty
        self._decay = facts.exponential_decay_length_penalty
        # Whether scores change for other reasons than banned tokens.
        self._is_penalized = bool(self._presence or self._frequency)
        changes = self.penalty != 1, self._is_penalized, self._biases, options.logit_bias, self._decay is not None
        self.rescores = any(changes)
        # Whether scores become probabilities again after tokens were banned. This changes only sums of scores.
        self.renormalizes = facts.renormalize_logits

    def forced(self, token_ids: Sequence[int], grammar: TextGrammar | None) -> tuple[int | None, _Allowed | None]:
        """Returns the only token that may come next, or None; and the tokens that the text's grammar allows."""
        forced = self._forced(token_ids)
        if grammar is None or len(token_ids) < self._first_length:  # the grammar does not contain a forced first token
            return forced, None
        allowed = grammar.allowed(token_ids[self._first_length :])
        return forced if forced is not None and allowed[forced] else None, allowed

    def _forced(self, token_ids: Sequence[int]) -> int | None:
        if self._last_id is not None and len(token_ids) - self.prompt_tokens == self._last:
            return self._last_id
        # As in transformers, this is the second token of all, so it follows only prompts of one token.
        return self._first_id if len(token_ids) == 1 else None

    def banned(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the tokens that must not come next."""
        may_end = len(token_ids) - self.prompt_tokens >= self._min_new_tokens
        banned, size = [] if may_end else [*self._end_token_ids], self._ngram_size
        if 0 < size <= len(token_ids):
            banned += _followers(token_ids, token_ids[len(token_ids) - size + 1 :])
        if self._read_ngrams and len(token_ids) >= self._read_size - 1:
            banned += self._read_ngrams.get(tuple(token_ids[len(token_ids) - self._read_size + 1 :]), ())
        banned += self._suppressed
        if len(token_ids) == self._first_length:
            banned += self._suppressed_first
        return banned + [word[-1] for word in self._bad_words if _ends_with(token_ids, word[:-1])]

    def changed(
        self, token_ids: Sequence[int], logits: _Floats, banned: Sequence[int], allowed: _Allowed | None
    ) -> tuple[_Ids, _Floats]:
        """Applies biases and penalties to the scores, drops banned tokens, and normalizes if the model requires it.

        With a grammar, only tokens that it allows remain, also banned tokens if it allows no others.
        """
        scores, penalty = logits.copy(), np.float32(self.penalty)
        if self._biases:
            added = np.zeros_like(scores)
            for word, bias in self._biases.items():
                if _ends_with(token_ids, word[:-1]):
                    added[word[-1]] += bias
            scores += added
        np.add.at(scores, self._bias_ids, self._bias_values)
        if penalty != 1:
            seen = np.unique(np.asarray(token_ids))
            seen_scores = scores[seen]
            scores[seen] = np.where(seen_scores < 0, seen_scores * penalty, seen_scores / penalty)
        if self._is_penalized:
            written, counts = np.unique(np.asarray(token_ids[self.prompt_tokens :], np.int64), return_counts=True)
            scores[written] -= (self._frequency * counts + self._presence).astype(np.float32)
        scores[np.array(banned, np.int64)] = -np.inf
        if self._decay and (beyond := len(token_ids) - self.prompt_tokens - self._decay[0]) > 0:
            end_scores = scores[self._end_token_ids]
            gain = np.where(np.isfinite(end_scores), np.abs(end_scores), 0) * np.float32(self._decay[1] ** beyond - 1)
            scores[self._end_token_ids] = end_scores + gain
        if allowed is None:
            ids = np.arange(len(scores), dtype=np.int32)
        else:
            if not np.isfinite(scores[allowed]).any():
                scores = logits
            ids = np.flatnonzero(allowed & np.isfinite(scores)).astype(np.int32)
            scores = scores[ids]
        if self.renormalizes:
            best = scores.max()
            scores -= best + np.log(np.exp(scores - best).sum())
        return ids, scores


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
        banned = self._rules.banned(token_ids)
        best = None if self._rules.rescores else best_allowed(scores, row, banned, allowed, self._needed)
        if best is None:
            ids, logits = self._rules.changed(token_ids, scores.logits[row], banned, allowed)
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
    scores: TokenScores, row: int, banned: Collection[int], allowed: _Allowed | None, needed: int
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


def _followers(token_ids: Sequence[int], begin: Sequence[int]) -> Iterator[int]:
    """Yields the tokens that come after `begin` in a text. A search by `index` takes a tenth of the time of a loop."""
    if not begin:
        yield from token_ids
        return
    place, last = 0, len(token_ids) - len(begin)
    with contextlib.suppress(ValueError):  # there is no further place
        while True:
            place = token_ids.index(begin[0], place, last) + 1
            if token_ids[place - 1 : place - 1 + len(begin)] == begin:
                yield token_ids[place - 1 + len(begin)]


def _ends_with(token_ids: Sequence[int], end: Sequence[int]) -> bool:
    return not end or [*token_ids[-len(end) :]] == [*end]


def _ngrams(token_ids: Sequence[int], size: int) -> Mapping[tuple[int, ...], Sequence[int]]:
    """Maps the first tokens of each n-gram of a size to the tokens that followed them."""
    ngrams: dict[tuple[int, ...], list[int]] = {}
    for end in range(size, len(token_ids) + 1) if size else ():
        ngrams.setdefault(tuple(token_ids[end - size : end - 1]), []).append(token_ids[end - 1])
    return ngrams


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
