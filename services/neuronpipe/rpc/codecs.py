"""Converts values to messages: one codec for each stage, for items and for outcomes, in both directions.

The codecs fill messages in place, because a message that is passed to another message's constructor is serialized and
parsed again. They copy repeated fields by a slice: in upb, iterating over one takes a microsecond more.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any, Protocol, TypeVar

from neuronpipe.api.forward.v1 import stages_pb2 as wire
from neuronpipe.api.v1.stages_pb2 import Announcement, ItemContext, NeededModels
from neuronpipe.api.v1.tasks_pb2 import TaskInput, TaskResult
from neuronpipe.core.callers import ANONYMOUS, Caller
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, ModelNotFound
from neuronpipe.core.generated import NewTokens, TokenLogprobs
from neuronpipe.core.items import (
    EncodedInput,
    ExecuteItem,
    ModelKey,
    PostprocessItem,
    Prediction,
    StageItem,
    TokenizeItem,
    Work,
)
from neuronpipe.core.packed import Packed, TensorSets
from neuronpipe.core.streams import Preparation, ProcessModels
from neuronpipe.core.tracing import SpanContext
from neuronpipe.tasks import ANSWERED_TASKS

ItemT = TypeVar("ItemT", bound=StageItem)
ValueT = TypeVar("ValueT")

# Removing fields from an input below this size takes longer than sending all of it.
_SMALL_INPUT_BYTES = 512
# Almost 300 years: the longest deadline that the message can hold.
_FOREVER_NS = (1 << 63) - 1
# Digits of a version.
_MAX_DIGITS = 18


class Codec(Protocol[ItemT, ValueT]):
    """The messages of one stage, from the package neuronpipe.forward.v1."""

    def write_item(self, item: ItemT, message: Any) -> None:
        """Fills an empty message of an item, except the item_id of its context.

        Raises DeadlineExceeded if no time is left.
        """

    def read_item(self, message: Any) -> ItemT:
        """Converts a message to an item. Raises ModelNotFound."""

    def write_value(self, value: ValueT, outcome: Any) -> None:
        """Fills an empty outcome, except its item_id, with the value that the stage returned."""

    def read_value(self, outcome: Any) -> ValueT:
        """Converts an outcome that is not an error to the value that the stage returned."""

    def pack(self, value: ValueT) -> int:
        """Serializes the contents of a value, which keeps the bytes. Returns their number."""


class TokenizeCodec:
    """See Codec."""

    def write_item(self, item: TokenizeItem, message: wire.TokenizeItem) -> None:
        _write_head(item, message)
        message.input = item.input.data

    def read_item(self, message: wire.TokenizeItem) -> TokenizeItem:
        call, model, work = _read_head(message)
        return TokenizeItem(call, model, Packed(TaskInput, data=message.input), work)

    def write_value(self, value: EncodedInput, outcome: wire.TokenizeOutcome) -> None:
        encoded = outcome.encoded
        encoded.sequences.extend(value.sequences.data)
        if annotations := value.annotations.data:
            encoded.annotations.extend(annotations)
        encoded.tokens = value.tokens
        encoded.truncated_tokens = value.truncated_tokens
        encoded.token_cache = value.token_cache

    def read_value(self, outcome: wire.TokenizeOutcome) -> EncodedInput:
        encoded = outcome.encoded
        return EncodedInput(
            TensorSets(data=encoded.sequences[:]),
            TensorSets(data=encoded.annotations[:]),
            encoded.tokens,
            encoded.truncated_tokens,
            encoded.token_cache,
        )

    def pack(self, value: EncodedInput) -> int:
        return sum(map(len, value.sequences.data)) + sum(map(len, value.annotations.data))


class ExecuteCodec:
    """See Codec."""

    def write_item(self, item: ExecuteItem, message: wire.ExecuteItem) -> None:
        _write_head(item, message)
        message.sequences.extend(item.sequences.data)
        if item.options:
            message.options.CopyFrom(item.options)
            message.sequence = item.sequence

    def read_item(self, message: wire.ExecuteItem) -> ExecuteItem:
        call, model, work = _read_head(message)
        options = message.options if message.HasField("options") else None
        sequences = TensorSets(data=message.sequences[:])
        return ExecuteItem(call, model, sequences, options, message.sequence, work=work)

    def write_value(self, value: Prediction | NewTokens, outcome: wire.ExecuteOutcome) -> None:
        if isinstance(value, NewTokens):
            outcome.new_tokens.token_ids.extend(value.token_ids)
            outcome.new_tokens.figures.CopyFrom(value.figures)
            outcome.new_tokens.is_waiting = value.is_waiting
            for token in value.logprobs:
                outcome.new_tokens.logprobs.add(
                    logprob=token.logprob, top_token_ids=token.top_token_ids, top_logprobs=token.top_logprobs
                )
            return
        prediction = outcome.prediction
        if value.generation:
            prediction.generation.CopyFrom(value.generation)
        prediction.outputs.extend(value.outputs.data)
        prediction.queue_ns = value.queue_ns
        prediction.compute_ns = value.compute_ns
        prediction.batch_size = value.batch_size
        prediction.bucket_tokens = value.bucket_tokens
        prediction.padded_tokens = value.padded_tokens

    def read_value(self, outcome: wire.ExecuteOutcome) -> Prediction | NewTokens:
        if outcome.HasField("new_tokens"):
            tokens = outcome.new_tokens
            logprobs = [
                TokenLogprobs(token.logprob, list(token.top_token_ids), list(token.top_logprobs))
                for token in tokens.logprobs
            ]
            return NewTokens(list(tokens.token_ids), tokens.figures, logprobs, tokens.is_waiting)
        prediction = outcome.prediction
        return Prediction(
            TensorSets(data=prediction.outputs[:]),
            queue_ns=prediction.queue_ns,
            compute_ns=prediction.compute_ns,
            batch_size=prediction.batch_size,
            bucket_tokens=prediction.bucket_tokens,
            padded_tokens=prediction.padded_tokens,
            generation=prediction.generation if prediction.HasField("generation") else None,
        )

    def pack(self, value: Prediction) -> int:
        return sum(map(len, value.outputs.data))


class PostprocessCodec:
    """See Codec. Sends only the fields of the input that the task's decoding reads."""

    def write_item(self, item: PostprocessItem, message: wire.PostprocessItem) -> None:
        _write_head(item, message)
        message.input = _decoding_part(item.input)
        if annotations := item.annotations.data:
            message.annotations.extend(annotations)
        message.outputs.extend(item.outputs.data)

    def read_item(self, message: wire.PostprocessItem) -> PostprocessItem:
        call, model, work = _read_head(message)
        annotations, outputs = TensorSets(data=message.annotations[:]), TensorSets(data=message.outputs[:])
        return PostprocessItem(call, model, Packed(TaskInput, data=message.input), annotations, outputs, work=work)

    def write_value(self, value: Packed[TaskResult], outcome: wire.PostprocessOutcome) -> None:
        outcome.result = value.data

    def read_value(self, outcome: wire.PostprocessOutcome) -> Packed[TaskResult]:
        return Packed(TaskResult, data=outcome.result)

    def pack(self, value: Packed[TaskResult]) -> int:
        return len(value.data)


def write_announcement(models: ProcessModels, max_message_bytes: int, announcement: Announcement) -> None:
    """Fills an empty announcement with the models and the message limit of a process."""
    announcement.max_message_bytes = max_message_bytes
    for key in sorted(models.ready):
        announcement.models.add(name=key.name, version=str(key.version), digest=models.digests.get(key, ""))
    for (name, version), problem in sorted(models.problems.items()):
        announcement.failed.add(name=name, version=str(version), problem=problem)
    for (name, version), is_loading in sorted(models.unloaded.items()):
        announcement.unloaded.add(name=name, version=str(version), is_loading=is_loading)
    for (name, version), preparation in sorted(models.prepared.items()):
        announcement.prepared.add(name=name, version=str(version), **asdict(preparation))


def write_models(models: Iterable[ModelKey], message: NeededModels) -> None:
    for model in sorted(models):
        message.models.add(name=model.name, version=str(model.version))


def read_models(message: Announcement | NeededModels) -> frozenset[ModelKey]:
    return frozenset(key for key, _ in _versions(message.models))


def read_announcement(announcement: Announcement) -> ProcessModels:
    """Returns the models of a process in its announcement."""
    return ProcessModels(
        ready=read_models(announcement),
        problems={key: model.problem for key, model in _versions(announcement.failed)},
        unloaded={key: model.is_loading for key, model in _versions(announcement.unloaded)},
        prepared={
            key: Preparation(model.shapes, model.shapes_ready, model.lone_graphs, model.lone_graph_bytes)
            for key, model in _versions(announcement.prepared)
        },
        digests={key: model.digest for key, model in _versions(announcement.models) if model.digest},
    )


def _versions(models: Iterable[Any]) -> Iterator[tuple[ModelKey, Any]]:
    """Yields the messages of models by their keys."""
    for model in models:
        # int() raises ValueError from 4,301 digits on, and any client that reaches a stage may send them.
        if model.version.isdecimal() and len(model.version) <= _MAX_DIGITS:
            yield ModelKey(model.name, int(model.version)), model


def _decoding_part(input: Packed[TaskInput]) -> bytes:
    if input.size_bytes <= _SMALL_INPUT_BYTES:
        return input.data
    return ANSWERED_TASKS[input.task or ""].decoding_part(input.message).SerializeToString()


def _write_head(item: StageItem, message: Any) -> None:
    call, work, context = item.call, item.work, message.context
    message.model, message.version = item.model.name, str(item.model.version)
    context.request_id = call.request_id
    context.priority = call.priority
    context.cost_tokens = work.cost_tokens
    if call.caller is not ANONYMOUS:
        context.tenant, context.cache_scope = call.caller.tenant, call.caller.cache_scope
    if work.is_beyond_share:
        context.is_beyond_share = True
    if work.weight != 1:
        context.weight = work.weight
    if work.trace:
        context.traceparent, context.tracestate = work.trace.traceparent, work.trace.tracestate
    remaining_s = call.remaining_s
    if remaining_s is not None:
        if remaining_s <= 0:
            raise DeadlineExceeded("the deadline passed between two stages")
        context.remaining_ns = min(_FOREVER_NS, int(remaining_s * 1e9) or 1)


def _read_head(message: Any) -> tuple[Call, ModelKey, Work]:
    """Returns the fields that all items have. Raises ModelNotFound."""
    context: ItemContext = message.context
    try:
        model = ModelKey(message.model, int(message.version))
    except ValueError:  # no gateway of this project sends this
        raise ModelNotFound(f"model {message.model!r} has no version {message.version!r}") from None
    remaining_ns, tenant, cache_scope = context.remaining_ns, context.tenant, context.cache_scope
    deadline_s = time.monotonic() + remaining_ns / 1e9 if remaining_ns else None
    caller = Caller("", tenant, cache_scope) if tenant or cache_scope else ANONYMOUS
    trace = SpanContext.parse(context.traceparent, context.tracestate) if context.traceparent else None
    work = Work(trace, context.cost_tokens, context.is_beyond_share, context.weight or 1.0)
    return Call(context.request_id, deadline_s, context.priority, None, caller), model, work
