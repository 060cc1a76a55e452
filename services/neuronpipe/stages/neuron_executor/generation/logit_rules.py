"""The rules of a sequence: forced tokens, banned tokens, and changed scores, as in transformers' `generate`.

Sources: the processors SequenceBias, RepetitionPenalty, NoRepeatNGram, EncoderNoRepeatNGram, NoBadWords,
MinNewTokensLength, ForcedBOSToken, ForcedEOSToken, ExponentialDecayLengthPenalty, SuppressTokens,
SuppressTokensAtBegin and LogitNormalization in transformers/generation/logits_process.py. `logit_bias` is a
SequenceBias of single tokens. The penalties of presence and frequency follow the repetition penalty, and count the
tokens of the text, as in vLLM (vllm/model_executor/layers/utils.py, apply_penalties).
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import GenerationOptions
from neuronpipe.stages.neuron_executor.generation.grammars import TextGrammar
from neuronpipe.tasks.text_options import GenerationFacts

_Floats = NDArray[np.float32]
_Ids = NDArray[np.int32]
# A bool for each token of the vocabulary: whether it is allowed.
Allowed = NDArray[np.bool_]

# The facts of a model whose generation_config is empty.
_NO_FACTS = GenerationFacts()


class LogitRules:
    """The tokens that may follow the tokens of one sequence.

    - `banned`: the tokens that must not come next, unless they are forced.
    - `changes`: the changes of the other tokens' scores.
    """

    def __init__(
        self,
        options: GenerationOptions,
        prompt_tokens: int,
        end_token_ids: Collection[int],
        facts: GenerationFacts = _NO_FACTS,
        read_ids: Sequence[int] = (),
    ) -> None:
        """`options`: with every field set. `end_token_ids`: the tokens that end the text. `facts`: the facts of the
        model. `read_ids`: the prompt, or the source in a model with an encoder.
        """
        self.options = options
        self.prompt_tokens = prompt_tokens
        self.end_token_ids = frozenset(end_token_ids)
        # Fields are read once, because reading a field of a message takes as long as the rest of a choice.
        self._last = options.max_new_tokens - 1
        self._first_id = options.forced_bos_token_id if options.HasField("forced_bos_token_id") else None
        self._last_id = options.forced_eos_token_id if options.HasField("forced_eos_token_id") else None
        # If the first token is forced, the first free choice is the token after it.
        self._first_length = prompt_tokens + (prompt_tokens == 1 and self._first_id is not None)
        self.banned = BannedTokens(options, prompt_tokens, self._first_length, self.end_token_ids, facts, read_ids)
        self.changes = ScoreChanges(options, prompt_tokens, self.end_token_ids, facts)

    def forced(self, token_ids: Sequence[int], grammar: TextGrammar | None) -> tuple[int | None, Allowed | None]:
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


class BannedTokens:
    """The tokens that must not follow the tokens of one sequence.

    `first_length`: the number of tokens before the first token that is chosen freely.
    """

    def __init__(
        self,
        options: GenerationOptions,
        prompt_tokens: int,
        first_length: int,
        end_token_ids: Collection[int],
        facts: GenerationFacts,
        read_ids: Sequence[int],
    ) -> None:
        self._least_length, self._first_length = prompt_tokens + options.min_new_tokens, first_length
        self._end_token_ids = sorted(end_token_ids)
        self._ngram_size = options.no_repeat_ngram_size
        words = [list(word.token_ids) for word in options.bad_words_ids]
        self._bad_words = [word for word in words if len(word) > 1 or word[0] not in end_token_ids]
        self._suppressed, self._suppressed_first = [*facts.suppress_tokens], [*facts.begin_suppress_tokens]
        self._read_size = facts.encoder_no_repeat_ngram_size
        self._read_ngrams = _ngrams(read_ids, self._read_size)

    def after(self, token_ids: Sequence[int]) -> list[int]:
        """Returns the tokens that must not come next."""
        may_end, size = len(token_ids) >= self._least_length, self._ngram_size
        banned = [] if may_end else [*self._end_token_ids]
        if 0 < size <= len(token_ids):
            banned += _followers(token_ids, token_ids[len(token_ids) - size + 1 :])
        if self._read_ngrams and len(token_ids) >= self._read_size - 1:
            banned += self._read_ngrams.get(tuple(token_ids[len(token_ids) - self._read_size + 1 :]), ())
        banned += self._suppressed
        if len(token_ids) == self._first_length:
            banned += self._suppressed_first
        return banned + [word[-1] for word in self._bad_words if _ends_with(token_ids, word[:-1])]


class ScoreChanges:
    """The biases and penalties of one sequence.

    - `rescores`: whether scores change for other reasons than banned tokens.
    - `renormalizes`: whether scores become probabilities again after tokens were banned. This changes only sums of
      scores.
    """

    def __init__(
        self, options: GenerationOptions, prompt_tokens: int, end_token_ids: Collection[int], facts: GenerationFacts
    ) -> None:
        self._prompt_tokens, self._end_token_ids = prompt_tokens, sorted(end_token_ids)
        self._biases = {word: np.float32(bias) for word, bias in facts.sequence_bias}
        self._bias_ids = np.array([entry.token_id for entry in options.logit_bias], np.int64)
        self._bias_values = np.array([entry.bias for entry in options.logit_bias], np.float32)
        self._penalty = np.float32(options.repetition_penalty)
        self._presence, self._frequency = options.presence_penalty, options.frequency_penalty
        self._is_penalized = bool(self._presence or self._frequency)
        self._decay = facts.exponential_decay_length_penalty
        changes = self._penalty != 1, self._is_penalized, self._biases, options.logit_bias, self._decay is not None
        self.rescores = any(changes)
        self.renormalizes = facts.renormalize_logits

    def apply(
        self, token_ids: Sequence[int], logits: _Floats, banned: Sequence[int], allowed: Allowed | None
    ) -> tuple[_Ids, _Floats]:
        """Applies biases and penalties to the scores, drops banned tokens, and normalizes if the model requires it.

        With a grammar, only tokens that it allows remain, also banned tokens if it allows no others.
        """
        scores, penalty = logits.copy(), self._penalty
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
            written, counts = np.unique(np.asarray(token_ids[self._prompt_tokens :], np.int64), return_counts=True)
            scores[written] -= (self._frequency * counts + self._presence).astype(np.float32)
        scores[np.array(banned, np.int64)] = -np.inf
        if self._decay and (beyond := len(token_ids) - self._prompt_tokens - self._decay[0]) > 0:
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
