"""gateway/generation.py: tokens become text as they come, and the last one says why the text ends."""

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from neuronpipe.api.v1.inference_pb2 import GenerateStart
from neuronpipe.api.v1.stages_pb2 import GenerationFigures
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GenerationOptions, TaskInput, TaskResult, TextGenerationInput
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import Unavailable
from neuronpipe.core.generated import NewTokens, Released, TokenSink
from neuronpipe.core.items import (
    NO_WORK,
    Detokenize,
    DetokenizeItem,
    EncodedInput,
    ExecuteItem,
    ModelKey,
    PostprocessItem,
    Prediction,
    Stages,
    TokenizeItem,
)
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import Packed, TensorSets, pack_input, pack_result
from neuronpipe.gateway.generation import GenerationRequest
from neuronpipe.gateway.request_observer import ModelMeters
from neuronpipe.gateway.requests import GeneratedPart, InferenceRequest, TextParts
from neuronpipe.gateway.routing import GatewayModel
from neuronpipe.gateway.settings import PipelineSettings
from neuronpipe.tasks import TASKS
from neuronpipe.tasks.generated_text import Detokenizer, release
from neuronpipe.tasks.text_generation import window_arrays
from neuronpipe.tasks.text_options import most_generated
from tests.unit.model_specs import model_spec

_END, _BYTE = 2, 65
_SPEC = model_spec("text_generation", max_tokens=1000, end_token_ids=(_END,))
_DETOKENIZER = Detokenizer(
    lambda token_ids: bytes(token_ids).decode(), lambda token_id: token_id == _END, frozenset({_BYTE})
)


class _System:
    """Stages that generate these tokens. The gateway reads along as fast as they come.

    - `detokenize`: makes text of new tokens at once.
    - `turns`: the turns of the event loop between two tokens, as between two messages.
    - `decode_turns`: the turns that the post-process stage takes.
    - `error`: ends the text after its tokens.
    """

    def __init__(
        self,
        token_ids: Sequence[int],
        reason: int = FinishReason.FINISH_REASON_LENGTH,
        *,
        detokenize: Detokenize | None = None,
        turns: int = 10,
        decode_turns: int = 0,
        error: Exception | None = None,
    ) -> None:
        self._token_ids = token_ids
        self._reason = reason
        self._detokenize = detokenize
        self._turns, self._decode_turns = turns, decode_turns
        self._error = error
        self.is_cancelled = False
        self.parts: list[GeneratedPart] = []
        # How many tokens were sent to be decoded, each time.
        self.sent: list[int] = []
        self.counted: list[int] = []
        self.waits: list[bool] = []

    async def run(
        self, max_new_tokens: int, interval: int = 1, stop_strings: Sequence[str] = (), *, reads_along: bool = True
    ) -> str:
        options = GenerationOptions(max_new_tokens=max_new_tokens, stop_strings=stop_strings)
        input = TextGenerationInput(prompt="a", options=options)
        packed = pack_input(TaskInput(text_generation=input))
        request = InferenceRequest(Call(), _SPEC.name, "", packed)
        key = ModelKey(_SPEC.name, 1)
        model = GatewayModel(key, _SPEC, ModelMeters(Telemetry().meters, key))
        sequences = TensorSets(arrays=[{"input_ids": np.array([97], np.int32)}])
        encoded = EncodedInput(sequences, TensorSets(arrays=window_arrays([97])), tokens=1)
        stages = Stages(self._tokenize, self._execute, self._postprocess, self._detokenize)
        parts: Any = SimpleNamespace(put=self._put) if reads_along else None
        pipeline: Any = SimpleNamespace(stages=stages, settings=PipelineSettings(stream_interval=interval))
        timings: Any = None
        running = GenerationRequest(pipeline, request, Call(), model, timings, parts)
        admission: Any = SimpleNamespace(
            count=lambda *_: None,
            queue=lambda: None,
            charge=self.counted.append,
            pause=lambda *, is_paused: self.waits.append(is_paused),
        )
        running.plan(admission, encoded)
        running.count(admission, encoded)
        prediction = await running.execute(admission, NO_WORK, encoded)
        result = await running.postprocess(NO_WORK, encoded, prediction)
        assert isinstance(result, Packed)
        return str(result.message.text_generation.sequences[0].text)

    def _put(self, part: GenerateStart | GeneratedPart) -> None:
        if isinstance(part, GeneratedPart):
            self.parts.append(part)

    async def _tokenize(self, item: TokenizeItem) -> EncodedInput:
        raise NotImplementedError

    async def _execute(self, item: ExecuteItem, sink: TokenSink) -> Prediction:
        for is_waiting in (True, False):  # for its grammar
            sink.put(NewTokens([], GenerationFigures(), is_waiting=is_waiting))
            await asyncio.sleep(0)
        for token_id in self._token_ids:
            sink.put(NewTokens([token_id], GenerationFigures()))
            try:
                for _ in range(self._turns):
                    await asyncio.sleep(0)
            except asyncio.CancelledError:
                self.is_cancelled = True
                raise
        if self._error:
            raise self._error
        arrays = {"token_ids": np.array(self._token_ids, np.int32), "finish_reason": np.array(self._reason, np.int32)}
        return Prediction(TensorSets(arrays=[arrays]), generation=GenerationFigures())

    async def _postprocess(self, item: PostprocessItem) -> Packed[TaskResult]:
        self.sent.append(len(item.outputs.arrays[0]["token_ids"]))
        for _ in range(self._decode_turns):
            await asyncio.sleep(0)
        input = item.input.message.text_generation
        decoded = TASKS["text_generation"].decode(
            input, _SPEC, item.annotations.arrays, item.outputs.arrays, _DETOKENIZER
        )
        return pack_result(TaskResult(text_generation=decoded))


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [([*b"xyz"], FinishReason.FINISH_REASON_LENGTH), ([*b"xy", _END], FinishReason.FINISH_REASON_END)],
    ids=["length", "end"],
)
async def test_the_last_token_comes_with_the_reason_before_the_prediction(token_ids: list[int], reason: int) -> None:
    system = _System(token_ids, reason)
    assert await system.run(3) == bytes(token_ids).decode().strip("\2")
    assert [part.is_last for part in system.parts] == [False, False, True]
    assert system.waits == [True, False, True]
    assert [part.token_ids for part in system.parts] == [[token_id] for token_id in token_ids]


async def test_a_long_run_of_bytes_is_sent_less_often_the_longer_it_is() -> None:
    system = _System([_BYTE] * 400 + [*b"xy"])
    assert await system.run(402) == "A" * 400 + "xy"
    # 400 tokens, each about eight times or less; with every token it would be 400 * 401 / 2, 80,200.
    assert sum(system.sent) <= 402 * 9
    assert system.parts[-1].is_last


async def test_tokens_of_an_interval_are_sent_together_but_the_first_one_is_not_held_back() -> None:
    system = _System([*b"abcdefgh"])
    assert await system.run(8, interval=3) == "abcdefgh"
    assert [part.text for part in system.parts] == ["a", "bcd", "efg", "h"]


async def test_a_stop_string_is_found_at_once_whatever_the_interval() -> None:
    system = _System([*b"abcdefgh"])
    assert await system.run(8, interval=4, stop_strings=["c"]) == "ab"
    assert sum(system.sent) <= 4, "tokens after the stop string were waited for"
    assert system.is_cancelled


def _at_once(item: DetokenizeItem) -> Released:
    return release(_DETOKENIZER, item.window, item.token_ids, item.options.stop_strings, is_last=False)


def _at_first_not(item: DetokenizeItem) -> Released | None:
    """As a stage that is busy at the first token of the text."""
    return None if item.token_ids[0] == ord("a") else _at_once(item)


async def test_new_tokens_become_text_at_once_where_a_stage_can() -> None:
    system = _System([*b"abcd"], detokenize=_at_once, turns=0)
    assert await system.run(4) == "abcd"
    assert [part.text for part in system.parts] == ["a", "b", "c", "d"]
    assert system.sent == [1], "the last token alone needs the reason of the end"


async def test_a_stop_string_that_is_found_at_once_ends_the_text() -> None:
    system = _System([*b"abcdefgh"], detokenize=_at_once)
    assert await system.run(8, stop_strings=["cd"]) == "ab"
    assert (system.sent, system.is_cancelled) == ([], True)
    assert system.parts[-1].is_last


async def test_tokens_wait_for_a_stage_that_is_busy_for_a_moment() -> None:
    busy = iter([True, False])
    system = _System([*b"abc"], detokenize=lambda item: None if next(busy) else _at_once(item))
    assert await system.run(3, stop_strings=["a"]) == ""
    assert (system.sent, system.is_cancelled) == ([], True)


async def test_tokens_that_cannot_become_text_at_once_become_text_a_little_later() -> None:
    def fail(item: DetokenizeItem) -> Released:
        raise RuntimeError("a library panicked")

    system = _System([*b"abc"], detokenize=fail)
    assert await system.run(3) == "abc"
    assert system.sent == [1, 1, 1]


@pytest.mark.parametrize("detokenize", [_at_first_not, None])
async def test_tokens_that_come_while_others_become_text_become_text_together(detokenize: Detokenize | None) -> None:
    system = _System([*b"abcdefgh"], detokenize=detokenize, turns=1, decode_turns=3)
    assert await system.run(8) == "abcdefgh"
    assert len(system.parts) < 8
    assert "".join(part.text for part in system.parts) == "abcdefgh"


async def test_the_text_of_a_caller_who_waits_for_the_result_is_made_once() -> None:
    system = _System([*b"abcdefgh"])
    assert await system.run(8, reads_along=False) == "abcdefgh"
    assert system.sent == [8]


@pytest.mark.parametrize("detokenize", [_at_once, None])
@pytest.mark.parametrize("turns", [0, 10])
async def test_the_tokens_before_an_error_come_before_it(detokenize: Detokenize | None, turns: int) -> None:
    system = _System([*b"abc"], detokenize=detokenize, turns=turns, error=Unavailable("the stage has gone"))
    with pytest.raises(Unavailable, match="has gone, after 3 tokens of the text"):
        await system.run(8)
    assert "".join(part.text for part in system.parts) == "abc"


async def test_generated_tokens_are_counted_as_they_come_and_once() -> None:
    system = _System([*b"xyz"], FinishReason.FINISH_REASON_LENGTH)
    await system.run(3)
    assert system.counted == [1, 1, 1, 0]


def test_what_a_request_generates_at_most_is_known_before_it_is_checked() -> None:
    def most(**options: Any) -> int:
        return most_generated(GenerationOptions(**options), _SPEC)

    room = _SPEC.max_tokens - 1
    assert most(max_new_tokens=7) == 7
    assert most(max_new_tokens=7, num_return_sequences=3) == 21
    assert most(max_new_tokens=7, num_beams=4, num_return_sequences=3) == 28
    assert most(max_new_tokens=2**31, num_beams=2**31) == 16 * room
    assert most() == min(256, room)


async def test_a_caller_who_reads_slowly_gets_the_parts_of_each_text_that_wait_as_one() -> None:
    parts, start = TextParts(), GenerateStart(model="small")
    for part in (start, GeneratedPart("a", [1]), GeneratedPart("x", [7], 1), GeneratedPart("b", [2], is_last=True)):
        parts.put(part)
    ends, begins = GeneratedPart("ab", [1, 2], 0, [], is_last=True), GeneratedPart("x", [7], 1, [])
    assert await parts.take() == [start, ends, begins]
    waiting = asyncio.create_task(parts.take())
    await asyncio.sleep(0)
    parts.put(GeneratedPart("y", [8], 1, [], is_last=True))
    parts.close()
    assert await waiting == [GeneratedPart("y", [8], 1, [], is_last=True)]
    assert await parts.take() == []
