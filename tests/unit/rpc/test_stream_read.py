"""rpc/stream_read.py: streams that are idle, and those that are ended."""

import asyncio
from typing import Any

import pytest

from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError, Unavailable
from neuronpipe.core.metrics import Counter
from neuronpipe.platform.process.caller_waits import CallerWaits
from neuronpipe.rpc.stream_read import StreamRead


class _Call:
    """A call, whose next message, or what ends its reading, is what `messages` gets."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    async def read(self) -> Any:
        message = await self.messages.get()
        if isinstance(message, Exception):
            raise message
        return message

    def stop_reading(self, error: Exception) -> None:
        self.messages.put_nowait(error)


def _stream(call: Any, limit_s: float) -> StreamRead:
    def error_of(is_late: bool) -> NeuronpipeError:
        return DeadlineExceeded("idle")

    return StreamRead(call, CallerWaits(limit_s, 10, Counter()), error_of, is_answered=True)


async def test_a_stream_that_waits_for_its_next_request_is_idle() -> None:
    call: Any = _Call()
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(_stream(call, 0.01).next(), 10)


async def test_a_stream_is_not_idle_until_its_requests_are_answered() -> None:
    call: Any = _Call()
    stream = _stream(call, 0.02)
    call.messages.put_nowait(b"request")
    assert await stream.next() == b"request"
    reading = asyncio.create_task(stream.next())
    await asyncio.sleep(0.1)  # to prove that nothing happens
    assert not reading.done()
    stream.answered()
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(reading, 10)


async def test_a_stream_that_is_ended_says_why() -> None:
    call: Any = _Call()
    stream = _stream(call, 0)
    reading = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.end(Unavailable("it stops"))
    with pytest.raises(Unavailable, match="it stops"):
        await asyncio.wait_for(reading, 10)
