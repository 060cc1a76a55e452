"""The processes that trace for Neuron, or run traces: how they are started, and what they do.

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
from typing import IO, Any, TextIO

import numpy as np
import torch

from neuronpipe.bundles.buckets import Bucket, bucket_inputs, parse_bucket
from neuronpipe.compiler.modules import Positional, SourceModule
from neuronpipe.compiler.own_graphs import register_own_graphs
from neuronpipe.compiler.pipeline import Pipeline
from neuronpipe.compiler.slots import slot_step, source_encoder
from neuronpipe.compiler.tasks import SOURCE_TASKS, load_module
from neuronpipe.core.errors import SetupError
from neuronpipe.stages.neuron_executor.runtimes.parts import HIDDEN, part_names
from neuronpipe.stages.neuron_executor.runtimes.slots import split_name
from neuronpipe.tasks import TASKS

# The line that the worker writes for each finished bucket, with the bucket's name.
_DONE = "traced "
# In the trace of a part: its inputs, a list of names and shapes.
_INPUTS_FILE = "inputs.json"
_WORK = "from neuronpipe.compiler.neuronx_processes import work; work()"
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

    None is left once they are closed.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._processes: list[subprocess.Popen[str]] = []
        self._is_ending = False

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
                [sys.executable, "-c", _WORK, str(path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **environment},
                start_new_session=True,
            )
            self._processes.append(process)
            return process

    def close(self) -> None:
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
                    if line.startswith(_DONE):
                        left.remove(name := line.removeprefix(_DONE).strip())
                        with lock:
                            done(name)
                process.wait()  # with its stdin open still, without which it would end at once
            if left:  # one that ends badly after its last bucket has done its work
                errors.seek(0)
                raise SetupError(_failure(left[0], process.returncode, errors.read()))

    with ThreadPoolExecutor(max_workers=max(1, len(jobs))) as threads, contextlib.closing(_Workers()) as processes:
        # Inside the pool's block, whose end waits for its threads, and they for their processes.
        for future in as_completed([threads.submit(one, share) for share in jobs]):
            future.result()


def read_inputs(trace: Path) -> list[dict[str, Any]]:
    """The inputs of the trace of a part, by name and shape."""
    with zipfile.ZipFile(trace) as file:
        name = next(one for one in file.namelist() if one.endswith(f"extra/{_INPUTS_FILE}"))
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
            contextlib.closing(_Workers()) as processes,
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


def _trace(job: TraceJob, done: TextIO) -> None:
    register_own_graphs()
    folder = Path(job.source_folder)
    source = load_module(folder, job.task, SOURCE_TASKS[job.task].load_tokenizer(folder), attention=job.attention)
    for name, path in job.outputs.items():
        bucket_name, is_encoder = split_name(name)
        bucket_name, _, part = bucket_name.partition("-")
        bucket = parse_bucket(bucket_name)
        if part:
            _trace_part(source, bucket, int(part) - 1, job, path)
        else:
            module, example, aliases = _encoder(source, bucket, job) if is_encoder else _traceable(source, bucket)
            _trace_module(module, example, aliases, job, path)
        done.write(f"\n{_DONE}{name}\n")
        done.flush()


def _trace_part(source: SourceModule, bucket: Bucket, number: int, job: TraceJob, path: str) -> None:
    with Pipeline(source, _example(source, bucket), job.firsts).part(number, has_fixed_shapes=True) as (part, example):
        module = Positional(part.module, part.inputs, part.outputs).eval()
        _trace_module(module, tuple(example.values()), {}, job, path, part.inputs)


def _trace_module(
    module: torch.nn.Module,
    example: tuple[torch.Tensor, ...],
    aliases: dict[torch.Tensor, int],
    job: TraceJob,
    path: str,
    inputs: Sequence[str] = (),
) -> None:
    """Writes a trace, and the names of its inputs where these are not the model's."""
    import torch_neuronx

    # Without a device even if there is one: the target is among the flags, and the cores may be in use by another
    # process.
    traced = torch_neuronx.trace(
        module, example, input_output_aliases=aliases, compiler_args=job.flags, cpu_backend=True
    )
    described = [{"name": name, "shape": list(one.shape)} for name, one in zip(inputs, example, strict=False)]
    torch.jit.save(traced, path, _extra_files={_INPUTS_FILE: json.dumps(described)} if described else {})


def _example(source: SourceModule, bucket: Bucket) -> dict[str, torch.Tensor]:
    """Inputs of a bucket, by name in the module's order; a row of padding alone would be masked completely."""
    values = {"input_ids": source.tokenizer.pad_token_id, "attention_mask": 1}
    inputs = bucket_inputs(source.inputs, bucket, source.image)
    return {
        name: torch.full(shape, values.get(name, 0), dtype=getattr(torch, dtype))
        for name, (shape, dtype) in inputs.items()
    }


def _traceable(
    source: SourceModule, bucket: Bucket
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], dict[torch.Tensor, int]]:
    """What is traced for a bucket, with an example, and the outputs that become states."""
    if TASKS[source.task].generates:
        step = slot_step(source, bucket)
        return step, step.example(), step.aliases()
    module = Positional(source.module, source.inputs, source.outputs).eval()
    return module, tuple(_example(source, bucket).values()), {}


def _encoder(
    source: SourceModule, bucket: Bucket, job: TraceJob
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], dict[torch.Tensor, int]]:
    """As `_traceable`."""
    token_ids = torch.zeros(1, bucket.tokens, dtype=torch.int64)
    return source_encoder(source, job.attention), (token_ids, torch.ones(1, dtype=torch.int64)), {}


def _run(job: Mapping[str, Any]) -> None:
    """Runs batches, each through the traces of its bucket: one, or one for each part of the model."""
    import torch_neuronx

    # Before release 2.25 of the SDK it is in `experimental`.
    place = getattr(torch_neuronx, "neuron_cores_context", None) or torch_neuronx.experimental.neuron_cores_context
    parts: dict[str, Any] = {}
    for number, names in enumerate(job["traces"]):
        with np.load(Path(job["work"]) / f"in-{number}.npz") as arrays:
            values = {name: torch.from_numpy(arrays[name]) for name in job["inputs"]}
        for core, name in enumerate(names):
            if name not in parts:
                path = Path(job["folder"]) / f"{name}.pt"
                with place(start_nc=core, nc_count=1):
                    parts[name] = torch.jit.load(path)
            described = json.loads((Path(job["folder"]) / f"{name}.json").read_text())
            outputs = parts[name](*(values[one["name"]] for one in described["inputs"]))
            values[HIDDEN] = outputs[0]
        np.savez(Path(job["work"]) / f"out-{number}.npz", *(output.float().numpy() for output in outputs))


def _own_stdout() -> TextIO:
    """Keeps this process's stdout for itself.

    From now on, everything that others write to it, including the compilers that it starts, goes to stderr.
    """
    ours = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return ours


def _end_with_parent() -> None:
    """Ends this process, and the compilers that it started, when its parent ends for any reason.

    Its stdin is a pipe of the parent.
    """

    def wait() -> None:
        os.read(0, 1)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()


def work() -> None:
    """Does the job of the file that is this process's only argument."""
    done = _own_stdout()
    _end_with_parent()
    content = json.loads(Path(sys.argv[1]).read_text())
    if "outputs" in content:
        _trace(TraceJob(**content), done)
    else:
        _run(content)
