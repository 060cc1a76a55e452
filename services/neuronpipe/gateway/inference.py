"""The requests that doors pass to the pipeline, and its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from neuronpipe.api.v1.inference_pb2 import CacheControl, GenerateStart, StageTimings, Usage
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult, TokenLogprob
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.core.items import EncodedInput, ModelKey
from neuronpipe.core.packed import Packed, TensorSets


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One input for one model, in a caller's words: without a version the newest one answers.

    `encoded`: what the model itself takes, of a caller who tokenized; in place of `input`. `listener`: of a request
    that generates, gets its text as it comes.
    """

    call: Call
    model: str
    version: str
    input: Packed[TaskInput]
    cache_control: "CacheControl.ValueType" = CacheControl.CACHE_CONTROL_UNSPECIFIED
    encoded: EncodedInput | None = None
    listener: "Callable[[GenerateStart | GeneratedPart], None] | None" = None


@dataclass(frozen=True, slots=True)
class GeneratedPart:
    """The next part of a text, and its tokens, at least one. `sequence`: which of the request's texts, from 0 on.

    `is_last`: the text ends with it.
    """

    text: str
    token_ids: list[int]
    sequence: int = 0
    logprobs: Sequence[TokenLogprob] = ()
    is_last: bool = False


class RawResult(Packed[TaskResult]):
    """The model's own outputs, of a request that was `encoded`: a set for each sequence, and no task's result."""

    __slots__ = ("outputs",)

    def __init__(self, outputs: TensorSets) -> None:
        super().__init__(TaskResult, message=TaskResult())
        self.outputs = outputs

    @property
    def size_bytes(self) -> int:
        """The size of the outputs."""
        return self.outputs.size_bytes


@dataclass(frozen=True, slots=True)
class InferenceResult:
    """The answer to one request. `timings`: of a result that was cached only the total."""

    request_id: str
    model: ModelKey
    result: Packed[TaskResult]
    usage: Usage
    timings: StageTimings


# What became of one of many requests.
InferenceOutcome: TypeAlias = InferenceResult | NeuronpipeError
