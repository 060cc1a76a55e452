"""What a stage tells of a text while it is generated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from neuronpipe.api.v1.stages_pb2 import GenerationFigures


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probability of a token, and of the most probable ones, best first."""

    logprob: float
    top_token_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class NewTokens:
    """The tokens that an item got in a step, and what it took so far. `logprobs`: where they are asked for."""

    token_ids: Sequence[int]
    figures: GenerationFigures
    logprobs: Sequence[TokenLogprobs] = ()


# Called on the event loop with the tokens of each step.
Report: TypeAlias = Callable[[NewTokens], None]
