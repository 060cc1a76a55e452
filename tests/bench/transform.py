"""Batch transform in process, beside the back end alone and others over the same rows.

Run: python -m tests.bench.transform [--rows N] [--rounds N] [--ray] [--alone]  prints a table, and writes nothing else.
--ray needs .venv-ray, which `make ray` makes; --alone leaves all others out. The systems take turns in every round;
loading a model is not counted.

- back end alone: tests/bench/ceiling.py, batches made beforehand
- transform: what `neuronpipe transform` runs, files included
- transformers: its pipeline over a dataset, with the faster of two batch sizes
- Ray Data: that pipeline in an actor for each CPU, by map_batches
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from neuronpipe.api.v1.tasks_pb2 import TaskInput, TextClassificationInput, Truncation
from neuronpipe.bulk.transform.near_engine import TransformSettings, find_bundle, running_near_engine
from neuronpipe.bulk.transform.request import TransformRequest
from neuronpipe.bulk.transform.run import make_plan, run_plan, run_with
from neuronpipe.cli.serve import event_loop
from neuronpipe.stages.neuron_executor.runtimes.host import available_cpus
from tests.bench.ceiling import running_ceiling
from tests.bench.peers.environments import CACHE, ROOT
from tests.bench.systems import MODEL, SOURCE, find_repository
from tests.bench.texts import make_texts

_RAY_PYTHON = ROOT / ".venv-ray" / "bin" / "python"
_BATCH_SIZES = (8, 32)
_CEILING_S = 5.0

# Runs all rows once, and returns rows a second.
Turn = Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class _Found:
    """`cpu_ms`: of a row, by the process that runs the turn; what others do on the machine changes it less than rows a
    second. None for several processes.
    """

    rows_per_s: float
    cpu_ms: float | None


# Each is a process that takes turns: a line in, the seconds of all rows out.
_TRANSFORMERS = """
import sys, time, json, os
import torch, transformers
source, rows, batch_size, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
torch.set_num_threads(threads)
pipeline = transformers.pipeline("text-classification", model=source, dtype=torch.float32, device="cpu")
texts = [json.loads(line)["text"] for line in open(rows)]
def run(texts):
    for _ in pipeline((text for text in texts), batch_size=batch_size, truncation=True, max_length=128): pass
run(texts[:64])
print("ready", flush=True)
for _ in sys.stdin:
    began = time.perf_counter(); run(texts); print(time.perf_counter() - began, flush=True)
"""
_RAY = """
import sys, time
import ray, ray.data
source, rows, batch_size, actors = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
class Classifier:
    def __init__(self):
        import torch, transformers
        torch.set_num_threads(1)
        self.pipeline = transformers.pipeline("text-classification", model=source, dtype=torch.float32, device="cpu")
    def __call__(self, batch):
        began = time.time()
        found = self.pipeline(list(batch["text"]), batch_size=batch_size, truncation=True, max_length=128)
        count = len(found)
        return {"label": [one["label"] for one in found], "score": [one["score"] for one in found],
                "began": [began] * count, "ended": [time.time()] * count}
for attempt in range(6):  # Ray gives up after 30 s, whatever else the machine does
    try:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        break
    except Exception:
        ray.shutdown()
ray.data.DataContext.get_current().enable_progress_bars = False
print("ready", flush=True)
for _ in sys.stdin:
    data = ray.data.read_json(rows, lines=True).repartition(4 * actors).map_batches(
        Classifier, batch_size=256, compute=ray.data.ActorPoolStrategy(size=actors), num_cpus=1)
    # By the actors' own clocks: they load the model first.
    found = data.to_pandas()
    print(found["ended"].max() - found["began"].min(), flush=True)
"""


async def _measure(rows: int, rounds: int, *, with_ray: bool, alone: bool) -> dict[str, list[_Found]]:
    """What was found of each system in each round."""
    found: dict[str, list[_Found]] = {}
    CACHE.mkdir(parents=True, exist_ok=True)
    repository = find_repository("float32")
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "rows.jsonl"
        texts = make_texts(rows)
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        async with AsyncExitStack() as stack:
            turns = await _systems(stack, repository, file, texts, with_ray=with_ray, alone=alone)
            for number in range(rounds):
                for system, (turn, pid) in turns.items():
                    one = await _take(turn, pid)
                    found.setdefault(system, []).append(one)
                    print(f"round {number + 1}: {system}: {one}", file=sys.stderr)
    return found


async def _take(turn: Turn, pid: int | None) -> _Found:
    began_s, began_cpu_s = time.perf_counter(), _cpu_s(pid)
    rows_per_s = await turn()
    rows = rows_per_s * (time.perf_counter() - began_s)
    return _Found(rows_per_s, 1000 * (_cpu_s(pid) - began_cpu_s) / rows if pid else None)


def _cpu_s(pid: int | None) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)


async def _systems(
    stack: AsyncExitStack, repository: Path, file: Path, texts: Sequence[str], *, with_ray: bool, alone: bool
) -> dict[str, tuple[Turn, int | None]]:
    ceiling = stack.enter_context(running_ceiling(repository, texts))
    (process,) = (one for one in multiprocessing.active_children() if one.name == "ceiling")
    turns: dict[str, tuple[Turn, int | None]] = {
        "back end alone": (lambda: asyncio.to_thread(ceiling.measure, _CEILING_S), process.pid),
        "transform": (await stack.enter_async_context(_transform(repository, file)), os.getpid()),
    }
    cpus = str(available_cpus())
    for batch_size in () if alone else _BATCH_SIZES:
        words = [_TRANSFORMERS, str(SOURCE), str(file), str(batch_size), cpus]
        turns[f"transformers, batches of {batch_size}"] = stack.enter_context(
            _process(sys.executable, words, len(texts))
        )
    if with_ray:
        words = [_RAY, str(SOURCE), str(file), str(_BATCH_SIZES[0]), cpus]
        turns["Ray Data with that pipeline"] = (
            stack.enter_context(_process(str(_RAY_PYTHON), words, len(texts)))[0],
            None,
        )
    return turns


@asynccontextmanager
async def _transform(repository: Path, file: Path) -> AsyncIterator[Turn]:
    settings = TransformSettings.of()
    bundle = find_bundle(repository, MODEL, "")
    template = TaskInput(text_classification=TextClassificationInput(truncation=Truncation.TRUNCATION_RIGHT))
    async with running_near_engine(bundle, settings) as engine:

        async def turn() -> float:
            with tempfile.TemporaryDirectory() as output:
                request = TransformRequest(
                    [str(file)], output, MODEL, task="text_classification", columns={"text": "text"}
                )
                plan = make_plan(request, engine.model, template)
                return (await run_plan(plan, run_with(engine), print)).rows_per_s

        yield turn


@contextmanager
def _process(python: str, words: Sequence[str], rows: int) -> Iterator[tuple[Turn, int]]:
    # Ray's environment has no torch and no transformers: it takes those of this one.
    environment = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "PYTHONPATH": sysconfig.get_paths()["purelib"]}
    process = subprocess.Popen(
        [python, "-c", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    )
    assert process.stdin
    assert process.stdout
    stdin, stdout = process.stdin, process.stdout

    def run() -> float:
        stdin.write("\n")
        stdin.flush()
        return rows / float(stdout.readline())

    async def turn() -> float:
        return await asyncio.to_thread(run)

    try:
        while stdout.readline().strip() != "ready":
            if process.poll() is not None:
                raise RuntimeError(f"{python} ended before it was ready")
        yield turn, process.pid
    finally:
        stdin.close()
        process.wait()


def main() -> None:
    """Prints the medians, and the ratios to the back end alone in the same round."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ray", action="store_true")
    parser.add_argument("--alone", action="store_true")
    options = parser.parse_args()
    began_s = time.monotonic()
    with asyncio.Runner(loop_factory=event_loop) as runner:
        found = runner.run(_measure(options.rows, options.rounds, with_ray=options.ray, alone=options.alone))
    ceilings = found["back end alone"]
    print(f"{options.rows} rows, {options.rounds} rounds, {available_cpus()} CPUs, {time.monotonic() - began_s:.0f} s")
    print("| System | Rows a second | Of the back end alone | CPU ms a row | Of the back end alone |")
    print("|---|---:|---:|---:|---:|")
    for system, rates in found.items():
        ratios = [one.rows_per_s / ceiling.rows_per_s for one, ceiling in zip(rates, ceilings, strict=True)]
        cpu = [
            (one.cpu_ms, ceiling.cpu_ms / one.cpu_ms)
            for one, ceiling in zip(rates, ceilings, strict=True)
            if one.cpu_ms and ceiling.cpu_ms
        ]
        cells = [system, f"{statistics.median(one.rows_per_s for one in rates):.0f}", _spread(ratios)]
        cells += (
            [f"{statistics.median(ms for ms, _ in cpu):.2f}", _spread([ratio for _, ratio in cpu])] if cpu else ["", ""]
        )
        print("|", " | ".join(cells), "|")


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.1%} ({min(ratios):.1%} – {max(ratios):.1%})"


if __name__ == "__main__":
    main()
