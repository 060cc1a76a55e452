"""Beam search over one request's texts, as transformers' `generate` does it for a single request.

With do_sample, the search draws continuations without replacement, by the probabilities of the texts that they make.

Source: GenerationMixin._beam_search in transformers/generation/utils.py (5.23). Scores are float32 as in transformers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import EarlyStopping, FinishReason
from neuronpipe.core.errors import InvalidInput
from neuronpipe.core.generated import TokenLogprobs
from neuronpipe.stages.neuron_executor.generation.grammars import TextGrammar
from neuronpipe.stages.neuron_executor.generation.logit_rules import LogitRules
from neuronpipe.stages.neuron_executor.generation.sampling import (
    LEAST_TEMPERATURE,
    NotFinite,
    best_allowed,
    gumbels,
    token_logprobs,
    warped,
)
from neuronpipe.stages.neuron_executor.runtimes.decoder import TokenScores

_END, _LENGTH = FinishReason.FINISH_REASON_END, FinishReason.FINISH_REASON_LENGTH
_Floats = NDArray[np.float32]
_Ids = NDArray[np.int32]


class BeamStep(NamedTuple):
    """A continuation of a text: the place of the text, and the next token."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A text that has ended: all its tokens, the reason of its end, its score, and the log probabilities of its new
    tokens if the request asks for them.
    """

    token_ids: list[int]
    finish_reason: int
    score: float
    logprobs: list[TokenLogprobs]


class BeamSearch:
    """The search of one request. `grammar`: see TokenChooser."""

    def __init__(self, rules: LogitRules, grammar: TextGrammar | None = None) -> None:
        self._rules = rules
        self._options = options = rules.options
        # The score of each text that continues.
        self._scores = np.zeros(1, np.float32)
        self._logprobs: list[list[TokenLogprobs]] = [[]]
        self._grammars = [grammar]
        # The ended texts, best first.
        self._finished: list[Finished] = []
        # Number of continuations of a text that are needed, so that one remains if the others end the text.
        self._least = max(2, 1 + len(rules.end_token_ids))
        self._kept = self._least * options.num_beams
        # Number of best continuations of a text that are needed; 0: all.
        self._needed = options.top_k and max(options.top_k, self._least) if options.do_sample else self._kept

    @property
    def best(self) -> list[Finished]:
        """The requested texts of a search that has ended, best first. There is at least one text."""
        return self._finished[: max(1, self._options.num_return_sequences)]

    def advance(self, texts: Sequence[Sequence[int]], scores: TokenScores) -> list[BeamStep]:
        """Returns the texts that follow `texts`; none when the search has ended.

        `texts`: all tokens so far of each text. `scores`: the scores of a run for each text.

        Raises NotFinite, and InvalidInput if no token may follow.
        """
        options, length = self._options, len(texts[0]) + 1 - self._rules.prompt_tokens
        continuations = self._continuations(texts, scores)
        if not continuations and not self._finished:
            raise InvalidInput("options", f"no token may follow the text after {length - 1} tokens: all are excluded")
        is_last = length >= options.max_new_tokens
        ends = [is_last or step.token_id in self._rules.end_token_ids for step, _ in continuations]
        for (step, score), has_ended in zip(continuations[: options.num_beams], ends, strict=False):
            if has_ended:
                normalized = float(np.float32(score / np.float32(float(length) ** options.length_penalty)))
                reason = _END if step.token_id in self._rules.end_token_ids else _LENGTH
                token_ids, logprobs = [*texts[step.parent], step.token_id], self._with_logprobs(step, scores)
                self._finished.append(Finished(token_ids, reason, normalized, logprobs))
        self._finished = sorted(self._finished, key=lambda text: -text.score)[: options.num_beams]
        running = [scored for scored, has_ended in zip(continuations, ends, strict=True) if not has_ended]
        running = sorted(running, key=lambda scored: -scored[1])[: options.num_beams]  # drawn texts have no order
        self._scores = np.array([score for _, score in running], np.float32)
        self._logprobs = [self._with_logprobs(step, scores) for step, _ in running]
        grammars = (self._grammars[step.parent] for step, _ in running)
        self._grammars = [grammar and grammar.copy() for grammar in grammars]
        return [step for step, _ in running] if running and self._can_improve(length) else []

    def _with_logprobs(self, step: BeamStep, scores: TokenScores) -> list[TokenLogprobs]:
        """Returns the log probabilities of a text's new tokens and of the next token; empty if none are requested."""
        if not self._options.HasField("top_logprobs"):
            return []
        last = token_logprobs(step.token_id, scores, step.parent, self._options.top_logprobs)
        return [*self._logprobs[step.parent], last]

    def _can_improve(self, length: int) -> bool:
        """Returns whether a text that continues may become better than the ended texts."""
        options = self._options
        if len(self._finished) < options.num_beams:
            return True
        if options.early_stopping == EarlyStopping.EARLY_STOPPING_TRUE:
            return False
        if options.early_stopping == EarlyStopping.EARLY_STOPPING_NEVER and options.length_penalty > 0:
            length = options.max_new_tokens
        best = np.float32(self._scores[0] / np.float32(float(length) ** options.length_penalty))
        return float(best) > self._finished[-1].score

    def _continuations(self, texts: Sequence[Sequence[int]], scores: TokenScores) -> list[tuple[BeamStep, np.float32]]:
        """Returns the best continuations of all texts with their scores, best first; with do_sample, draws them."""
        parents: list[int] = []
        tokens, totals = [], []
        for row, text in enumerate(texts):
            if not np.isfinite(scores.top_logits[row, 0]):
                raise NotFinite
            ids, log_probabilities = self._of_row(text, scores, row)
            parents += [row] * len(ids)
            tokens.append(ids)
            totals.append(log_probabilities + self._scores[row])
        all_scores, all_ids, all_parents = np.concatenate(totals), np.concatenate(tokens), np.array(parents)
        if self._options.do_sample:
            position = len(texts[0]) - self._rules.prompt_tokens
            order = np.argsort(-(all_scores + gumbels(self._options.seed, position, len(all_scores))))[: self._kept]
        else:
            order = np.lexsort((all_ids, all_parents, -all_scores))[: self._kept]
        kept = zip(all_parents[order].tolist(), all_ids[order].tolist(), all_scores[order], strict=True)
        return [(BeamStep(parent, token_id), score) for parent, token_id, score in kept if score > -np.inf]

    def _of_row(self, text: Sequence[int], scores: TokenScores, row: int) -> tuple[_Ids, _Floats]:
        """Returns tokens that may follow a text, with their log probabilities after the options' rules.

        Contains at least the best tokens.
        """
        ids, log_probabilities = self._allowed(text, scores, row)
        if not self._options.do_sample:
            return ids, log_probabilities
        order = np.lexsort((ids, -log_probabilities))
        best = float(log_probabilities[order[0]]) / max(self._options.temperature, LEAST_TEMPERATURE)
        ids, scaled = warped(self._options, ids[order], log_probabilities[order], self._least)
        return ids, (best + scaled).astype(np.float32)

    def _allowed(self, text: Sequence[int], scores: TokenScores, row: int) -> tuple[_Ids, _Floats]:
        """Does the same as `_of_row`, but before temperature, top_k, top_p and min_p."""
        forced, allowed = self._rules.forced(text, self._grammars[row])
        if forced is not None:
            return np.array([forced], np.int32), np.zeros(1, np.float32)
        changes = self._rules.changes
        banned, best, log_sum = self._rules.banned.after(text), scores.top_logits[row, 0], scores.log_sums[row]
        rescores = changes.rescores or (banned and changes.renormalizes)
        best_tokens = None if rescores else best_allowed(scores, row, banned, allowed, self._needed)
        if best_tokens is None:
            return changes.apply(text, scores.logits[row] - best - log_sum, banned, allowed)
        # Tokens with the score of the last needed token are among the first tokens. Sorting more would take time.
        first = slice(None if self._options.do_sample else 2 * self._needed)
        return best_tokens[0][first], best_tokens[1][first] - best - log_sum
