"""The interface between the pipeline and its stages: values, and the three stages as functions of them.

A stage is an async function from an item to a value, and raises the errors of core/errors.py. Users of `Stages` cannot
tell local from remote stages. In one process, they are methods of the stage objects. Over the network, they send the
item together with others; only rpc/codecs.py knows the messages.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
from neuronpipe.core.calls import Call
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
    """The sequences of one input, for the executor."""

    sequences: TensorSets

    @property
    def size_bytes(self) -> int:
        return self.sequences.size_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """The model's outputs for one input, one set for each sequence in order, and their timings (stages.proto)."""

    outputs: TensorSets
    queue_ns: int = 0
    compute_ns: int = 0
    batch_size: int = 0
    bucket_tokens: int = 0
    padded_tokens: int = 0

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
