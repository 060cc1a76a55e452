"""A load on the gateway that goes on while things happen, and remembers what became of each request."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest

from neuronpipe.client import AsyncClient
from neuronpipe.core.errors import NeuronpipeError, Unavailable
from tests.callers.requests import classify

# Of different lengths and words, so that their labels have different scores.
TEXTS = [" ".join(["one", "two", "three", "four", "five"][number % 5 :] * (1 + number)) for number in range(20)]
_CALLERS = 8
_TIMEOUT_S = 30
_PAUSE_S = 0.02
# All callers ask at the same times, so that every container gets work, and between them the CPUs have time to start
# others.
_EVERY_S = 0.05


def labels_of(scores: dict[str, float]) -> object:
    """Equal to the same labels with scores that differ by no more than float32 sums in another order do."""
    return pytest.approx(scores, abs=1e-5)


async def ask(client: AsyncClient, text: str) -> dict[str, float]:
    """The scores that the classifier gives a text."""
    response = await client.infer(classify(text), timeout_s=_TIMEOUT_S)
    return {label.label: label.score for label in response.result.text_classification.labels}


@dataclass(frozen=True)
class Failure:
    """A request that got no answer. Times are those of time.monotonic()."""

    began_s: float
    ended_s: float
    error: NeuronpipeError


@dataclass
class Load:
    """Requests so far."""

    expected: Sequence[dict[str, float]]
    # When requests began that were answered, and when they were.
    answered: list[tuple[float, float]] = field(default_factory=list)
    wrong: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    async def answers(self, count: int) -> None:
        """Returns after so many more answers."""
        wanted = len(self.answered) + count
        async with asyncio.timeout(120):
            while len(self.answered) < wanted:
                await asyncio.sleep(_PAUSE_S)

    async def caller(self, client: AsyncClient, first: int) -> None:
        """Asks for one text after the other, each once: what fails, fails."""
        number = first
        while True:
            await asyncio.sleep(_EVERY_S - time.monotonic() % _EVERY_S)
            number = (number + 1) % len(TEXTS)
            began_s = time.monotonic()
            try:
                scores = await ask(client, TEXTS[number])
            except NeuronpipeError as error:
                self.failures.append(Failure(began_s, time.monotonic(), error))
                continue
            self.answered.append((began_s, time.monotonic()))
            if scores != labels_of(self.expected[number]):
                self.wrong.append((TEXTS[number], scores))


async def _reach(client: AsyncClient) -> None:
    """Returns once a gateway answers. gRPC shares connections of one process, and may still pause after attempts that
    failed while the gateway of an earlier test was away.
    """
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            with contextlib.suppress(Unavailable):
                await client.list_models()
                return
            await asyncio.sleep(_PAUSE_S)


@asynccontextmanager
async def load(target: str) -> AsyncIterator[Load]:
    """Callers for the time of a block. What is in flight at its end gets its answer. Their client repeats nothing and
    watches no health, so that what a server does wrong is seen.
    """
    async with AsyncClient(target, retries=False) as client:
        await _reach(client)
        going = Load([await ask(client, text) for text in TEXTS])
        callers = [asyncio.create_task(going.caller(client, number)) for number in range(_CALLERS)]
        try:
            await going.answers(20)
            yield going
        finally:
            for caller in callers:
                caller.cancel()
            results = await asyncio.gather(*callers, return_exceptions=True)
        for result in results:
            if not isinstance(result, asyncio.CancelledError) and isinstance(result, BaseException):
                raise result
