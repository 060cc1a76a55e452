"""Starts services as processes of their own and ends them: for the demo, the tests and the benchmarks."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from neuronpipe.measure.processes import ServiceProcess as ServiceProcess


@contextmanager
def four_processes(
    repository: Path | str,
    *options: str,
    stage_options: Mapping[str, Sequence[str]] = MappingProxyType({}),
    gateway_options: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[dict[str, ServiceProcess]]:
    """The four services, ready, by name. They end with the block.

    `options` are for all of them, `stage_options` for some stages, `gateway_options` for the gateway alone.
    """
    options = ("--repository", str(repository), *options)
    stages: dict[str, ServiceProcess] = {}

    def end_stages(*error: Any) -> None:
        with ThreadPoolExecutor() as ending:
            list(ending.map(lambda process: process.__exit__(*error), stages.values()))

    with ExitStack() as stack:
        stack.push(end_stages)
        for service in ("tokenizer", "neuron-executor", "postprocessor"):
            stages[service] = ServiceProcess(
                service, *options, *stage_options.get(service, ()), environment=environment
            )
        targets = [f"--{name}-target={stages[service].target}" for name, service in _TARGET_OPTIONS.items()]
        gateway = stack.enter_context(
            ServiceProcess("gateway", *options, *targets, *gateway_options, environment=environment)
        )
        for process in (*stages.values(), gateway):
            process.wait_until_ready()
        gateway.wait_for("all stages reached")
        yield {**stages, "gateway": gateway}


_TARGET_OPTIONS = {"tokenizer": "tokenizer", "executor": "neuron-executor", "postprocessor": "postprocessor"}
