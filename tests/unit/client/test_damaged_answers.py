"""Both clients: an answer that is damaged, incomplete or of another task is an error."""

from collections.abc import AsyncIterator, Sequence

import pytest

from neuronpipe.api.v1.inference_pb2 import (
    GenerateChunk,
    GenerateResponse,
    InferRequest,
    InferResponse,
    InferStreamResponse,
)
from neuronpipe.client import AsyncClient, Client, InternalError
from tests.unit.client.fake_gateway import byte_gateway
from tests.unit.task_messages import task_result

_DAMAGED = b"\xff" * 50
_CHUNK = GenerateResponse(chunk=GenerateChunk(text="a")).SerializeToString()
_WHOLE = GenerateResponse(response=InferResponse(model="m")).SerializeToString()

_IS_DAMAGED = "^the server's answer is damaged$"
_IS_CUT = "^the server's answer ended before the whole text came$"


async def _read(answers: AsyncIterator[GenerateResponse], parts: list[GenerateResponse]) -> None:
    async for part in answers:
        parts.append(part)  # noqa: PERF401 (the parts before an error count)


@pytest.mark.parametrize(
    ("messages", "chunks", "said"),
    [
        ([_CHUNK, _CHUNK, _DAMAGED, _WHOLE], 2, _IS_DAMAGED),
        ([_DAMAGED], 0, _IS_DAMAGED),
        ([_CHUNK, _CHUNK], 2, _IS_CUT),
        ([_CHUNK, _WHOLE, _CHUNK], 3, _IS_CUT),
        ([], 0, _IS_CUT),
    ],
    ids=["damaged within", "damaged alone", "no whole text", "chunk behind the whole text", "empty"],
)
async def test_a_generated_text_that_is_incomplete_ends_with_an_error(
    messages: Sequence[bytes], chunks: int, said: str
) -> None:
    parts: list[GenerateResponse] = []
    with byte_gateway(messages) as target:
        with Client(target) as client, pytest.raises(InternalError, match=said):
            parts.extend(client.generate("m", "x"))
        assert len(parts) == chunks
        parts.clear()
        async with AsyncClient(target) as asynchronous:
            with pytest.raises(InternalError, match=said):
                await _read(asynchronous.generate("m", "x"), parts)
    assert len(parts) == chunks


def test_a_whole_text_is_no_error() -> None:
    with byte_gateway([_CHUNK, _WHOLE]) as target, Client(target) as client:
        assert len(list(client.generate("m", "x"))) == 2


def test_a_damaged_answer_of_a_stream_of_requests_is_an_error() -> None:
    good = InferStreamResponse(request_id="0").SerializeToString()
    with byte_gateway([good, _DAMAGED, good]) as target, Client(target) as client:
        answers = client.infer_stream([InferRequest()] * 3)
        assert next(answers).request_id == "0"
        with pytest.raises(InternalError, match=_IS_DAMAGED):
            next(answers)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (_DAMAGED, _IS_DAMAGED),
        (b"", "^the server's answer is not a result of sentence-embedding$"),
        (
            InferResponse(result=task_result(text_classification={"labels": []})).SerializeToString(),
            "^the server's answer is not a result of sentence-embedding$",
        ),
    ],
    ids=["damaged", "empty", "another task"],
)
async def test_an_answer_without_a_result_of_the_task_is_an_error(answer: bytes, said: str) -> None:
    with byte_gateway([answer]) as target:
        with Client(target) as client, pytest.raises(InternalError, match=said):
            client.embed("m", "x")
        async with AsyncClient(target) as asynchronous:
            with pytest.raises(InternalError, match=said):
                await asynchronous.embed("m", "x")
