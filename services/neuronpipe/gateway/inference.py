"""The requests that doors pass to the pipeline, and its results."""

from dataclasses import dataclass
from typing import TypeAlias

from neuronpipe.api.v1.inference_pb2 import CacheControl, CacheOutcome
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import NeuronpipeError
from neuronpipe.core.items import EncodedInput, ModelKey
from neuronpipe.core.packed import Packed, TensorSets


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """One input for one model, in a caller's words: without a version the newest one answers.

    `encoded`: what the model itself takes, of a caller who tokenized; in place of `input`.
    """

    call: Call
    model: str
    version: str
    input: Packed[TaskInput]
    cache_control: "CacheControl.ValueType" = CacheControl.CACHE_CONTROL_UNSPECIFIED
    encoded: EncodedInput | None = None


@dataclass(frozen=True, slots=True)
class StageTimings:
    """Durations in nanoseconds (inference.proto). Of a result that was cached only the total."""

    total_ns: int
    preprocess_ns: int = 0
    predict_ns: int = 0
    postprocess_ns: int = 0
    predict_queue_ns: int = 0
    predict_compute_ns: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """The tokens, batches and caches of a request (inference.proto)."""

    tokens: int = 0
    truncated_tokens: int = 0
    batch_size: int = 0
    bucket_tokens: int = 0
    token_cache: "CacheOutcome.ValueType" = CacheOutcome.CACHE_OUTCOME_UNSPECIFIED
    padded_tokens: int = 0
    result_cache: "CacheOutcome.ValueType" = CacheOutcome.CACHE_OUTCOME_UNSPECIFIED


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
    """The answer to one request."""

    request_id: str
    model: ModelKey
    result: Packed[TaskResult]
    usage: Usage
    timings: StageTimings


# What became of one of many requests.
InferenceOutcome: TypeAlias = InferenceResult | NeuronpipeError
