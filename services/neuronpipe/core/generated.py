"""The tokens of a text while it is generated, on their way from a stage to the task that reads them.

Steps are tuples, as items are: several are made for each token.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import NamedTuple, Protocol, TypeVar

from neuronpipe.api.v1.stages_pb2 import GenerationFigures

ValueT = TypeVar("ValueT")

# A task that is woken for each step takes 3 µs for it (2026-11-29, CPython 3.11, 2 virtual cores).
_LATER_S = 0.02


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


class TokenStream:
    """The tokens of one text between the stage that generates them and the task that reads them."""

    __slots__ = ("_alarm", "_has_news", "_is_urgent", "_waiting")

    def __init__(self, *, is_urgent: bool = True) -> None:
        """`is_urgent`: the reader gets each step at once, else only the first step, and the others a little later."""
        self._waiting: list[NewTokens] = []
        self._has_news = asyncio.Event()
        self._is_urgent = is_urgent
        self._alarm: asyncio.TimerHandle | None = None

    def put(self, tokens: NewTokens) -> None:
        self._waiting.append(tokens)
        if self._is_urgent:
            self._has_news.set()
        elif not self._alarm:
            self._has_news.set()
            self._alarm = asyncio.get_running_loop().call_later(_LATER_S, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._waiting:
            self._has_news.set()

    async def read(self, generating: Awaitable[ValueT]) -> AsyncGenerator[NewTokens | ValueT, None]:
        """Runs the generation of the text, and yields the tokens as they come and in the end the item's value. The
        error of the generation is raised after the tokens. Closing this generator cancels the generation. A slow reader
        gets the tokens of all steps that wait together.
        """
        task = asyncio.ensure_future(generating)
        task.add_done_callback(lambda _: self._has_news.set())
        try:
            while not task.done() or self._waiting:
                await self._has_news.wait()
                self._has_news.clear()
                if self._waiting:
                    waiting, self._waiting = self._waiting, []
                    yield waiting[0] if len(waiting) == 1 else _joined(waiting)
            yield await task
        finally:
            if self._alarm:
                self._alarm.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait([task])
            if not task.cancelled():
                task.exception()  # or asyncio logs that it was not looked at
            del task  # an error keeps this frame


def _joined(steps: Sequence[NewTokens]) -> NewTokens:
    last = next((step for step in reversed(steps) if step.token_ids), steps[-1])
    token_ids = [token_id for step in steps for token_id in step.token_ids]
    logprobs = [logprob for step in steps for logprob in step.logprobs]
    return NewTokens(token_ids, last.figures, logprobs, steps[-1].is_waiting)
