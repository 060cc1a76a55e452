"""The model beside real executors: one to four processes, whose fake device takes a known time for each batch."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from demo.processes import ServiceProcess
from neuronpipe.measure.load.request import LoadRequest
from neuronpipe.measure.load.run import run_load
from tests.bench.cluster.executors import Device
from tests.bench.cluster.scenarios import FIXED, Scenario, run
from tests.bench.systems import NO_CACHE
from tests.models.compiling import compile_model
from tests.models.repository import classifier
from tests.models.versions import copy_bundle

_SECONDS = 10.0
# 100 requests a second for each executor: little CPU time, so that four of them fit on this machine.
_DEVICE = Device(cores=1, overhead_s=0.08, token_s=0.0, tokens=0.0, max_batch=8)
_LOADS = (0.5, 0.8)


def compared(
    counts: tuple[int, ...] = (1, 2, 4),
) -> Iterator[tuple[int, float, tuple[float, float], tuple[float, float]]]:
    """executors, share of their capacity, p50 and p99 in seconds of the model, and of the real ones."""
    with tempfile.TemporaryDirectory(prefix="cluster-") as name:
        folder = Path(name)
        compile_model(classifier(folder / "source"), folder / "made", name="classifier", backend="fake")
        properties = {"device_time_s": str(_DEVICE.overhead_s)}
        repository = copy_bundle(folder / "made", "classifier", folder / "repository", properties)
        for count in counts:
            for load in _LOADS:
                rate = load * count * _DEVICE.requests_per_s
                yield count, load, _simulated(count, rate), _real(repository, count, rate)


def _simulated(count: int, rate: float) -> tuple[float, float]:
    found = run(Scenario("", "", 1000, lambda now_s: rate, (count, count), 0), FIXED, _DEVICE)
    return found.p50_s, found.p99_s


def _real(repository: Path, count: int, rate: float) -> tuple[float, float]:
    at = ("--repository", str(repository))
    with ExitStack() as stack:
        executors = [
            stack.enter_context(ServiceProcess("neuron-executor", *at, "--cores", "1", "--max-batch-size", "8"))
            for _ in range(count)
        ]
        targets = ",".join(executor.wait_until_ready().target for executor in executors)
        near = ("--tokenizer-target", "local", "--postprocessor-target", "local", "--executor-target", targets)
        gateway = stack.enter_context(ServiceProcess("gateway", *at, *near, *NO_CACHE)).wait_until_ready()
        gateway.wait_for("all stages reached")
        load = LoadRequest(target=gateway.target, model="classifier", rate_per_s=rate, duration_s=_SECONDS)
        latency_ms = run_load(load).latency_ms
    assert latency_ms
    return latency_ms.p50 / 1000, latency_ms.p99 / 1000
