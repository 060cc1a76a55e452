"""A tenant at ten times its share, and what another one notices of it. In simulated time, so without noise."""

import pytest

from tests.unit.gateway.tenants.simulated import Device, Outcome, simulate

# The default of fair_window_ms.
_WINDOW_S = 0.02
# Batches bring nothing, as on CPUs: MiniLM on two virtual ones.
_CPU = Device(lambda requests: 0.006 * requests, max_batch=8)
# Batches bring much.
_GPU = Device(lambda requests: 0.004 + 0.00025 * requests, max_batch=32)
_SLOW = Device(lambda requests: 0.2 + 0.003 * requests, max_batch=32)
_SHARE, _QUIET, _FLOOD = 0.5, 0.4, 10


def _run(
    monkeypatch: pytest.MonkeyPatch, device: Device, flood: float, window_s: float | None = _WINDOW_S
) -> dict[str, Outcome]:
    """The quiet tenant sends 0.4 of what the device can do, the other its share, or a multiple of it."""
    rates = {"quiet": _QUIET * device.capacity, "loud": flood * _SHARE * device.capacity}
    return simulate(monkeypatch, device, rates, 1000 / rates["quiet"], window_s)


@pytest.mark.parametrize("device", [_CPU, _GPU, _SLOW], ids=["cpu", "gpu", "slow"])
def test_a_flood_gets_what_the_other_leaves_and_moves_its_p99_by_a_fifth_at_most(
    monkeypatch: pytest.MonkeyPatch, device: Device
) -> None:
    base, flood = (_run(monkeypatch, device, flood) for flood in (1, _FLOOD))
    assert flood["quiet"].percentile(99) <= 1.2 * base["quiet"].percentile(99)
    assert flood["quiet"].refused == 0
    answered = sum(len(outcome.latencies_s) for outcome in flood.values())
    assert answered >= 0.9 * device.capacity * 1000 / (_QUIET * device.capacity)


def test_without_tenants_a_flood_takes_all(monkeypatch: pytest.MonkeyPatch) -> None:
    base, flood = (_run(monkeypatch, _CPU, flood, None)["quiet"].percentile(99) for flood in (1, _FLOOD))
    assert flood > 20 * base
