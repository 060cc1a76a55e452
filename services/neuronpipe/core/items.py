"""The seam between the pipeline and its stages: values, and the three stages as functions of them.

A stage is an async function from an item to a value, and raises the errors of core/errors.py. Whoever holds `Stages` cannot tell near
from far: in one process they are methods of the stage objects; over the network they send the item along with others, and what is a
message is decided there alone (rpc/codecs.py).
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
    """What all items have: whose work it is, and the model that it is for."""

    call: Call
    model: ModelKey

    @property
    @abstractmethod
    def size_bytes(self) -> int:
        """About what it takes in a message."""


@dataclass(frozen=True, slots=True)
class TokenizeItem(StageItem):
    """One input to encode."""

    input: Packed[TaskInput]

    @property
    def size_bytes(self) -> int:
        return self.input.size_bytes


@dataclass(frozen=True, slots=True)
class EncodedInput:
    """An encoded input: `sequences` for the executor (input_ids int32 [tokens], …), `annotations` for the task's decoding.

    `tokens`: in all sequences; `truncated_tokens`: dropped to fit the model.
    """

    sequences: TensorSets
    annotations: TensorSets = NO_TENSORS
    tokens: int = 0
    truncated_tokens: int = 0
    token_cache: "CacheOutcome.ValueType" = CacheOutcome.CACHE_OUTCOME_UNSPECIFIED

    @property
    def size_bytes(self) -> int:
        """About what it takes in a message."""
        return self.sequences.size_bytes + self.annotations.size_bytes


@dataclass(frozen=True, slots=True)
class ExecuteItem(StageItem):
    """The sequences of one input, to run."""

    sequences: TensorSets

    @property
    def size_bytes(self) -> int:
        return self.sequences.size_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """The model's outputs for one input, a set a sequence in order, and how they came about (stages.proto)."""

    outputs: TensorSets
    queue_ns: int = 0
    compute_ns: int = 0
    batch_size: int = 0
    bucket_tokens: int = 0
    padded_tokens: int = 0

    @property
    def size_bytes(self) -> int:
        """About what it takes in a message."""
        return self.outputs.size_bytes


@dataclass(frozen=True, slots=True)
class PostprocessItem(StageItem):
    """The outputs of one input, to decode. `input`: the one that was encoded; far stages get the part of it that decoding needs."""

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
