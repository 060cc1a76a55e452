"""The interface between the pipeline and its stages: values, and the three stages as functions of them.

A stage is an async function from an item to a value, and raises the errors of core/errors.py. Users of `Stages` cannot
tell local from remote stages. In one process, they are methods of the stage objects. Over the network, they send the
item together with others; only rpc/codecs.py knows the messages.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self, TypeAlias

from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, TaskInput, TaskResult
from neuronpipe.core.calls import Call
from neuronpipe.core.generated import Report
from neuronpipe.core.packed import NO_TENSORS, Packed, TensorSets


class ModelKey(NamedTuple):
    """A model's name and version."""

    name: str
    version: int


@dataclass(frozen=True, slots=True)
class StageItem(ABC):
    """The fields of all items: the call to which it belongs, and the model."""

    call: Call
    model: ModelKey

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """The approximate size of the item in a message."""

    def reporting(self, report: "Report") -> Self:
        """The item with a listener to what the stage has before its value, if it has any."""
        return self


@dataclass(frozen=True, slots=True)
class TokenizeItem(StageItem):
    """One input to encode."""

    input: Packed[TaskInput]

    @property
    def size_bytes(self) -> int:
        return self.input.size_bytes


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """An encoded input.

    `sequences` are for the executor (input_ids int32 [tokens], …), `annotations` for the task's decoding. `tokens`: the
    number in all sequences. `truncated_tokens`: the number that truncation dropped.
    """

    sequences: TensorSets
    annotations: TensorSets = NO_TENSORS
    tokens: int = 0
    truncated_tokens: int = 0
    token_cache: "CacheOutcome.ValueType" = CacheOutcome.CACHE_OUTCOME_UNSPECIFIED

    @property
    def size_bytes(self) -> int:
        """The approximate size of the value in a message."""
        return self.sequences.size_bytes + self.annotations.size_bytes


@dataclass(frozen=True, slots=True)
class ExecuteItem(StageItem):
    """The sequences of one input, for the executor.

    `options`: of a task that generates, with every field set. `report`: gets its tokens as they come. `sequence`: which
    of the texts that are drawn for one prompt it is, from 0 on.
    """

    sequences: TensorSets
    options: GenerationOptions | None = None
    report: Report | None = None
    sequence: int = 0

    @property
    def size_bytes(self) -> int:
        return self.sequences.size_bytes

    def reporting(self, report: Report) -> Self:
        return replace(self, report=report) if self.options else self


@dataclass(frozen=True, slots=True)
class Prediction:
    """The model's outputs for one input, one set for each sequence in order, and their timings (stages.proto).

    `generation`: of an item that generates, whose outputs are token_ids, int32 [tokens], and finish_reason, int32 [].
    Of a beam search there is a set for each text that it has found, best first, with its score, float32 [], and where
    they are asked for, the arrays of logprob_arrays.
    """

    outputs: TensorSets
    queue_ns: int = 0
    compute_ns: int = 0
    batch_size: int = 0
    bucket_tokens: int = 0
    padded_tokens: int = 0
    generation: GenerationFigures | None = None

    @property
    def size_bytes(self) -> int:
        """The approximate size of the value in a message."""
        return self.outputs.size_bytes


NO_PREDICTION = Prediction(NO_TENSORS)


@dataclass(frozen=True, slots=True)
class PostprocessItem(StageItem):
    """The outputs of one input, to be decoded.

    `input` is the one that was encoded. Remote stages get only the fields that decoding reads.
    """

    input: Packed[TaskInput]
    annotations: TensorSets
    outputs: TensorSets

    @property
    def size_bytes(self) -> int:
        return self.input.size_bytes + self.annotations.size_bytes + self.outputs.size_bytes


Tokenize: TypeAlias = Callable[[TokenizeItem], Awaitable[EncodedInput]]
Execute: TypeAlias = Callable[[ExecuteItem], Awaitable[Prediction]]
Postprocess: TypeAlias = Callable[[PostprocessItem], Awaitable[Packed[TaskResult]]]


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline's three stages."""

    tokenize: Tokenize
    execute: Execute
    postprocess: Postprocess
