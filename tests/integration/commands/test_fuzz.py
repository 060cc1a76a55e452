"""Messages that nobody would write, to every method of a gateway and of the stages, and to every path of HTTP.

No server may crash, hang, call a caller's fault its own, or keep anything. `make fuzz` sends a million.
"""

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.run import Fuzzer, for_messages
from tests.fuzz.system import FuzzedSystem, running_system, targets

pytestmark = pytest.mark.local_only

_MESSAGES = int(os.environ.get("NEURONPIPE_FUZZ_MESSAGES", "3000"))
_SECONDS = float(os.environ.get("NEURONPIPE_FUZZ_S", "inf"))
_SEED = int(os.environ.get("NEURONPIPE_FUZZ_SEED", "0")) or random.SystemRandom().getrandbits(32)
# Of each method.
_EXAMPLES = max(5, _MESSAGES // 10_000)
# After this share of the messages, at most so many, a process has loaded what it loads late, and its caches are full.
_WARM_UP, _WARM_UP_MESSAGES = 0.2, 50_000
# Of few messages, chance makes no right one for some doors.
_TRIES_OF_A_DOOR = 500
# What the allocator may keep in pieces. One object that is kept for each message shows in a million: 100 bytes each are
# 95 MiB.
_GROWTH_MIB = 64


@pytest.fixture(scope="module")
def fuzzed(http_repository: Path) -> Iterator[FuzzedSystem]:
    with running_system(http_repository) as system:
        yield system


def _document(fuzzed: FuzzedSystem) -> Any:
    return httpx.get(f"http://{fuzzed.http_address}/openapi.json", timeout=60).json()


@pytest.mark.timeout(0 if _MESSAGES > 10_000 else 300)
def test_no_message_is_a_fault_of_a_server_and_none_leaves_anything_behind(fuzzed: FuzzedSystem) -> None:
    print(f"NEURONPIPE_FUZZ_SEED={_SEED}")

    async def send() -> Fuzzer:
        fuzzer = Fuzzer(fuzzed, random.Random(_SEED), _document(fuzzed))
        try:
            await fuzzer.run(for_messages(min(int(_MESSAGES * _WARM_UP), _WARM_UP_MESSAGES)))
            before_mib = fuzzed.rss_mib()
            await fuzzer.run(for_messages(_MESSAGES, _SECONDS))
            await fuzzer.reach_every_door(_TRIES_OF_A_DOOR)
        finally:
            await fuzzer.close()
        fuzzed.check_at_rest()
        grown_mib = {name: mib - before_mib[name] for name, mib in fuzzed.rss_mib().items()}
        print(f"{fuzzer.sent} messages; grown in MiB: {grown_mib}; {sorted(fuzzer.outcomes.items())}")
        assert max(grown_mib.values()) < _GROWTH_MIB, grown_mib
        return fuzzer

    fuzzer = asyncio.run(send())
    # Every door was reached, and answered right messages, too.
    assert not fuzzer.doors_without_an_answer()


# The test above sends to every method, too.
@pytest.mark.sampled
@pytest.mark.parametrize("target", targets(), ids=lambda target: target.path)
def test_the_smallest_message_that_is_a_fault_of_a_server(fuzzed: FuzzedSystem, target: Any) -> None:
    """The same with few messages, of which hypothesis finds the smallest one that fails."""
    document = _document(fuzzed)

    @settings(
        max_examples=_EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(st.randoms(use_true_random=False))
    def check(chance: random.Random) -> None:
        async def send() -> None:
            fuzzer = Fuzzer(fuzzed, chance, document)
            try:
                await fuzzer.call(target)
            finally:
                await fuzzer.close()

        asyncio.run(send())

    check()
