"""Records the snapshots of neuron-monitor as metrics."""

from collections.abc import Mapping

from neuronpipe.core.metrics import Meters
from neuronpipe.core.names import Instrument, Metrics
from neuronpipe.stages.neuron_executor.neuron_monitor import NeuronSnapshot

_NANOSECONDS = 1e9


def record_snapshot(meters: Meters, snapshot: NeuronSnapshot) -> None:
    """Records the snapshot of one period: gauges are replaced, counters are increased.

    A value that is missing in the snapshot is unknown, and has no gauge.
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
