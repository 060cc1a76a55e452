"""A SIMULATION, not a measurement of Neuron: how busy the pipeline keeps devices that wait as long as AWS's published figures say.

Run: python -m tests.bench.neuron_sim [--seconds S] [--cores 1,2,8,24] [--table NAME] [--out FOLDER]
"""

import argparse
import asyncio
import math
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import uvloop

from demo.processes import ServiceProcess, four_processes
from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.api.v1.stages_pb2 import ExecuteItem
from neuronpipe.bundles.compiler import CompileRequest, compile_bundle
from neuronpipe.bundles.compiler.buckets import BucketRequest
from neuronpipe.bundles.compiler.device_times import DEVICE_TIMES
from neuronpipe.bundles.repository import read_repository
from neuronpipe.core.buckets import parse_bucket
from neuronpipe.core.config import EngineSettings
from neuronpipe.core.tensors import to_tensor_set
from neuronpipe.neuron_executor.stage import running_executor
from tests.bench.closed_loop import ClosedLoop, System
from tests.bench.systems import NO_CACHE
from tests.integration.requests import classify
from tests.models import classifier

_WORD_TOKENS = 100
_IN_FLIGHT = 2
_HEADING = "SIMULATION. No Neuron device was involved: the back end waits for as long as AWS's published figures say a core takes."


def _executor_alone(repository: Path, cores: int, callers: int, seconds: float) -> float:
    """Sequences a second through scheduler, padding and back end, in one process, without gRPC and tokenizer."""
    item = ExecuteItem(model="classifier", sequences=[to_tensor_set({"input_ids": np.full(_WORD_TOKENS, 7, np.int32)})])

    async def measure() -> float:
        done, end_s = 0, time.monotonic() + seconds

        async def call() -> None:
            nonlocal done
            while time.monotonic() < end_s:
                await stage.execute(item)
                done += 1

        async with running_executor(read_repository(repository), EngineSettings(cores=cores, in_flight=_IN_FLIGHT)) as stage:
            end_s = time.monotonic() + seconds
            await asyncio.gather(*(call() for _ in range(callers)))
        return done / seconds

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measure())


def _served(repository: Path, cores: int, callers: int, seconds: float) -> dict[str, float]:
    request: InferRequest = classify("word " * (_WORD_TOKENS - 2))
    options = ("--cores", str(cores), "--in-flight", str(_IN_FLIGHT))
    rates = {}
    with ExitStack() as stack:
        one = stack.enter_context(ServiceProcess("all", "--repository", str(repository), *options, *NO_CACHE)).wait_until_ready()
        loop = stack.enter_context(ClosedLoop.started([request.SerializeToString()]))
        rates["serve all"] = loop.measure(System("serve all", one.target), callers, seconds).throughput_per_s
    with ExitStack() as stack:
        four = stack.enter_context(four_processes(repository, stage_options={"neuron-executor": options, "tokenizer": NO_CACHE}))
        loop = stack.enter_context(ClosedLoop.started([request.SerializeToString()]))
        rates["four processes"] = loop.measure(System("four processes", four["gateway"].target), callers, seconds).throughput_per_s
    return rates


def _simulate(table: str, cores: list[int], seconds: float) -> list[str]:
    times = DEVICE_TIMES[table]
    core_rate = max(1000 * parse_bucket(bucket).batch / time_ms for bucket, time_ms in times.items())
    lines = [
        f"# {table}, simulated",
        "",
        _HEADING,
        f"Times of a core: {', '.join(f'{bucket} {time_ms} ms' for bucket, time_ms in times.items())}; at best {core_rate:.0f} a second.",
        f"Texts of {_WORD_TOKENS} tokens, {seconds:g} s each. 'Busy' is the share of the simulated cores' best that came through.",
        "",
        "| cores | at best /s | executor alone /s | busy | serve all /s | busy | four processes /s | busy | `serve all` processes needed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory(prefix="neuron-sim-") as folder:
        request = CompileRequest(
            source=str(classifier(Path(folder) / "source")),
            task="text_classification",
            repository=Path(folder) / "repository",
            name="classifier",
            backend="fake",
            buckets=BucketRequest(tuple(times)),
            device_times=table,
        )
        compile_bundle(request, lambda line: None)
        for count in cores:
            best, callers = core_rate * count, min(512, 32 * _IN_FLIGHT * count)
            rates = {"alone": _executor_alone(request.repository, count, callers, seconds)}
            rates |= _served(request.repository, count, callers, seconds)
            cells = [f"{rate:.0f} | {rate / best:.0%}" for rate in rates.values()]
            lines.append(f"| {count} | {best:.0f} | {' | '.join(cells)} | {math.ceil(best / rates['serve all'])} |")
    return [*lines, ""]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--cores", default="1,2,8,24")
    parser.add_argument("--table", choices=DEVICE_TIMES, action="append")
    parser.add_argument("--out", type=Path, default=Path(".cache/bench/neuron-sim"))
    options = parser.parse_args()
    report = "\n".join(
        line
        for table in options.table or DEVICE_TIMES
        for line in _simulate(table, [int(count) for count in options.cores.split(",")], options.seconds)
    )
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "README.md").write_text(report)
    print(report)
