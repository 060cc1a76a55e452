"""What neuron-monitor says of this process, as metrics."""

from collections.abc import Mapping

from neuronpipe.core.metrics import Meters
from neuronpipe.core.telemetry import Instrument, Metrics
from neuronpipe.neuron_executor.neuron_monitor import NeuronSnapshot

_NANOSECONDS = 1e9


class NeuronMetrics:
    """Gauges of the newest snapshot, and counters of what the monitor's periods add up to."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def record(self, snapshot: NeuronSnapshot) -> None:
        """A period has gone by. What the snapshot is silent about is unknown, and has no gauge."""
        self._show(Metrics.NEURON_UTILIZATION, snapshot.core_utilization)
        self._show(Metrics.NEURON_CORE_MEMORY, snapshot.core_memory_bytes)
        memory_bytes = {"device": snapshot.device_memory_bytes, "host": snapshot.host_memory_bytes}
        self._show(Metrics.NEURON_MEMORY, {where: size for where, size in memory_bytes.items() if size})
        self._show(Metrics.NEURON_DEVICE_LATENCY, snapshot.device_latency_s, _NANOSECONDS)
        self._show(Metrics.NEURON_TOTAL_LATENCY, snapshot.total_latency_s, _NANOSECONDS)
        for instrument, counts in ((Metrics.NEURON_EXECUTIONS, snapshot.executions), (Metrics.NEURON_ERRORS, snapshot.errors)):
            for outcome, count in counts.items():
                self._meters.counter(instrument, outcome).add(count)

    def _show(self, instrument: Instrument, values: Mapping[int, float] | Mapping[str, float], unit: float = 1) -> None:
        self._meters.show(instrument, {(str(label),): value * unit for label, value in values.items()})
