"""What a tenant at ten times its share does to another one's p99, in simulated time: the real gate, and devices of
stated speeds. The second tenant sends 0.4 of what the device can do.

Run: python -m tests.bench.fairness_simulated [--requests 2000]
"""

import argparse

import pytest

from tests.unit.gateway.tenants.simulated import Device, simulate

_DEVICES = {
    "6 ms a request, batches of up to 8": Device(lambda requests: 0.006 * requests, 8),
    "4 ms a batch and 0.25 ms a request, up to 32": Device(lambda requests: 0.004 + 0.00025 * requests, 32),
    "200 ms a batch and 3 ms a request, up to 32": Device(lambda requests: 0.2 + 0.003 * requests, 32),
}
_WINDOWS_S = {"no tenants": None, "10 ms": 0.01, "20 ms": 0.02, "50 ms": 0.05}
_QUIET, _SHARE, _FLOOD = 0.4, 0.5, 10


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000, help="of the second tenant")
    options = parser.parse_args()
    print("| Device | Window | p99 at the share | p99 at ten times the share | Ratio | Answered, of capacity |")
    print("|---|---|---:|---:|---:|---:|")
    for name, device in _DEVICES.items():
        quiet = _QUIET * device.capacity
        seconds = options.requests / quiet
        for window, window_s in _WINDOWS_S.items():
            p99_ms = []
            for flood in (1, _FLOOD):
                rates = {"quiet": quiet, "loud": flood * _SHARE * device.capacity}
                with pytest.MonkeyPatch.context() as patch:
                    outcomes = simulate(patch, device, rates, seconds, window_s)
                p99_ms.append(outcomes["quiet"].percentile(99) * 1e3)
            answered = sum(len(load.latencies_s) for load in outcomes.values()) / seconds / device.capacity
            base, flooded = p99_ms
            print(f"| {name} | {window} | {base:.0f} ms | {flooded:.0f} ms | {flooded / base:.2f} | {answered:.2f} |")


if __name__ == "__main__":
    main()
