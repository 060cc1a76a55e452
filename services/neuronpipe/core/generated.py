"""The tokens of a text while it is generated, on their way from a stage to the task that reads them.

Steps are tuples, as items are: several are made for each token.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from neuronpipe.api.v1.stages_pb2 import GenerationFigures


class TokenLogprobs(NamedTuple):
    """The log probability of a token, and the log probabilities of the most probable tokens, best first."""

    logprob: float
    top_token_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


_NO_FIGURES = GenerationFigures()


class NewTokens(NamedTuple):
    """The tokens that an item got in a step, and the figures of the text so far. `logprobs`: where they are asked for.

    `is_waiting`: the text does not compute now, because its grammar is being compiled or its search has begun. Other
    requests may run until its next message. Messages that begin or end this wait have no tokens.
    """

    token_ids: Sequence[int] = ()
    figures: GenerationFigures = _NO_FIGURES
    logprobs: Sequence[TokenLogprobs] = ()
    is_waiting: bool = False


class TokenSink(Protocol):
    """Takes the tokens of one text from the stage that generates them."""

    def put(self, tokens: NewTokens) -> None:
        """Adds the tokens of a step, on the event loop."""


class Released(NamedTuple):
    """Text that cannot change any more, the number of its tokens, and the stop string that ended it, or none."""

    text: str
    tokens: int
    stop_string: str = ""

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return bool(self.stop_string)
