"""A text as TGI's events: one for each token, the last with the whole text."""

from collections.abc import AsyncGenerator
from typing import Any, cast

import orjson
import pytest

from neuronpipe.api.v1.inference_pb2 import StageTimings, Usage
from neuronpipe.api.v1.tasks_pb2 import FinishReason, GeneratedText, TaskInput, TokenLogprob
from neuronpipe.core.calls import Call
from neuronpipe.core.items import ModelKey
from neuronpipe.core.packed import pack_result
from neuronpipe.doors.http.exchange import HttpRequest
from neuronpipe.doors.http.huggingface_bodies import Generate, GenerateParameters
from neuronpipe.doors.http.huggingface_texts import answer_tokens, write_text
from neuronpipe.doors.inference import Inference, ModelCall
from neuronpipe.gateway.requests import GeneratedPart, InferenceResult, TextEvent
from tests.unit.model_specs import model_spec
from tests.unit.task_messages import task_result

_SPEC = model_spec("text_generation")
_DETAILS = {"generated_tokens": 3, "seed": None, "input_length": 5}


def _part(text: str, *token_ids: int, is_last: bool = False) -> GeneratedPart:
    logprobs = [TokenLogprob(token_id=token_id, logprob=-token_id / 8) for token_id in token_ids]
    return GeneratedPart(text, [*token_ids], 0, logprobs, is_last)


async def _events(reason: int, *parts: GeneratedPart) -> list[dict[str, Any]]:
    """The events of a text that came in these parts."""
    text = "".join(part.text for part in parts)
    token_ids = [token_id for part in parts for token_id in part.token_ids]
    sequence = GeneratedText(text=text, token_ids=token_ids, finish_reason=FinishReason.ValueType(reason))
    result = pack_result(task_result(text_generation={"sequences": [sequence]}))

    class Written:
        async def stream(self, model_call: ModelCall, input: TaskInput) -> AsyncGenerator[TextEvent, None]:
            async def events() -> AsyncGenerator[TextEvent, None]:
                for part in parts:
                    yield part
                yield InferenceResult("", ModelKey("m", 1), result, Usage(tokens=5), StageTimings(total_ns=1))

            return events()

    body = Generate(inputs="Say:")
    request = HttpRequest(Call(), {}, "", {}, "", body)
    response = await answer_tokens(cast(Inference, Written()), request, _SPEC, body, body.inputs)
    assert response.stream
    return [orjson.loads(event.removeprefix(b"data: ")) async for event in response.stream]


def _token(token_id: int, text: str, *, special: bool = False) -> dict[str, Any]:
    return {"id": token_id, "text": text, "logprob": -token_id / 8, "special": special}


async def test_the_last_token_has_the_whole_text() -> None:
    events = await _events(FinishReason.FINISH_REASON_LENGTH, _part("a", 3), _part("bc", 4, 5, is_last=True))
    assert events == [
        {"index": 1, "token": _token(3, "a"), "generated_text": None, "details": None},
        {"index": 2, "token": _token(4, ""), "generated_text": None, "details": None},
        {
            "index": 3,
            "token": _token(5, "bc"),
            "generated_text": "abc",
            "details": {"finish_reason": "length", **_DETAILS},
        },
    ]


async def test_a_token_that_ends_the_text_is_special() -> None:
    *_, last = await _events(FinishReason.FINISH_REASON_END, _part("ab", 3, 4), _part("", 2, is_last=True))
    assert last["token"] == _token(2, "", special=True)
    assert last["generated_text"] == "ab"
    assert last["details"] == {"finish_reason": "eos_token", **_DETAILS}


@pytest.mark.parametrize(
    ("reason", "last_text", "special"),
    [
        (FinishReason.FINISH_REASON_END, "", True),
        (FinishReason.FINISH_REASON_END, "b", False),  # a token of stop_token_ids
        (FinishReason.FINISH_REASON_LENGTH, "", False),
    ],
)
async def test_a_whole_text_and_a_stream_agree_on_its_last_token(reason: int, last_text: str, special: bool) -> None:
    logprobs = [TokenLogprob(token_id=3, text="a"), TokenLogprob(token_id=2, text=last_text)]
    text = GeneratedText(
        text="a" + last_text, token_ids=[3, 2], finish_reason=FinishReason.ValueType(reason), logprobs=logprobs
    )
    body = Generate(inputs="", parameters=GenerateParameters(details=True))
    whole = write_text(text, "", body)["details"]["tokens"]
    assert [token["special"] for token in whole] == [False, special]
    *_, last = await _events(reason, GeneratedPart("a" + last_text, [3, 2], 0, logprobs, is_last=True))
    assert last["token"]["special"] == special
