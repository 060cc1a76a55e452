"""Starts the processes that trace for Neuron.

So a compiler can be killed, and a runtime gives its cores back, when a process ends.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np

from neuronpipe.bundles.buckets import Bucket
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.parts import part_names

# The line that the worker writes for each finished bucket, with the bucket's name.
DONE = "traced "
# In the trace of a part: its inputs, a list of names and shapes.
INPUTS_FILE = "inputs.json"
_WORKER = "neuronpipe.compiler.neuronx_worker"
_ERROR_LINES = 5
_KEPT = (
    "; where its cores belong to another process, end that one: what was compiled is kept and will not be "
    "compiled again"
)
# A trace runs the model three times; on a busy machine threads would mostly wait for each other.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class FilledBucket:
    """A batch in the shape of its bucket. The first `rows` and `tokens` are real."""

    bucket: Bucket
    inputs: Mapping[str, Any]
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TraceJob:
    """The traces that one process makes: `outputs` by name. `firsts`: the first layer of each part."""

    source_folder: str
    task: str
    attention: str
    flags: list[str]
    firsts: list[int]
    outputs: dict[str, str]


class _Workers:
    """Worker processes, each the leader of a process group with the compilers that it starts.

    None is left when the block ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._is_ending = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def start(
        self, job: Mapping[str, Any], folder: Path, stderr: IO[str], environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Starts a worker, which also ends with this process. Raises SetupError once the block is ending."""
        path = folder / "job.json"
        path.write_text(json.dumps(job))
        with self._lock:
            if self._is_ending:
                raise SetupError("another bucket failed")
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", _WORKER, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )
            self._processes.append(process)
            return process

    def kill(self) -> None:
        """Ends all workers, and starts no more."""
        with self._lock:
            self._is_ending = True
            for process in self._processes:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)


def trace_all(job: TraceJob, outputs: Mapping[str, Path], workers: int, done: Callable[[str], None]) -> None:
    """Traces every bucket, and calls `done` with each when it is finished.

    The first failure ends the other workers: finished buckets are kept, those in progress are not. Raises SetupError,
    which names the bucket that could not be compiled.
    """
    names = list(outputs)
    shares = [names[first::workers] for first in range(min(workers, len(names)))]
    jobs = [dataclasses.replace(job, outputs={name: str(outputs[name]) for name in share}) for share in shares]
    lock = threading.Lock()

    def one(share: TraceJob) -> None:
        with (
            tempfile.TemporaryDirectory(prefix="neuronx-job-") as folder,
            (Path(folder) / "errors").open("w+") as errors,
        ):
            left = list(share.outputs)
            with processes.start(dataclasses.asdict(share), Path(folder), errors, _ENVIRONMENT) as process:
                for line in process.stdout or ():
                    if line.startswith(DONE):
                        left.remove(name := line.removeprefix(DONE).strip())
                        with lock:
                            done(name)
                process.wait()  # with its stdin open still, without which it would end at once
            if left:  # one that ends badly after its last bucket has done its work
                errors.seek(0)
                raise SetupError(_failure(left[0], process.returncode, errors.read()))

    with ThreadPoolExecutor(max_workers=max(1, len(jobs))) as threads, _Workers() as processes:
        # Inside the pool's block, whose end waits for its threads, and they for their processes.
        for future in as_completed([threads.submit(one, share) for share in jobs]):
            future.result()


def read_inputs(trace: Path) -> list[dict[str, Any]]:
    """The inputs of the trace of a part, by name and shape."""
    with zipfile.ZipFile(trace) as file:
        name = next(one for one in file.namelist() if one.endswith(f"extra/{INPUTS_FILE}"))
        inputs: list[dict[str, Any]] = json.loads(file.read(name))
        return inputs


def _failure(bucket: str, code: int, errors: str) -> str:
    killed = (
        "was killed, as it is where memory runs out: compile on a machine with more of it, or with fewer "
        "--compile-workers"
    )
    if code == -9 or "failed with -9" in errors:
        return f"bucket {bucket}: the Neuron compiler {killed}"
    return f"bucket {bucket}: the Neuron compiler failed: {_last_lines(errors)}"


def run_all(
    folder: Path, inputs: Sequence[str], outputs: Sequence[str], parts: Sequence[FilledBucket], cores: int = 1
) -> list[dict[str, Any]]:
    """The outputs of traces on this machine's device, computed in a process that owns its cores only meanwhile.

    `cores`: one for each part of the model. Raises SetupError.
    """
    with tempfile.TemporaryDirectory(prefix="neuronx-run-") as work, (Path(work) / "errors").open("w+") as errors:
        for number, part in enumerate(parts):
            np.savez(Path(work) / f"in-{number}.npz", **{name: part.inputs[name] for name in inputs})
        job = {
            "folder": str(folder),
            "inputs": list(inputs),
            "traces": [part_names(str(part.bucket), cores) for part in parts],
            "work": work,
        }
        with (
            _Workers() as processes,
            processes.start(job, Path(work), errors, {"NEURON_RT_NUM_CORES": str(cores)}) as process,
        ):
            process.wait()
        if process.returncode != 0:
            errors.seek(0)
            raise SetupError(
                f"the traces cannot be run on this machine's Neuron device: {_last_lines(errors.read())}{_KEPT}"
            )
        results = []
        for number in range(len(parts)):
            with np.load(Path(work) / f"out-{number}.npz") as arrays:
                results.append({name: arrays[f"arr_{index}"] for index, name in enumerate(outputs)})
        return results


def _last_lines(text: str) -> str:
    return " | ".join([line for line in text.splitlines() if line.strip()][-_ERROR_LINES:])
