"""Beam search over one request's texts, as transformers' `generate` does it for a batch of one.

Source: GenerationMixin._beam_search in transformers/generation/utils.py (5.23). Scores are float32, as there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from neuronpipe.api.v1.tasks_pb2 import EarlyStopping, GenerationOptions
from neuronpipe.neuron_executor.generation.sampling import NO_FACTS, NotFinite, TokenRules
from neuronpipe.runtimes.decoder import Scores
from neuronpipe.tasks.text_generation import GenerationFacts

_Floats = NDArray[np.float32]
_Ids = NDArray[np.int32]


class Step(NamedTuple):
    """A text that goes on: the one before it, by its place, and its next token."""

    parent: int
    token_id: int


@dataclass(frozen=True, slots=True)
class Finished:
    """A text that has ended: all its tokens, and its score."""

    token_ids: list[int]
    score: float


class BeamSearch:
    """The search of one request. Arguments as for TokenChooser."""

    def __init__(
        self,
        options: GenerationOptions,
        prompt_tokens: int,
        end_token_ids: frozenset[int],
        facts: GenerationFacts = NO_FACTS,
        read_ids: Sequence[int] = (),
    ) -> None:
        self._options = options
        self._prompt_tokens = prompt_tokens
        self._end_token_ids = end_token_ids
        self._rules = TokenRules(options, prompt_tokens, end_token_ids, facts, read_ids)
        self._scores = np.zeros(1, np.float32)
        # The best first.
        self._finished: list[Finished] = []
        # With so many best continuations, enough are left when each of the best texts ends.
        self._kept = max(2, 1 + len(end_token_ids)) * options.num_beams

    @property
    def best(self) -> Finished:
        """The result of a search that has ended."""
        return self._finished[0]

    def advance(self, texts: Sequence[Sequence[int]], scores: Scores) -> list[Step]:
        """The texts that follow `texts`, each all tokens so far; none when the search has ended.

        `scores`: of a run for each text. Raises NotFinite.
        """
        options, length = self._options, len(texts[0]) + 1 - self._prompt_tokens
        found = self._continuations(texts, scores)
        is_last = length >= options.max_new_tokens
        ends = [is_last or step.token_id in self._end_token_ids for step, _ in found]
        for (step, score), has_ended in zip(found[: options.num_beams], ends, strict=False):
            if has_ended:
                normalized = float(np.float32(score / np.float32(float(length) ** options.length_penalty)))
                self._finished.append(Finished([*texts[step.parent], step.token_id], normalized))
        self._finished = sorted(self._finished, key=lambda one: -one.score)[: options.num_beams]
        running = [one for one, has_ended in zip(found, ends, strict=True) if not has_ended][: options.num_beams]
        self._scores = np.array([score for _, score in running], np.float32)
        return [step for step, _ in running] if running and self._can_improve(length) else []

    def _can_improve(self, length: int) -> bool:
        """Whether a text that goes on may become better than those that have ended."""
        options = self._options
        if len(self._finished) < options.num_beams:
            return True
        if options.early_stopping == EarlyStopping.EARLY_STOPPING_TRUE:
            return False
        if options.early_stopping == EarlyStopping.EARLY_STOPPING_NEVER and options.length_penalty > 0:
            length = options.max_new_tokens
        best = np.float32(self._scores[0] / np.float32(float(length) ** options.length_penalty))
        return float(best) > self._finished[-1].score

    def _continuations(self, texts: Sequence[Sequence[int]], scores: Scores) -> list[tuple[Step, np.float32]]:
        """The best continuations of all texts with their scores, best first."""
        parents, tokens, totals = [], [], []
        for row, text in enumerate(texts):
            if not np.isfinite(scores.top_logits[row, 0]):
                raise NotFinite
            ids, log_probabilities = self._of_row(text, scores, row)
            parents.append(np.full(len(ids), row))
            tokens.append(ids)
            totals.append(log_probabilities + self._scores[row])
        all_scores, all_ids, all_parents = np.concatenate(totals), np.concatenate(tokens), np.concatenate(parents)
        order = np.lexsort((all_ids, all_parents, -all_scores))[: self._kept]
        steps = (Step(int(all_parents[place]), int(all_ids[place])) for place in order)
        return [
            (step, all_scores[place]) for step, place in zip(steps, order, strict=True) if all_scores[place] > -np.inf
        ]

    def _of_row(self, text: Sequence[int], scores: Scores, row: int) -> tuple[_Ids, _Floats]:
        """The best tokens after a text, and the logarithms of their probabilities, after the options' rules."""
        if (forced := self._rules.forced(text)) is not None:
            return np.array([forced], np.int32), np.zeros(1, np.float32)
        banned, top_ids = set(self._rules.banned(text)), scores.top_ids[row]
        best, log_sum = scores.top_logits[row, 0], scores.log_sums[row]
        if self._rules.rescores or (banned and self._rules.renormalizes) or self._kept + len(banned) > len(top_ids):
            log_probabilities = scores.logits[row] - best - log_sum
            ids = np.arange(len(log_probabilities), dtype=np.int32)
            return ids, self._rules.changed(text, log_probabilities, [*banned])
        allowed = [place for place, one in enumerate(top_ids.tolist()) if one not in banned]
        return top_ids[allowed], scores.top_logits[row, allowed] - best - log_sum
