"""Chooses the next token of a sequence from its scores, as transformers' `generate` does.

Sources, in this order: the processors SequenceBias, RepetitionPenalty, NoRepeatNGram, EncoderNoRepeatNGram, NoBadWords,
MinNewTokensLength, ForcedBOSToken, ForcedEOSToken, ExponentialDecayLengthPenalty, SuppressTokens,
SuppressTokensAtBegin and LogitNormalization, and the warpers of temperature, top_k, top_p and min_p in
transformers/generation/logits_process.py.
"""

import math
from collections.abc import Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.core.items import TokenLogprobs
from neuronpipe.runtimes.decoder import Scores
from neuronpipe.tasks.text_generation import GenerationFacts

_Floats = NDArray[np.float32]
_Ids = NDArray[np.int32]


# Those of a model whose generation_config says nothing.
NO_FACTS = GenerationFacts()


class NotFinite(Exception):
    """The scores are NaN or infinite."""


class TokenRules:
    """Which tokens may follow those of one sequence. Arguments as for TokenChooser."""

    def __init__(
        self,
        options: GenerationOptions,
        prompt_tokens: int,
        end_token_ids: Collection[int],
        facts: GenerationFacts,
        read_ids: Sequence[int],
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._end_token_ids = sorted(end_token_ids)
        # Read once: a field of a message takes as long as the rest of a step's choice.
        self.penalty = options.repetition_penalty
        self._min_new_tokens, self._last = options.min_new_tokens, options.max_new_tokens - 1
        self._ngram_size = options.no_repeat_ngram_size
        self._first_id = options.forced_bos_token_id if options.HasField("forced_bos_token_id") else None
        self._last_id = options.forced_eos_token_id if options.HasField("forced_eos_token_id") else None
        words = [list(word.token_ids) for word in options.bad_words_ids]
        self._bad_words = [word for word in words if len(word) > 1 or word[0] not in end_token_ids]
        self._suppressed, self._suppressed_first = [*facts.suppress_tokens], [*facts.begin_suppress_tokens]
        is_forced = prompt_tokens == 1 and self._first_id is not None  # and then the next one is chosen first
        self._first_length = prompt_tokens + is_forced
        self._read_size = facts.encoder_no_repeat_ngram_size
        self._read_ngrams = _ngrams(read_ids, self._read_size)
        self._biases = {word: np.float32(bias) for word, bias in facts.sequence_bias}
        self._decay = facts.exponential_decay_length_penalty
        # Whether scores are changed for other reasons than that tokens are banned.
        self.rescores = self.penalty != 1 or bool(self._biases) or self._decay is not None
        # Whether scores become probabilities again after tokens are banned, which matters to sums of them only.
        self.renormalizes = facts.renormalize_logits

    def forced(self, token_ids: Sequence[int]) -> int | None:
        """The only token that may come next, if there is one."""
        if self._last_id is not None and len(token_ids) - self._prompt_tokens == self._last:
            return self._last_id
        # In transformers, too, it is the second token of all, so that only prompts of one token are followed by it.
        return self._first_id if len(token_ids) == 1 else None

    def banned(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens that must not come next."""
        may_end = len(token_ids) - self._prompt_tokens >= self._min_new_tokens
        banned, size = [] if may_end else [*self._end_token_ids], self._ngram_size
        if 0 < size <= len(token_ids):
            end = token_ids[len(token_ids) - size + 1 :]
            places = range(len(token_ids) - size + 1)
            banned += [token_ids[place + size - 1] for place in places if token_ids[place : place + size - 1] == end]
        if self._read_ngrams and len(token_ids) >= self._read_size - 1:
            banned += self._read_ngrams.get(tuple(token_ids[len(token_ids) - self._read_size + 1 :]), ())
        banned += self._suppressed
        if len(token_ids) == self._first_length:
            banned += self._suppressed_first
        return banned + [word[-1] for word in self._bad_words if _ends_with(token_ids, word[:-1])]

    def changed(self, token_ids: Sequence[int], scores: _Floats, banned: Sequence[int]) -> _Floats:
        """The scores with biases and penalties, and without the banned tokens; normalized, if the model has it so."""
        scores, penalty = scores.copy(), np.float32(self.penalty)
        if self._biases:
            added = np.zeros_like(scores)
            for word, bias in self._biases.items():
                if _ends_with(token_ids, word[:-1]):
                    added[word[-1]] += bias
            scores += added
        if penalty != 1:
            seen = np.unique(np.asarray(token_ids))
            of_seen = scores[seen]
            scores[seen] = np.where(of_seen < 0, of_seen * penalty, of_seen / penalty)
        scores[np.array(banned, np.int64)] = -np.inf
        if self._decay and (beyond := len(token_ids) - self._prompt_tokens - self._decay[0]) > 0:
            of_ends = scores[self._end_token_ids]
            gain = np.where(np.isfinite(of_ends), np.abs(of_ends), 0) * np.float32(self._decay[1] ** beyond - 1)
            scores[self._end_token_ids] = of_ends + gain
        if self.renormalizes:
            best = scores.max()
            scores -= best + np.log(np.exp(scores - best).sum())
        return scores


class TokenChooser:
    """Chooses the tokens of one sequence. A pure function of its arguments: what else is in a batch changes nothing.

    `options`: with every field set. `end_token_ids`: those that end the text. `facts`: of its model. `read_ids`: the
    prompt, or the source in a model with an encoder.
    """

    def __init__(
        self,
        options: GenerationOptions,
        prompt_tokens: int,
        end_token_ids: Collection[int],
        facts: GenerationFacts = NO_FACTS,
        read_ids: Sequence[int] = (),
    ) -> None:
        self._options = options
        self._prompt_tokens = prompt_tokens
        self._rules = TokenRules(options, prompt_tokens, end_token_ids, facts, read_ids)
        self._samples = options.do_sample
        # How many of the best tokens are needed; 0: all.
        self._needed = options.top_k if self._samples else 1

    def choose(self, token_ids: Sequence[int], scores: Scores, row: int = 0) -> int:
        """The token after `token_ids`, the prompt and all tokens so far. `row`: of the scores. Raises NotFinite."""
        top_ids, top_logits = scores.top_ids[row], scores.top_logits[row]
        if not math.isfinite(top_logits[0]):
            raise NotFinite
        if (forced := self._rules.forced(token_ids)) is not None:
            return forced
        if banned := self._rules.banned(token_ids):
            is_allowed = ~np.isin(top_ids, banned)
            top_ids, top_logits = top_ids[is_allowed], top_logits[is_allowed]
        if self._rules.rescores or not 0 < self._needed <= len(top_ids):
            top_logits = self._rules.changed(token_ids, scores.logits[row], banned)
            if not self._samples:
                return int(top_logits.argmax())
            top_ids = np.arange(len(top_logits), dtype=np.int32)
        elif not self._samples:
            is_single = len(top_ids) == 1 or top_logits[0] > top_logits[1]
            return int(top_ids[0] if is_single else top_ids[top_logits == top_logits[0]].min())
        order = np.lexsort((top_ids, -top_logits))  # equal ones by their ids, or a draw would depend on their order
        position = len(token_ids) - self._prompt_tokens
        return self._drawn(top_ids[order], top_logits[order], position)

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


def token_logprobs(token_id: int, scores: Scores, row: int, count: int) -> TokenLogprobs:
    """The log probabilities of a token and of the `count` best ones, by the scores as `choose` gets them."""
    logits, top_ids, top_logits = scores.logits[row], scores.top_ids[row], scores.top_logits[row]
    total = float(top_logits[0]) + float(scores.log_sums[row])
    order = np.lexsort((top_ids, -top_logits))[:count]
    best = (top_logits[order].astype(np.float64) - total).tolist()
    return TokenLogprobs(float(logits[token_id]) - total, top_ids[order].tolist(), best)


def _ends_with(token_ids: Sequence[int], end: Sequence[int]) -> bool:
    return not end or [*token_ids[-len(end) :]] == [*end]


def _ngrams(token_ids: Sequence[int], size: int) -> Mapping[tuple[int, ...], Sequence[int]]:
    """The last tokens of so many in a row, by those before them."""
    found: dict[tuple[int, ...], list[int]] = {}
    for end in range(size, len(token_ids) + 1) if size else ():
        found.setdefault(tuple(token_ids[end - size : end - 1]), []).append(token_ids[end - 1])
    return found


def _uniform(seed: int, position: int, sequence: int = 0) -> float:
    """A number from 0 to 1, below 1. Philox is counter-based, so it depends on nothing but these."""
    key, counter = np.array([seed, sequence], np.uint64), np.array([position, 0, 0, 0], np.uint64)
    return float(np.random.Generator(np.random.Philox(key=key, counter=counter)).random())
