"""Reads neuron-monitor, a tool of the Neuron SDK that writes one JSON document per line, into metrics.

Source of the schema: tools/neuron-sys-tools/neuron-monitor-user-guide.rst of aws-neuron/aws-neuron-sdk.
"""

import asyncio
import contextlib
import json
import os
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Instrument, Metrics
from neuronpipe.platform.process.background import run_beside

COMMAND = ("neuron-monitor",)
# A document of a 48xlarge with its 24 cores has about 20 kB.
_MAX_LINE_BYTES = 4 << 20
# The time that the tool gets to end by itself.
_END_LIMIT_S = 2.0
_EMPTY: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class NeuronSnapshot:
    """The newest values of neuron-monitor for one process, by core if the tool gives them by core.

    Utilisation is a share from 0 to 1; latencies are in seconds. `executions` and `errors` count events of the last
    period by the tool's own words, such as completed, timed_out and hardware.
    """

    core_utilization: Mapping[int, float] = field(default_factory=dict)
    core_memory_bytes: Mapping[int, int] = field(default_factory=dict)
    device_memory_bytes: int = 0
    host_memory_bytes: int = 0
    executions: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    device_latency_s: Mapping[str, float] = field(default_factory=dict)
    total_latency_s: Mapping[str, float] = field(default_factory=dict)


def parse_snapshot(line: bytes, pid: int) -> NeuronSnapshot | None:
    """Reads the snapshot of a process from one line; None if the line has none.

    Groups that failed (with an `error`) or are missing stay empty, because the tool's configuration decides which
    groups exist. Raises ValueError if the line is not such a document.
    """
    document = json.loads(line)
    if not isinstance(document, dict):
        raise ValueError("not an object")
    report = next(
        (
            _group(runtime, "report")
            for runtime in document.get("neuron_runtime_data") or ()
            if runtime.get("pid") == pid
        ),
        None,
    )
    if report is None:
        return None
    memory = _group(_group(report, "memory_used"), "neuron_runtime_used_bytes")
    statistics = _group(report, "execution_stats")
    cores = _group(_group(report, "neuroncore_counters"), "neuroncores_in_use")
    by_core = _group(_group(memory, "usage_breakdown"), "neuroncore_memory_usage")
    latencies = _group(statistics, "latency_stats")
    return NeuronSnapshot(
        core_utilization={
            int(core): float(counters["neuroncore_utilization"]) / 100 for core, counters in cores.items()
        },
        core_memory_bytes={int(core): sum(int(part) for part in parts.values()) for core, parts in by_core.items()},
        device_memory_bytes=int(memory.get("neuron_device", 0)),
        host_memory_bytes=int(memory.get("host", 0)),
        executions=dict(_group(statistics, "execution_summary")),
        # The documentation's list of fields says "numeric" where its sample says "numerical".
        errors={
            {"numeric": "numerical"}.get(name, name): int(count)
            for name, count in _group(statistics, "error_summary").items()
        },
        device_latency_s=dict(_group(latencies, "device_latency")),
        total_latency_s=dict(_group(latencies, "total_latency")),
    )


def _group(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    group = parent.get(name)
    return group if isinstance(group, Mapping) and not group.get("error") else _EMPTY


class NeuronMonitor:
    """The newest snapshot of this process, and the number of lines that could not be read."""

    def __init__(self, record: Callable[[NeuronSnapshot], None]) -> None:
        self._record = record
        self.snapshot: NeuronSnapshot | None = None
        self.unreadable_lines = 0

    async def read(self, lines: AsyncIterator[bytes]) -> None:
        """Reads the monitor's output until it ends."""
        async for line in lines:
            try:
                snapshot = parse_snapshot(line, os.getpid())
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
                if not self.unreadable_lines:
                    log_warning("neuron-monitor writes what cannot be read", problem=type(error).__name__)
                self.unreadable_lines += 1
                continue
            if snapshot:
                self.snapshot = snapshot
                self._record(snapshot)

    def forget(self) -> None:
        self.snapshot = None
        self._record(NeuronSnapshot())


@asynccontextmanager
async def running_monitor(
    command: Sequence[str] = COMMAND, record: Callable[[NeuronSnapshot], None] = lambda snapshot: None
) -> AsyncIterator[NeuronMonitor | None]:
    """Runs neuron-monitor beside the block, or yields None if the tool is not installed.

    An end of the tool is logged and has no other effect. `record` gets each snapshot, and an empty snapshot at the end
    of the tool.
    """
    process = await _start(command)
    if process is None:
        yield None
        return
    monitor = NeuronMonitor(record)
    log("neuron-monitor started")
    try:
        async with run_beside(_follow(monitor, process)):
            yield monitor
    finally:
        await _end(process)


async def _start(command: Sequence[str]) -> Process | None:
    try:
        return await asyncio.create_subprocess_exec(
            *command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL, limit=_MAX_LINE_BYTES, start_new_session=True
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        log_warning("neuron-monitor cannot be started", problem=error.strerror)
        return None


async def _follow(monitor: NeuronMonitor, process: Process) -> None:
    assert process.stdout is not None  # noqa: S101
    try:
        await monitor.read(process.stdout)
        log_warning("neuron-monitor ended", code=await process.wait())
    except ValueError:  # a line beyond the limit
        log_warning("neuron-monitor writes lines beyond the limit", limit_bytes=_MAX_LINE_BYTES)
        await _end(process)  # otherwise it would wait for a reader for ever
    monitor.forget()


async def _end(process: Process) -> None:
    """Ends the tool and the processes that it started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), _END_LIMIT_S)


_NANOSECONDS = 1e9


def record_snapshot(meters: Meters, snapshot: NeuronSnapshot) -> None:
    """Records the snapshot of one period: replaces gauges, and increases counters.

    A value that the snapshot does not contain is unknown, and has no gauge.
    """

    def show(instrument: Instrument, values: Mapping[int, float] | Mapping[str, float], unit: float = 1) -> None:
        meters.show(instrument, {(str(label),): value * unit for label, value in values.items()})

    show(Metrics.NEURON_UTILIZATION, snapshot.core_utilization)
    show(Metrics.NEURON_CORE_MEMORY, snapshot.core_memory_bytes)
    memory_bytes = {"device": snapshot.device_memory_bytes, "host": snapshot.host_memory_bytes}
    show(Metrics.NEURON_MEMORY, {where: size for where, size in memory_bytes.items() if size})
    show(Metrics.NEURON_DEVICE_LATENCY, snapshot.device_latency_s, _NANOSECONDS)
    show(Metrics.NEURON_TOTAL_LATENCY, snapshot.total_latency_s, _NANOSECONDS)
    for instrument, counts in (
        (Metrics.NEURON_EXECUTIONS, snapshot.executions),
        (Metrics.NEURON_ERRORS, snapshot.errors),
    ):
        for outcome, count in counts.items():
            meters.counter(instrument, outcome).add(count)
