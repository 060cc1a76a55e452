"""Connections that come and go, half of them rude: NEURONPIPE_SOAK_S seconds of them leave the memory as it was."""

import os
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.interop.results import Result
from tests.interop.run import PLAIN, TLS, make_tls, running_echo
from tests.interop.soak import soak
from tests.suite.constants import constants
from tests.suite.waiting import until

pytestmark = [pytest.mark.local_only, pytest.mark.long]

_SECONDS = float(os.environ.get("NEURONPIPE_SOAK_S", "20"))
_SEED = int(os.environ.get("NEURONPIPE_FUZZ_SEED", "0")) or random.SystemRandom().getrandbits(32)
_WARM_UP = 0.3
# Of the whole soak after its warm-up: what the allocator may keep in pieces, and what thousands of connections may
# leave; 1 KB of each connection shows in ten minutes.
_GROWTH_MIB = 24.0


@pytest.mark.timeout(120 + 2 * _SECONDS)
@pytest.mark.parametrize("security", [PLAIN, TLS])
def test_connections_that_come_and_go_leave_the_memory_as_it_was(
    tmp_path: Path, results: list[Result], security: str
) -> None:
    print(f"NEURONPIPE_FUZZ_SEED={_SEED}")
    environment = constants(max_send_s=2, max_handshake_s=2)
    with running_echo(make_tls(security, tmp_path), environment=environment) as server:
        came = soak(server, _SECONDS, _SEED)
        # What was begun is over soon.
        until(lambda: _all_are_over(server.seen()))
    growth_mib = came.growth_mib_per_hour(_WARM_UP * _SECONDS) * (1 - _WARM_UP) * _SECONDS / 3600
    print(f"{came.connections}: {growth_mib:.1f} MiB, from {came.rss_mib[0][1]:.0f} to {came.rss_mib[-1][1]:.0f} MiB")
    figures = {"connections": came.connections.total(), "seconds": _SECONDS, "growth_mib": growth_mib}
    results.append(Result("soak", security, "soak", figures=figures))
    assert not came.failures
    assert growth_mib < _GROWTH_MIB
    assert len(came.connections) == 6  # every kind came


def _all_are_over(seen: Mapping[str, int]) -> bool:
    return all(
        seen[f"{name} begun"] == seen.get(f"{name} answered", 0) + seen[f"{name} cancelled"]
        for name in ("split", "slow")
    )
