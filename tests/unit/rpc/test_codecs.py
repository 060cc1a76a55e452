"""rpc/codecs.py: what is written is read again, by processes that use the messages of neuronpipe.api.v1 as well."""

import time

import numpy as np
import pytest

from neuronpipe.api.forward.v1 import stages_pb2 as wire
from neuronpipe.api.v1 import stages_pb2
from neuronpipe.api.v1.inference_pb2 import CacheOutcome, Priority
from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.api.v1.tasks_pb2 import GenerationOptions, TaskResult
from neuronpipe.core.callers import Caller
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import DeadlineExceeded, ModelNotFound
from neuronpipe.core.generated import NewTokens
from neuronpipe.core.items import EncodedInput, ExecuteItem, ModelKey, PostprocessItem, Prediction, TokenizeItem, Work
from neuronpipe.core.packed import TensorSets, pack_input, pack_result
from neuronpipe.core.streams import Preparation, ProcessModels
from neuronpipe.core.tracing import SpanContext
from neuronpipe.rpc.codecs import ExecuteCodec, PostprocessCodec, TokenizeCodec, read_announcement, write_announcement
from tests.unit.task_messages import task_input, task_result

_MODEL = ModelKey("m", 3)
_INPUT = task_input(question_answering={"question": "who?", "context": "nobody"})
_TRACE = SpanContext(5, 6, True, "a=b")
_CALL = Call("mine", priority=Priority.PRIORITY_BULK, caller=Caller(tenant="a", cache_scope="b"))
_WORK = Work(_TRACE, cost_tokens=7, is_beyond_share=True, weight=0.5)


def _sets(*values: int) -> TensorSets:
    return TensorSets(arrays=[{"input_ids": np.array([value], np.int32)} for value in values])


def _numbers(sets: TensorSets) -> list[int]:
    return [int(arrays["input_ids"][0]) for arrays in sets.arrays]


def test_an_item_to_encode_is_read_as_it_was_written() -> None:
    message = wire.TokenizeItem()
    TokenizeCodec().write_item(TokenizeItem(_CALL, _MODEL, pack_input(_INPUT), work=_WORK), message)
    item = TokenizeCodec().read_item(message)
    assert (item.call, item.work, item.model, item.input.message) == (_CALL, _WORK, _MODEL, _INPUT)
    assert stages_pb2.TokenizeItem.FromString(message.SerializeToString()).input == _INPUT


def test_an_item_to_run_is_read_as_it_was_written() -> None:
    message = wire.ExecuteItem()
    ExecuteCodec().write_item(ExecuteItem(_CALL, _MODEL, _sets(1, 2), work=_WORK), message)
    item = ExecuteCodec().read_item(wire.ExecuteItem.FromString(message.SerializeToString()))
    assert (item.call, item.work, item.model, _numbers(item.sequences)) == (_CALL, _WORK, _MODEL, [1, 2])
    assert len(stages_pb2.ExecuteItem.FromString(message.SerializeToString()).sequences) == 2


def test_an_item_to_decode_is_read_with_what_decoding_needs() -> None:
    message = wire.PostprocessItem()
    asked = PostprocessItem(_CALL, _MODEL, pack_input(_INPUT), _sets(1), _sets(2, 3), work=_WORK)
    PostprocessCodec().write_item(asked, message)
    item = PostprocessCodec().read_item(message)
    assert (item.call, item.work, item.model, item.input.task) == (_CALL, _WORK, _MODEL, "question_answering")
    assert (_numbers(item.annotations), _numbers(item.outputs)) == ([1], [2, 3])


def test_values_are_read_as_they_were_written_and_packed_to_the_bytes_of_their_tensors() -> None:
    encoded, prediction = (
        EncodedInput(_sets(1), _sets(2), 3, 4, CacheOutcome.CACHE_OUTCOME_HIT_REDIS),
        Prediction(_sets(1, 2), 3, 4, 5, 6, 7),
    )
    tokenized, executed = wire.TokenizeOutcome(), wire.ExecuteOutcome()
    # Both sets are alike in size.
    assert TokenizeCodec().pack(encoded) == ExecuteCodec().pack(prediction) == 2 * len(_sets(1).data[0])
    TokenizeCodec().write_value(encoded, tokenized)
    ExecuteCodec().write_value(prediction, executed)
    read = TokenizeCodec().read_value(tokenized)
    assert (_numbers(read.sequences), _numbers(read.annotations)) == ([1], [2])
    assert (read.tokens, read.truncated_tokens, read.token_cache) == (3, 4, CacheOutcome.CACHE_OUTCOME_HIT_REDIS)
    ran = ExecuteCodec().read_value(executed)
    assert isinstance(ran, Prediction)
    assert _numbers(ran.outputs) == [1, 2]
    assert (ran.queue_ns, ran.compute_ns, ran.batch_size, ran.bucket_tokens, ran.padded_tokens) == (3, 4, 5, 6, 7)


def test_new_tokens_and_figures_of_a_text_are_read_as_they_were_written() -> None:
    figures = GenerationFigures(queue_ns=1, prefill_ns=2, decode_ns=3, longest_gap_ns=4, steps=5, cached_tokens=6)
    for value in (NewTokens([7, 8], figures), Prediction(_sets(1), generation=figures)):
        outcome = wire.ExecuteOutcome()
        ExecuteCodec().write_value(value, outcome)
        read = ExecuteCodec().read_value(outcome)
        assert type(read) is type(value)
        assert (read.figures if isinstance(read, NewTokens) else read.generation) == figures


def test_options_of_generation_travel_with_an_item() -> None:
    options = GenerationOptions(max_new_tokens=3, seed=4, stop_strings=["a"])
    message = wire.ExecuteItem()
    ExecuteCodec().write_item(ExecuteItem(Call(), ModelKey("m", 1), _sets(1), options), message)
    assert ExecuteCodec().read_item(message).options == options


def test_a_result_is_read_as_it_was_written_though_it_is_empty() -> None:
    for result in (TaskResult(), task_result(text_classification={})):
        outcome = wire.PostprocessOutcome()
        PostprocessCodec().write_value(pack_result(result), outcome)
        assert outcome.WhichOneof("outcome") == "result"
        assert PostprocessCodec().read_value(outcome).message == result


def test_values_without_anything_are_no_missing_outcomes() -> None:
    tokenized, executed = wire.TokenizeOutcome(), wire.ExecuteOutcome()
    TokenizeCodec().write_value(EncodedInput(TensorSets(arrays=())), tokenized)
    ExecuteCodec().write_value(Prediction(TensorSets(arrays=())), executed)
    assert (tokenized.WhichOneof("outcome"), executed.WhichOneof("outcome")) == ("encoded", "prediction")


def test_an_items_deadline_is_put_on_the_readers_clock() -> None:
    message = wire.ExecuteItem()
    deadline_s = time.monotonic() + 5
    ExecuteCodec().write_item(ExecuteItem(Call(deadline_s=deadline_s), _MODEL, _sets(1)), message)
    read_s = ExecuteCodec().read_item(message).call.deadline_s
    assert read_s is not None
    # Nothing but the time between writing and reading is added.
    assert 0 <= read_s - deadline_s < 1 + 1e-6


def test_an_item_without_time_left_is_not_written() -> None:
    with pytest.raises(DeadlineExceeded):
        ExecuteCodec().write_item(
            ExecuteItem(Call(deadline_s=time.monotonic() - 1), _MODEL, _sets(1)), wire.ExecuteItem()
        )


def test_an_item_for_no_version_is_not_read() -> None:
    with pytest.raises(ModelNotFound):
        ExecuteCodec().read_item(wire.ExecuteItem(model="m", version="newest"))


def test_an_announcement_is_read_as_it_was_written() -> None:
    unloaded, failed = ModelKey("m", 4), ModelKey("m", 5)
    models = ProcessModels(
        ready=frozenset({_MODEL, unloaded}),
        problems={failed: "no room"},
        unloaded={unloaded: True},
        prepared={_MODEL: Preparation(4, 3, 2, 1)},
        digests={_MODEL: "abc"},
    )
    announcement = stages_pb2.Announcement()
    write_announcement(models, 1000, announcement)
    assert read_announcement(announcement) == models
