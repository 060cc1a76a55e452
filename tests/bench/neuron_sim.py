"""A SIMULATION, not a measurement of Neuron: how busy the pipeline keeps devices that wait as long as AWS's published
figures say.

Run: python -m tests.bench.neuron_sim [--seconds S] [--cores 1,2,8,24] [--table NAME] [--out FOLDER]
"""

import argparse
import math
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from pathlib import Path

import numpy as np
import uvloop

from neuronpipe.api.v1.inference_pb2 import InferRequest
from neuronpipe.bundles.buckets import parse_bucket
from neuronpipe.bundles.manifest import MANIFEST_FILE
from neuronpipe.bundles.repository import read_repository
from neuronpipe.bundles.writing import write_manifest
from neuronpipe.compiler import BucketRequest
from neuronpipe.core.calls import Call
from neuronpipe.core.items import ExecuteItem, ModelKey
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.packed import TensorSets
from neuronpipe.measure.figures import markdown_table
from neuronpipe.measure.machine import describe_machine
from neuronpipe.stages.neuron_executor.stage import running_executor
from neuronpipe.stages.settings import EngineSettings
from tests.bench.load import LoadProcess, send_all
from tests.bench.systems import NO_CACHE, serving_all, serving_four
from tests.callers.requests import classify
from tests.models.compiling import compile_model
from tests.models.repository import classifier

# AWS's figures for inf2.xlarge, which has two cores: length 128, float32 with matmult-bf16. A core's time for a batch
# is 2 x batch / throughput. No figure is published for these models on 16 or 24 cores: a simulation takes each core to
# be as fast there. Source: about-neuron/benchmarks/inf2 of aws-neuron/aws-neuron-sdk, last update 2026-02-26.
_THROUGHPUT_PER_S = {
    "inf2-bert-base": {(1, 128): 1998.21, (8, 128): 2674.19},
    "inf2-distilbert": {(1, 128): 3401.97, (16, 128): 5307.88},
}
_CORES = 2
# Name → bucket → milliseconds.
DEVICE_TIMES: Mapping[str, Mapping[str, float]] = {
    name: {f"{batch}x{tokens}": round(1000 * _CORES * batch / rate, 3) for (batch, tokens), rate in rates.items()}
    for name, rates in _THROUGHPUT_PER_S.items()
}
_WORD_TOKENS = 100
_IN_FLIGHT = 2
_ALONE, _ALL, _FOUR = "executor alone", "`serve all`", "four processes"
_HEADING = (
    "**A SIMULATION. No Neuron device was involved.** The back end waits for as long as AWS's published figures for "
    "inf2.xlarge say that a "
    "core takes, and computes nothing; larger instances are taken to have cores of the same speed."
)


@dataclass(frozen=True)
class _Rate:
    """Sequences a second, and the CPU time of all its processes that one took, in seconds."""

    a_second: float
    cpu_s: float


def _executor_alone(repository: Path, cores: int, callers: int, seconds: float) -> _Rate:
    """Through scheduler, padding and back end, in one process, without gRPC and tokenizer."""
    item = ExecuteItem(
        Call(), ModelKey("classifier", 1), TensorSets(arrays=[{"input_ids": np.full(_WORD_TOKENS, 7, np.int32)}])
    )

    async def measure() -> _Rate:
        async with running_executor(
            read_repository(repository), EngineSettings(cores=cores, in_flight=_IN_FLIGHT), Telemetry()
        ) as stage:
            cpu_began_s = time.process_time()
            found = await send_all(stage.execute, repeat(item), callers=callers, seconds=seconds)
            done = len(found.answers)
            return _Rate(done / seconds, (time.process_time() - cpu_began_s) / done)

    rate: _Rate = uvloop.run(measure())
    return rate


def _served(repository: Path, cores: int, callers: int, seconds: float) -> dict[str, _Rate]:
    request: InferRequest = classify("word " * (_WORD_TOKENS - 2))
    options = ("--cores", str(cores), "--in-flight", str(_IN_FLIGHT))
    stage_options = {"neuron-executor": options, "tokenizer": NO_CACHE}
    rates = {}
    for name, serving in (
        (_ALL, serving_all(repository, options=(*options, *NO_CACHE))),
        (_FOUR, serving_four(repository, stage_options=stage_options)),
    ):
        with serving as system, LoadProcess.started([request.SerializeToString()]) as loop:
            turn = loop.measure(system, callers, seconds)
            rates[name] = _Rate(turn.throughput_per_s, turn.figures["server_cpu_us"] / 1e6)
    return rates


def _simulate(table: str, cores: Sequence[int], seconds: float) -> dict[int, dict[str, _Rate]]:
    with tempfile.TemporaryDirectory(prefix="neuron-sim-") as folder:
        repository, buckets = Path(folder) / "repository", BucketRequest(tuple(DEVICE_TIMES[table]))
        source = classifier(Path(folder) / "source")
        bundle = compile_model(source, repository, name="classifier", backend="fake", buckets=buckets)
        times = ",".join(f"{bucket}:{time_ms:g}" for bucket, time_ms in DEVICE_TIMES[table].items())
        (artifact,) = bundle.manifest.artifacts
        timed = artifact.model_copy(update={"properties": {"device_times_ms": times}})
        (bundle.folder / MANIFEST_FILE).unlink()  # which does not list itself
        write_manifest(bundle.folder, bundle.manifest.model_copy(update={"artifacts": (timed,)}))
        rates = {}
        for count in cores:
            print(f"{table}, {count} simulated cores", file=sys.stderr, flush=True)
            callers = min(512, 32 * _IN_FLIGHT * count)
            alone = _executor_alone(repository, count, callers, seconds)
            rates[count] = {_ALONE: alone, **_served(repository, count, callers, seconds)}
        return rates


def _core_rate(table: str) -> float:
    return max(1000 * parse_bucket(bucket).batch / time_ms for bucket, time_ms in DEVICE_TIMES[table].items())


def _section(table: str, rates: Mapping[int, Mapping[str, _Rate]]) -> Iterator[str]:
    core_rate, times, names = _core_rate(table), DEVICE_TIMES[table], (_ALONE, _ALL, _FOUR)
    cells = ", ".join(f"{time_ms} ms for {bucket}" for bucket, time_ms in times.items())
    yield from (f"## {table}, simulated", "", f"A core takes {cells}: at best {core_rate:.0f}/s.", "")
    headings = [heading for name in names for heading in (f"{name} /s", "busy")]
    busy: list[tuple[object, ...]] = []
    for count, systems in rates.items():
        best = core_rate * count
        shares = ((f"{systems[name].a_second:.0f}", f"{systems[name].a_second / best:.0%}") for name in names)
        busy.append((count, f"{best:.0f}", *chain.from_iterable(shares)))
    yield from _table(("simulated cores", "at best /s", *headings), busy)
    # Where most was done: waiting for too little costs CPU time, too.
    costs = {name: min(systems[name].cpu_s for systems in rates.values()) for name in names}
    cpus = os.cpu_count() or 1
    said = ", ".join(f"{name} {1e6 * cost:.0f} µs" for name, cost in costs.items())
    yield from (f"CPU time of a sequence: {said}. To keep the cores busy:", "")
    needed: list[tuple[object, ...]] = []
    for count in rates:
        best = core_rate * count
        executors, pipelines = (math.ceil(best * costs[name]) for name in (_ALONE, _ALL))
        needed.append((count, f"{best:.0f}", executors, pipelines, math.ceil(pipelines / cpus)))
    machines = f"machines of {cpus} CPUs for these"
    processes = ("executor processes", "`serve all` processes", machines)
    yield from _table(("simulated cores", "sequences /s", *processes), needed)


def _table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterator[str]:
    yield from (*markdown_table(headings, rows), "")


def _page(found: Mapping[str, Mapping[int, Mapping[str, _Rate]]], machine: Mapping[str, str], seconds: float) -> str:
    command = shlex.join(["python", "-m", "tests.bench.neuron_sim", *sys.argv[1:]])
    lines = [
        *("# Neuron at its published speed, simulated", "", _HEADING, ""),
        *(f"Written by `{command}` (`make bench-neuron-sim`). Do not edit.", ""),
        f"Texts of {_WORD_TOKENS} tokens, {seconds:g} s each, {_IN_FLIGHT} batches in flight on a core. `busy` is the "
        "share of the simulated cores' best that came through. The executor alone has no gRPC and no tokenizer around "
        "it, and its callers in its process; the served ones share this machine's CPUs with the callers. Processes "
        "needed are counted from CPU time, which depends less than shares on what else the machine does: Python "
        "computes on one CPU a process.",
        *("", *markdown_table(("machine", ""), machine.items()), ""),
        *(line for table, rates in found.items() for line in _section(table, rates)),
    ]
    return "\n".join(lines)


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--cores", default="1,2,8,24")
    parser.add_argument("--table", choices=DEVICE_TIMES, action="append")
    parser.add_argument("--out", type=Path, default=Path("docs/benchmarks"))
    options = parser.parse_args()
    cores = [int(count) for count in options.cores.split(",")]
    machine = describe_machine()
    found = {table: _simulate(table, cores, options.seconds) for table in options.table or DEVICE_TIMES}
    page = _page(found, machine, options.seconds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "neuron-sim.md").write_text(page)
    print(page)


if __name__ == "__main__":
    _main()
