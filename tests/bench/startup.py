"""Start to ready, and memory, of each service with MiniLM on OpenVINO."""

import time
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from demo.processes import ServiceProcess
from neuronpipe.measure.machine import resident_mb
from tests.bench.systems import find_repository

SERVICES = ("tokenizer", "neuron-executor", "postprocessor", "gateway", "all")


@dataclass(frozen=True)
class Start:
    """One start of one service. None may hold torch."""

    service: str
    ready_s: float
    memory_mb: float
    holds_torch: bool


def measure_starts(rounds: int) -> Iterator[Start]:
    """Starts each service a few times, in turn."""
    repository = find_repository("float32")
    for _ in range(rounds):
        for service in SERVICES:
            with ServiceProcess(service, "--repository", str(repository)) as process:
                process.wait_until_ready()
                ready_s = time.monotonic() - process.began_s
                holds_torch = any("/torch/" in file.path for file in psutil.Process(process.pid).memory_maps())
                yield Start(service, ready_s, resident_mb(process.pid), holds_torch)
