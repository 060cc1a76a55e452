"""What a server holds of messages while they arrive."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import pytest

from demo.processes import ServiceProcess
from tests.callers.requests import classify

# Alone, since a server that gets little CPU time has more messages half received.
pytestmark = [pytest.mark.local_only, pytest.mark.alone]

_INFER = "/neuronpipe.api.v1.InferenceService/Infer"
_CALLERS = 30
_MESSAGE_MIB = 32


async def test_large_messages_of_many_callers_at_once_are_bounded_in_memory_and_hold_up_nobody(
    fake_repository: Path,
) -> None:
    large = classify("x" * (_MESSAGE_MIB << 20)).SerializeToString()
    small = classify("a").SerializeToString()
    codes: Counter[grpc.StatusCode] = Counter()

    async def call(channel: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(_INFER)(large, timeout=200)
        codes[caught.value.code()] += 1

    with ServiceProcess("all", "--repository", str(fake_repository), "--max-receiving-bytes", str(64 << 20)) as process:
        target = process.wait_until_ready().target
        if not Path(f"/proc/{process.pid}/status").exists():
            pytest.skip("needs /proc to look into another process")
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1)]
        channels: list[Any] = [grpc.aio.insecure_channel(target, options=options) for _ in range(_CALLERS + 1)]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        calls = asyncio.gather(*(call(channel) for channel in channels[1:]))
        while not calls.done():
            await channels[0].unary_unary(_INFER)(small, timeout=30)  # raises where it is not answered
            await asyncio.sleep(0.01)
        await calls
        peak_mib = _peak_mib(process.pid)
        for channel in channels:
            await channel.close()

    # INVALID_ARGUMENT is the answer to a text of more than max_input_bytes.
    assert codes.keys() <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert codes[grpc.StatusCode.RESOURCE_EXHAUSTED] > 0
    # Less than the messages alone take, each once.
    assert peak_mib < _CALLERS * _MESSAGE_MIB


def _peak_mib(pid: int) -> int:
    """The most memory that a process ever had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))
