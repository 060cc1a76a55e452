"""Starts the processes that trace for Neuron: a compiler that is killed, or a runtime that owns cores, ends with its process."""

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from neuronpipe.core.buckets import Bucket
from neuronpipe.core.errors import SetupError

# What the worker writes, with the bucket's name, as one is there.
DONE = "traced "
_WORKER = "neuronpipe.bundles.compiler.neuronx_worker"
_ERROR_LINES = 5
# A trace runs the model three times; on a busy machine threads would mostly wait for each other.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class FilledBucket:
    """A batch in the shape of its bucket, of which `rows` and `tokens` are real."""

    bucket: Bucket
    inputs: Mapping[str, Any]
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TraceJob:
    """What one process traces: `outputs` by bucket."""

    source_folder: str
    task: str
    attention: str
    flags: list[str]
    cpu_backend: bool
    outputs: dict[str, str]


def trace_all(job: TraceJob, outputs: Mapping[str, Path], workers: int, done: Callable[[str], None]) -> None:
    """Traces every bucket; `done` is told each as it is there. Raises SetupError naming the bucket that could not be compiled."""
    names = list(outputs)
    shares = [names[first::workers] for first in range(min(workers, len(names)))]
    jobs = [dataclasses.replace(job, outputs={name: str(outputs[name]) for name in share}) for share in shares]
    lock = threading.Lock()
    processes: list[subprocess.Popen[str]] = []

    def one(share: TraceJob) -> None:
        with tempfile.TemporaryDirectory(prefix="neuronx-job-") as folder, (Path(folder) / "errors").open("w+") as errors:
            path = Path(folder) / "job.json"
            path.write_text(json.dumps(dataclasses.asdict(share)))
            left = list(share.outputs)
            command, environment = [sys.executable, "-m", _WORKER, str(path)], {**os.environ, **_ENVIRONMENT}
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment) as process:  # noqa: S603
                processes.append(process)
                for line in process.stdout or ():
                    if line.startswith(DONE):
                        left.remove(name := line.removeprefix(DONE).strip())
                        with lock:
                            done(name)
            if left:  # one that ends badly after its last bucket has done its work
                errors.seek(0)
                raise SetupError(_failure(left[0], process.returncode, errors.read()))

    try:
        with ThreadPoolExecutor(max_workers=max(1, len(jobs))) as threads:
            list(threads.map(one, jobs))
    finally:
        for process in processes:
            process.kill()


def _failure(bucket: str, code: int, errors: str) -> str:
    killed = "was killed, as it is where memory runs out: compile on a machine with more of it, or with fewer --compile-workers"
    if code == -9 or "failed with -9" in errors:
        return f"bucket {bucket}: the Neuron compiler {killed}"
    lines = [line for line in errors.splitlines() if line.strip()][-_ERROR_LINES:]
    return f"bucket {bucket}: the Neuron compiler failed: " + " | ".join(lines)


def run_all(folder: Path, inputs: Sequence[str], outputs: Sequence[str], parts: Sequence[FilledBucket]) -> list[dict[str, Any]]:
    """The outputs of traces on this machine's device, computed in a process that owns a core only as long. Raises SetupError."""
    with tempfile.TemporaryDirectory(prefix="neuronx-run-") as work:
        for number, part in enumerate(parts):
            np.savez(Path(work) / f"in-{number}.npz", **{name: part.inputs[name] for name in inputs})
        job = {"folder": str(folder), "inputs": list(inputs), "buckets": [str(part.bucket) for part in parts], "work": work}
        path = Path(work) / "job.json"
        path.write_text(json.dumps(job))
        process = subprocess.run(  # noqa: S603
            [sys.executable, "-m", _WORKER, str(path)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "NEURON_RT_NUM_CORES": "1"},
        )
        if process.returncode != 0:
            lines = [line for line in process.stderr.splitlines() if line.strip()][-_ERROR_LINES:]
            raise SetupError("the traces cannot be run on this machine's Neuron device: " + " | ".join(lines))
        results = []
        for number in range(len(parts)):
            with np.load(Path(work) / f"out-{number}.npz") as arrays:
                results.append({name: arrays[f"arr_{index}"] for index, name in enumerate(outputs)})
        return results
