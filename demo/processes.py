"""Starts services as processes of their own and ends them: for the demo, the tests and the benchmarks."""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType

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
    with ThreadPoolExecutor() as stopping, ExitStack() as stack:
        started = {
            service: stack.enter_context(
                ServiceProcess(service, *options, *stage_options.get(service, ()), environment=environment)
            )
            for service in ("tokenizer", "neuron-executor", "postprocessor")
        }
        stack.callback(lambda: list(stopping.map(ServiceProcess.stop, started.values())))  # the stages, all at once
        targets = [f"--{name}-target={started[service].target}" for name, service in _TARGET_OPTIONS.items()]
        started["gateway"] = stack.enter_context(
            ServiceProcess("gateway", *options, *targets, *gateway_options, environment=environment)
        )
        for process in started.values():
            process.wait_until_ready()
        started["gateway"].wait_for("all stages reached")
        yield started


_TARGET_OPTIONS = {"tokenizer": "tokenizer", "executor": "neuron-executor", "postprocessor": "postprocessor"}
