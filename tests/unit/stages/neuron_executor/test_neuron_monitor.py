"""stages/neuron_executor/neuron_monitor.py: the tool's output becomes metrics; what cannot be read disturbs nothing.

The sample follows the documented schema; no device was at hand to record one.
"""

import asyncio
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Instrument, Metrics
from neuronpipe.stages.neuron_executor.neuron_monitor import (
    NeuronSnapshot,
    parse_snapshot,
    record_snapshot,
    running_monitor,
)
from tests.suite.waiting import happens
from tests.unit.stages.neuron_executor.fake_monitor import SAMPLE, write_monitor

_SAMPLE = SAMPLE.read_bytes()
_PID = 4242
_TIMES_S = {"p0": 0.00096, "p1": 0.00097, "p25": 0.00098, "p50": 0.00099, "p75": 0.001, "p99": 0.00104, "p100": 0.0031}


def _changed(**report: Any) -> bytes:
    document = json.loads(_SAMPLE)
    document["neuron_runtime_data"][0]["report"] |= report
    return json.dumps(document).encode()


def test_a_document_becomes_a_snapshot_of_the_process() -> None:
    assert parse_snapshot(_SAMPLE, _PID) == NeuronSnapshot(
        core_utilization={0: pytest.approx(0.4201), 1: pytest.approx(0.975)},  # type: ignore[dict-item]
        # 400,000,000 + 40,000,000 + 9,000,000 + 1,000,000, and with 10,000,000 and none of tensors.
        core_memory_bytes={0: 450_000_000, 1: 450_000_000},
        device_memory_bytes=900_000_000,
        host_memory_bytes=6_900_000,
        executions={
            "completed": 4400,
            "completed_with_err": 0,
            "completed_with_num_err": 2,
            "timed_out": 1,
            "incorrect_input": 0,
            "failed_to_queue": 0,
        },
        errors={"generic": 0, "numerical": 2, "transient": 0, "model": 0, "runtime": 0, "hardware": 1},
        device_latency_s={},
        total_latency_s=_TIMES_S,
    )


def test_other_processes_are_left_out() -> None:
    assert parse_snapshot(_SAMPLE, 1) is None
    assert parse_snapshot(b'{"neuron_runtime_data": null}', _PID) is None


def test_a_group_that_failed_or_is_missing_stays_empty() -> None:
    snapshot = parse_snapshot(
        _changed(neuroncore_counters={"error": "no access", "neuroncores_in_use": {}}, memory_used=None), _PID
    )
    assert snapshot is not None
    assert (snapshot.core_utilization, snapshot.device_memory_bytes) == ({}, 0)
    assert snapshot.executions["completed"] == 4400


def test_numeric_errors_have_one_name() -> None:
    snapshot = parse_snapshot(_changed(execution_stats={"error_summary": {"numeric": 3}}), _PID)
    assert snapshot is not None
    assert snapshot.errors == {"numerical": 3}


async def test_the_newest_snapshot_stays_whatever_else_is_written() -> None:
    mine = _SAMPLE.replace(b"4242", str(os.getpid()).encode())
    lines = [b"starting\n", mine, b"[]\n", b'{"neuron_runtime_data": [{"pid": 1}]}\n']
    program = f"import sys, time; sys.stdout.buffer.write({b''.join(lines)!r}); sys.stdout.flush(); time.sleep(60)"
    async with asyncio.timeout(20), running_monitor([sys.executable, "-c", program]) as monitor:
        assert monitor is not None
        while monitor.unreadable_lines < 2 or monitor.snapshot is None:
            await asyncio.sleep(0.01)
    assert monitor.snapshot.core_utilization[1] == pytest.approx(0.975)


async def test_a_monitor_that_ends_disturbs_nobody() -> None:
    async with running_monitor([sys.executable, "-c", ""]) as monitor:
        await asyncio.sleep(0.2)  # nothing happens
        assert monitor is not None
        assert monitor.snapshot is None


async def test_where_the_tool_is_missing_there_are_no_snapshots() -> None:
    async with running_monitor(["/no/such/neuron-monitor"]) as monitor:
        assert monitor is None


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
    snapshot = parse_snapshot(_SAMPLE, _PID)
    assert snapshot
    return snapshot


def test_every_figure_of_a_snapshot_is_a_metric() -> None:
    meters = Meters()
    record_snapshot(meters, _snapshot())
    assert _numbers(meters, Metrics.NEURON_UTILIZATION) == pytest.approx({"0": 0.4201, "1": 0.975})
    assert _numbers(meters, Metrics.NEURON_CORE_MEMORY) == {"0": 450_000_000, "1": 450_000_000}
    assert _numbers(meters, Metrics.NEURON_MEMORY) == {"device": 900_000_000, "host": 6_900_000}
    assert _numbers(meters, Metrics.NEURON_TOTAL_LATENCY) == pytest.approx(_TIMES_S)
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
        await happens(lambda: "neuron-monitor ended" in caplog.text)
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
        await happens(lambda: bool(snapshots))
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
