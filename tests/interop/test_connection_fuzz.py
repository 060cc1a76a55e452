"""Byte streams that no client sends, to a connection of the transport of our own. `make interop` sends more."""

import asyncio
import os
import random

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.interop import frames
from tests.interop.fuzz import ConnectionFuzzer, Fault
from tests.interop.own_connections import connections_of_echo
from tests.interop.results import Result
from tests.interop.run import PLAIN

_STREAMS = int(os.environ.get("NEURONPIPE_FUZZ_CONNECTIONS", "2000"))
_SEED = int(os.environ.get("NEURONPIPE_FUZZ_SEED", "0")) or random.SystemRandom().getrandbits(32)
_EXAMPLES = max(50, _STREAMS // 1000)
# After these, everything that is loaded late is loaded.
_WARM_UP = min(_STREAMS // 3, 20_000)
# 40 bytes that are kept for each connection show in a million.
_GROWTH_MIB = 32


@pytest.mark.timeout(0 if _STREAMS > 10_000 else 300)
def test_no_bytes_are_a_fault_of_a_connection_and_none_leave_anything_behind(results: list[Result]) -> None:
    print(f"NEURONPIPE_FUZZ_SEED={_SEED}")
    process = psutil.Process()

    async def give() -> ConnectionFuzzer:
        async with connections_of_echo() as make_connection, ConnectionFuzzer(make_connection) as fuzzer:
            before = process.memory_info().rss
            for number in range(_STREAMS):
                if number == _WARM_UP:
                    await fuzzer.check_at_rest()
                    before = process.memory_info().rss
                await fuzzer.give(random.Random(f"{_SEED}-{number}"))
            await fuzzer.check_at_rest()
            grown_mib = (process.memory_info().rss - before) / (1 << 20)
            print(f"{_STREAMS} streams of bytes; grown by {grown_mib:.1f} MiB; {fuzzer.written}")
            figures = {"streams": _STREAMS, "growth_mib": grown_mib}
            results.append(Result("fuzz", PLAIN, "streams of bytes", figures=figures))
            assert grown_mib < _GROWTH_MIB
            return fuzzer

    fuzzer = asyncio.run(give())
    # Calls were answered, and refused, and connections were ended.
    assert fuzzer.written.keys() >= {frames.HEADERS, frames.DATA, frames.RST_STREAM, frames.GOAWAY}


def test_the_smallest_stream_of_bytes_that_is_a_fault() -> None:
    """The same with few, of which hypothesis finds the smallest one that fails."""

    @settings(
        max_examples=_EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(st.randoms(use_true_random=False))
    def check(chance: random.Random) -> None:
        async def give() -> None:
            async with connections_of_echo() as make_connection, ConnectionFuzzer(make_connection) as fuzzer:
                await fuzzer.give(chance)

        asyncio.run(give())

    check()


class _Faulty(asyncio.Protocol):
    """Greets, and then does what a bad connection would: raises an error, or keeps a task, or itself."""

    def __init__(self, fault: str, kept: list[object]) -> None:
        self._fault = fault
        self._kept = kept

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(frames.frame(frames.HEADERS) if self._fault == "greeting" else frames.settings())

    def data_received(self, data: bytes) -> None:
        if self._fault == "error":
            raise KeyError(1)
        if self._fault == "late error":
            asyncio.get_running_loop().call_soon(self._fail)
        if self._fault == "task":
            self._kept.append(asyncio.ensure_future(asyncio.sleep(60)))
        if self._fault == "itself":
            self._kept.append(self)

    def _fail(self) -> None:
        raise KeyError(1)


@pytest.mark.parametrize("fault", ["greeting", "error", "late error", "task", "itself"])
def test_a_connection_with_a_fault_is_found_out(fault: str) -> None:
    kept: list[object] = []

    async def give() -> None:
        async with ConnectionFuzzer(lambda: _Faulty(fault, kept)) as fuzzer:
            await fuzzer.give(random.Random(1))
            await fuzzer.check_at_rest(limit_s=0.1)

    with pytest.raises(Fault):
        asyncio.run(give())


def test_a_connection_without_one_is_not() -> None:
    async def give() -> None:
        async with ConnectionFuzzer(lambda: _Faulty("", [])) as fuzzer:
            for number in range(100):
                await fuzzer.give(random.Random(number))
            await fuzzer.check_at_rest()

    asyncio.run(give())
