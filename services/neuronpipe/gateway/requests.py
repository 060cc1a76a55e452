"""The requests that doors pass to the pipeline, and its results."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from neuronpipe.api.v1.inference_pb2 import CacheControl, GenerateStart, StageTimings, Usage
from neuronpipe.api.v1.tasks_pb2 import GeneratedText, TaskInput, TaskResult, TokenLogprob
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.core.items import EncodedInput, ModelKey
from neuronpipe.core.packed import Packed, TensorSets


class InferenceRequest(NamedTuple):
    """One input for one model, as named by the caller: without a version the route's choice answers, or the newest.

    `encoded`: the tensors of a caller who tokenized, which the model itself takes instead of `input`.
    """

    call: Call
    model: str
    version: str
    input: Packed[TaskInput]
    cache_control: "CacheControl.ValueType" = CacheControl.CACHE_CONTROL_UNSPECIFIED
    encoded: EncodedInput | None = None


class GeneratedPart(NamedTuple):
    """The next part of a text, with at least one token. `sequence`: the number of the text in its request, from 0."""

    text: str
    token_ids: list[int]
    sequence: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    is_last: bool = False


# The result of a task, or, for a request with tensors of its own, the outputs of the model: a set for each sequence.
Result: TypeAlias = Packed[TaskResult] | TensorSets


class InferenceResult(NamedTuple):
    """The answer to one request. `timings`: only the total where the result was cached."""

    request_id: str
    model: ModelKey
    value: Result
    usage: Usage
    timings: StageTimings

    @property
    def result(self) -> Packed[TaskResult]:
        """The result of a request with an input."""
        assert isinstance(self.value, Packed)  # noqa: S101 (only a request with tensors has another value)
        return self.value

    @property
    def texts(self) -> Sequence[GeneratedText]:
        """The texts of a request that generates."""
        texts: Sequence[GeneratedText] = self.result.body.sequences
        return texts

    @property
    def outputs(self) -> TensorSets:
        """The outputs of a request with tensors."""
        assert isinstance(self.value, TensorSets)  # noqa: S101 (only a request with an input has another value)
        return self.value


# The outcome of one of many requests.
InferenceOutcome: TypeAlias = InferenceResult | NeuronpipeError
# A request that generates yields its start, the parts of its texts, and its result.
TextEvent: TypeAlias = GenerateStart | GeneratedPart | InferenceResult


class TextParts:
    """The parts of texts on their way to the caller. A slow caller gets all waiting parts of a text as one part."""

    def __init__(self) -> None:
        self._waiting: list[GenerateStart | GeneratedPart] = []
        self._has_news = asyncio.Event()
        self._is_closed = False

    def put(self, part: GenerateStart | GeneratedPart) -> None:
        """Adds the start of the texts, or a part of a text."""
        self._waiting.append(part)
        self._has_news.set()

    def close(self) -> None:
        """Ends the parts: the request has its result or its error."""
        self._is_closed = True
        self._has_news.set()

    async def take(self) -> list[GenerateStart | GeneratedPart]:
        """Waits for parts, and returns all parts that wait; returns no part once the parts are closed."""
        while not (self._waiting or self._is_closed):
            self._has_news.clear()
            await self._has_news.wait()
        waiting, self._waiting = self._waiting, []
        return waiting if len(waiting) == 1 else [*_joined(waiting)]


def _joined(waiting: Iterable[GenerateStart | GeneratedPart]) -> Iterable[GenerateStart | GeneratedPart]:
    """Yields the start by itself, and all parts of a text together."""
    parts_by_text: dict[int, list[GeneratedPart]] = {}
    for part in waiting:
        if isinstance(part, GenerateStart):
            yield part
        else:
            parts_by_text.setdefault(part.sequence, []).append(part)
    for sequence, parts in parts_by_text.items():
        token_ids = [token_id for part in parts for token_id in part.token_ids]
        logprobs = [logprob for part in parts for logprob in part.logprobs]
        yield GeneratedPart("".join(part.text for part in parts), token_ids, sequence, logprobs, parts[-1].is_last)
