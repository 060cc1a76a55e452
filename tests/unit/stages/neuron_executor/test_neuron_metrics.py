"""stages/neuron_executor/neuron_metrics.py: what neuron-monitor says becomes metrics, for as long as it says it."""

import os
from functools import partial
from pathlib import Path

import pytest

from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Instrument, Metrics
from neuronpipe.stages.neuron_executor.neuron_metrics import record_snapshot
from neuronpipe.stages.neuron_executor.neuron_monitor import NeuronSnapshot, parse_snapshot, running_monitor
from tests.unit.soon import soon
from tests.unit.stages.neuron_executor.fake_monitor import SAMPLE, write_monitor

_GAUGES = [Metrics.NEURON_UTILIZATION, Metrics.NEURON_CORE_MEMORY, Metrics.NEURON_MEMORY, Metrics.NEURON_TOTAL_LATENCY]


def _numbers(meters: Meters, instrument: Instrument) -> dict[str, float]:
    """As exporters see them, by the only label."""
    return {
        label: family.number(series)
        for family in meters.families()
        if family.instrument is instrument
        for (label,), series in family.series.items()
    }


def _snapshot() -> NeuronSnapshot:
    snapshot = parse_snapshot(SAMPLE.read_bytes(), 4242)
    assert snapshot
    return snapshot


def test_every_figure_of_a_snapshot_is_a_metric() -> None:
    meters = Meters()
    record_snapshot(meters, _snapshot())
    assert _numbers(meters, Metrics.NEURON_UTILIZATION) == pytest.approx({"0": 0.4201, "1": 0.975})
    assert _numbers(meters, Metrics.NEURON_CORE_MEMORY) == {"0": 450_000_000, "1": 450_000_000}
    assert _numbers(meters, Metrics.NEURON_MEMORY) == {"device": 900_000_000, "host": 6_900_000}
    latencies_s = {
        "p0": 0.00096,
        "p1": 0.00097,
        "p25": 0.00098,
        "p50": 0.00099,
        "p75": 0.001,
        "p99": 0.00104,
        "p100": 0.0031,
    }
    assert _numbers(meters, Metrics.NEURON_TOTAL_LATENCY) == pytest.approx(latencies_s)
    assert _numbers(meters, Metrics.NEURON_DEVICE_LATENCY) == {}  # the sample has none
    assert _numbers(meters, Metrics.NEURON_EXECUTIONS)["completed"] == 4400
    assert _numbers(meters, Metrics.NEURON_ERRORS)["hardware"] == 1


def test_executions_and_errors_add_up_over_the_monitors_periods() -> None:
    meters = Meters()
    for _ in range(3):
        record_snapshot(meters, _snapshot())
    assert _numbers(meters, Metrics.NEURON_EXECUTIONS)["completed"] == 3 * 4400
    assert _numbers(meters, Metrics.NEURON_ERRORS)["hardware"] == 3


def test_what_is_not_known_any_more_has_no_gauge_and_what_was_counted_stays() -> None:
    meters = Meters()
    record_snapshot(meters, _snapshot())
    record_snapshot(meters, NeuronSnapshot(core_utilization={1: 0.5}))
    assert _numbers(meters, Metrics.NEURON_UTILIZATION) == {"1": 0.5}
    record_snapshot(meters, NeuronSnapshot())
    assert [_numbers(meters, gauge) for gauge in _GAUGES] == [{}] * len(_GAUGES)
    assert _numbers(meters, Metrics.NEURON_EXECUTIONS)["completed"] == 4400


async def test_the_figures_of_a_monitor_that_dies_go_away(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    meters = Meters()
    command = [str(write_monitor(tmp_path, lines=2, stays=False))]
    async with running_monitor(command, record=partial(record_snapshot, meters)):
        await soon(lambda: "neuron-monitor ended" in caplog.text)
        assert _numbers(meters, Metrics.NEURON_UTILIZATION) == {}
        assert _numbers(meters, Metrics.NEURON_EXECUTIONS)["completed"] == 2 * 4400


async def test_a_monitor_ends_with_the_block_though_it_would_rather_not(tmp_path: Path) -> None:
    path = write_monitor(tmp_path)
    path.write_text(
        path.read_text().replace("import os", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nimport os")
    )
    snapshots: list[NeuronSnapshot] = []
    async with running_monitor([str(path)], record=snapshots.append) as monitor:
        assert monitor
        await soon(lambda: bool(snapshots))
    assert not [one for one in Path("/proc").glob("[0-9]*/cmdline") if _is_running(one, path)]


def _is_running(cmdline: Path, path: Path) -> bool:
    try:
        return str(path).encode() in cmdline.read_bytes()
    except OSError:  # it has just ended
        return False


async def test_a_tool_that_cannot_be_run_disturbs_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_monitor(tmp_path)
    path.chmod(0o644)
    if os.geteuid() == 0 and os.access(path, os.X_OK):
        pytest.skip("this user may execute anything")
    async with running_monitor([str(path)]) as monitor:
        assert monitor is None
    assert "neuron-monitor cannot be started" in caplog.text
