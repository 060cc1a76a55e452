"""What a stage tells of a text while it is generated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class GenerationFigures:
    """What generating a text took (stages.proto)."""

    queue_ns: int = 0
    prefill_ns: int = 0
    decode_ns: int = 0
    longest_gap_ns: int = 0
    steps: int = 0
    cached_tokens: int = 0


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
