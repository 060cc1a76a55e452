"""The interface between the pipeline and its stages: values, and the three stages as functions of them.

A stage is an async function from an item to a value, and for a text it puts the tokens into a sink as they come. It
raises the errors of core/errors.py. In one process, `Stages` are methods of the stage objects. Over the network, they
send the item together with others; only rpc/ knows the messages of the streams, except GenerationFigures.

The values are tuples, because making a frozen dataclass of six fields takes 1.6 µs, and a tuple 0.4 µs.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

from neuronpipe.api.v1.inference_pb2 import CacheOutcome
from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, TaskInput, TaskResult
from neuronpipe.core.calls import Call
from neuronpipe.core.deadlines import HeldTime
from neuronpipe.core.generated import Released
from neuronpipe.core.model import base_name
from neuronpipe.core.packed import NO_TENSORS, Packed, TensorSets
from neuronpipe.core.tracing import SpanContext


class ModelKey(NamedTuple):
    """A model's name and version. The name of an adapter is BASE/NAME."""

    name: str
    version: int

    @property
    def base(self) -> "ModelKey":
        """The model that computes: the base of an adapter, or the model itself."""
        return ModelKey(base_name(self.name), self.version) if "/" in self.name else self


class Work(NamedTuple):
    """The part of an item's context that is made once per stage. `Call` has the part that is constant.

    - `trace`: the span of the stage's work, sampled or not; None without a span.
    - `cost_tokens`: the cost in tokens, estimated until the input is tokenized; 0 if unknown.
    - `is_beyond_share`: the tenant had more than its share when the request began to run, so the executor runs others
      first.
    - `weight`: the tenant's part of what tenants share.
    - `held`: the gateway's record of held time; never sent.
    """

    trace: SpanContext | None = None
    cost_tokens: int = 0
    is_beyond_share: bool = False
    weight: float = 1.0
    held: HeldTime | None = None


NO_WORK = Work()

# Inputs of up to this size are small for every lane.
_SMALL_BYTES = 1 << 10
# Inputs beyond this size are not read on the event loop. Parsing, checking and hashing an input of this size takes 0.05
# ms for an image and 0.13 ms for a text. Switching to a lane's thread and back takes about as long (measured
# 2026-11-22, 2 virtual cores).
LARGE_INPUT_BYTES = 64 << 10


class StageItem(Protocol):
    """The fields of all items: the call to which the item belongs, the model, and the context of the stage."""

    @property
    def call(self) -> Call: ...

    @property
    def model(self) -> ModelKey: ...

    @property
    def work(self) -> Work: ...

    @property
    def size_bytes(self) -> int:
        """The approximate size of the item in a message."""


class TokenizeItem(NamedTuple):
    """One input to encode."""

    call: Call
    model: ModelKey
    input: Packed[TaskInput]
    work: Work = NO_WORK

    @property
    def size_bytes(self) -> int:
        return self.input.size_bytes


def work_bytes(input: Packed[TaskInput]) -> int:
    """Counts the bytes of an input that encoding and decoding read: a schema is for the executor alone.

    Inputs that are small or large count whole. Raises InvalidInput.
    """
    size_bytes = input.size_bytes
    if not _SMALL_BYTES < size_bytes <= LARGE_INPUT_BYTES:
        return size_bytes
    options = getattr(input.body, "options", None)
    return size_bytes - (options.ByteSize() if options else 0)


class EncodedInput(NamedTuple):
    """An encoded input: `sequences` for the executor, `annotations` for decoding, and numbers of tokens."""

    sequences: TensorSets
    annotations: TensorSets = NO_TENSORS
    tokens: int = 0
    truncated_tokens: int = 0
    token_cache: "CacheOutcome.ValueType" = CacheOutcome.CACHE_OUTCOME_UNSPECIFIED

    @property
    def size_bytes(self) -> int:
        return self.sequences.size_bytes + self.annotations.size_bytes


class ExecuteItem(NamedTuple):
    """The sequences of one input, for the executor.

    - `options`: the options of a task that generates, with every field set.
    - `sequence`: the number of the text among the texts that are drawn for one prompt, from 0 on.
    """

    call: Call
    model: ModelKey
    sequences: TensorSets
    options: GenerationOptions | None = None
    sequence: int = 0
    work: Work = NO_WORK

    @property
    def size_bytes(self) -> int:
        return self.sequences.size_bytes


class Prediction(NamedTuple):
    """The model's outputs for one input, one set for each sequence in order, and their timings (stages.proto).

    `generation`: set for an item that generates. Its outputs are token_ids, int32 [tokens], and finish_reason, int32
    []. A beam search has a set for each text that it found, best first, with the text's score, float32 []. Where log
    probabilities are asked for, a set has the arrays of logprob_arrays.
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
        return self.outputs.size_bytes


NO_PREDICTION = Prediction(NO_TENSORS)


class PostprocessItem(NamedTuple):
    """The outputs of one input, to be decoded. Remote stages get only the fields of `input` that decoding reads."""

    call: Call
    model: ModelKey
    input: Packed[TaskInput]
    annotations: TensorSets
    outputs: TensorSets
    work: Work = NO_WORK

    @property
    def size_bytes(self) -> int:
        return self.input.size_bytes + self.annotations.size_bytes + self.outputs.size_bytes

    @property
    def work_bytes(self) -> int:
        """The size in bytes of what decoding reads. Raises InvalidInput."""
        return work_bytes(self.input) + self.annotations.size_bytes + self.outputs.size_bytes


class DetokenizeItem(NamedTuple):
    """New tokens of a text that continues, and the tokens before them. `options`: the options of its generation."""

    model: ModelKey
    options: GenerationOptions
    window: Sequence[int]
    token_ids: Sequence[int]

    @property
    def size_bytes(self) -> int:
        return 4 * (len(self.window) + len(self.token_ids))


Tokenize: TypeAlias = Callable[[TokenizeItem], Awaitable[EncodedInput]]
# Takes an ExecuteItem, and for a text also a TokenSink, which gets the tokens as they come.
Execute: TypeAlias = Callable[..., Awaitable[Prediction]]
Postprocess: TypeAlias = Callable[[PostprocessItem], Awaitable[Packed[TaskResult]]]
# Returns the text of tokens without waiting, or None if `Postprocess` must make it.
Detokenize: TypeAlias = Callable[[DetokenizeItem], Released | None]


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline's three stages. `detokenize`: None where another process has the post-process stage."""

    tokenize: Tokenize
    execute: Execute
    postprocess: Postprocess
    detokenize: Detokenize | None = None
