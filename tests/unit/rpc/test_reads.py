"""rpc/reads.py: reads of messages, and how they end."""

import asyncio
from typing import Any

import pytest

from neuronpipe.core.errors import DeadlineExceeded, NeuronpipeError
from neuronpipe.core.metrics import Counter
from neuronpipe.platform.process.caller_waits import CallerWaits
from neuronpipe.rpc.reads import StreamRead, read_message


class _Call:
    """A call of gRPC, whose next message is what `messages` gets."""

    def __init__(self) -> None:
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.cancelled_reads = 0

    async def read(self) -> Any:
        try:
            message = await self.messages.get()
        except asyncio.CancelledError:
            self.cancelled_reads += 1
            raise
        if isinstance(message, Exception):
            raise message
        return message


def _stream(call: Any, limit_s: float, *, is_answered: bool = True) -> StreamRead:
    def error_of(is_late: bool) -> NeuronpipeError:
        return DeadlineExceeded("idle")

    return StreamRead(call, CallerWaits(limit_s, 10, Counter()), error_of, is_answered=is_answered)


async def test_a_read_that_nobody_waits_for_ends_with_its_call() -> None:
    call: Any = _Call()
    reading = asyncio.create_task(read_message(call))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not call.cancelled_reads  # gRPC would never free it
    call.messages.put_nowait(ValueError("the call has ended"))
    await asyncio.sleep(0.01)  # an error that nobody takes would fail the test
    assert not call.cancelled_reads


async def test_a_stream_that_waits_for_its_next_request_is_idle() -> None:
    call: Any = _Call()
    with pytest.raises(DeadlineExceeded):
        await asyncio.wait_for(_stream(call, 0.01).next(), 10)
    assert not call.cancelled_reads


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


async def test_a_stream_that_is_ended_reads_nothing_more() -> None:
    call: Any = _Call()
    stream = _stream(call, 0)
    reading = asyncio.create_task(stream.next())
    await asyncio.sleep(0)
    stream.end()
    assert await asyncio.wait_for(reading, 10) is None
