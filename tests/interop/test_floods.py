"""Floods of frames: each costs the server bounded time and memory, and nobody else their answers. Most end their own
connection.
"""

from collections.abc import Iterator

import pytest

from tests.interop.floods import FLOODS, Flood, attack, calling_victim
from tests.interop.known import known_of
from tests.interop.results import Result
from tests.interop.run import PLAIN, Server, growth, running_echo

pytestmark = [pytest.mark.local_only, pytest.mark.sampled]

# CPU time that the victim's calls, and the watching of the server, cost.
_BESIDE_CPU_S = 1.5
_WORST_S = 3.0


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running_echo() as server:
        with calling_victim(server) as warming_up:
            pass
        assert not warming_up.failures
        yield server


@pytest.mark.parametrize("flood", FLOODS, ids=lambda flood: flood.name)
def test_a_flood_costs_bounded_time_and_memory_and_nobody_else_their_answers(
    results: list[Result], server: Server, flood: Flood
) -> None:
    before_s = server.cpu_s()
    with growth(server) as peak_mib, calling_victim(server) as victim:
        came = attack(server, flood)
    cpu_s = server.cpu_s() - before_s
    print(
        f"{flood.name}: {came}; {cpu_s:.2f} s of CPU, {cpu_s / max(1, came.sent) * 1e6:.0f} µs each; "
        f"{peak_mib[0]:.0f} MiB; the victim's {victim.calls} calls took at most {victim.worst_s:.2f} s"
    )
    problems = [
        *victim.failures,
        *([f"{came.ended} of {flood.connections} connections ended"] if flood.ends and not came.ended else []),
        *([f"a call took {victim.worst_s:.1f} s"] if victim.worst_s > _WORST_S else []),
        *([f"{cpu_s:.1f} s of CPU"] if cpu_s > _BESIDE_CPU_S + came.sent * flood.max_cpu_us / 1e6 else []),
        *([f"{peak_mib[0]:.0f} MiB"] if peak_mib[0] > flood.max_growth_mib else []),
    ]
    known = known_of("flood", flood.name)
    figures = {"sent": came.sent, "cpu_s": cpu_s, "mib": peak_mib[0], "worst_s": victim.worst_s, "calls": victim.calls}
    reason = known.reason if known else ""
    results.append(Result("flood", PLAIN, flood.name, "; ".join(problems), reason, figures))
    assert not problems or known, problems
    assert problems or not (known and known.is_certain), known
