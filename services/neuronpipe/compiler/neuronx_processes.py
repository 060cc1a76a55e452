"""The processes that trace for Neuron, or run traces: how they are started, and their work.

A process can be killed with its compiler, and its runtime gives cores back when the process ends.
"""

import dataclasses
import json
import os
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

import torch

from neuronpipe.bundles.buckets import Bucket, bucket_inputs, parse_bucket
from neuronpipe.compiler.modules import Positional, SourceModule
from neuronpipe.compiler.own_graphs import register_own_graphs
from neuronpipe.compiler.pipeline_parallel import PipelinedModel
from neuronpipe.compiler.slots import slot_step, source_encoder
from neuronpipe.compiler.tasks import SOURCE_TASKS, load_module
from neuronpipe.core.errors import SetupError
from neuronpipe.platform.process.worker import ProcessEnded, Worker
from neuronpipe.stages.neuron_executor.runtimes.parts import HIDDEN, part_names
from neuronpipe.stages.neuron_executor.runtimes.slots import split_name
from neuronpipe.tasks import TASKS

# A file in the trace of a part: its inputs, a list of names and shapes.
_INPUTS_FILE = "inputs.json"
_ERROR_LINES = 5
# A module to trace, an example of its inputs, and the outputs that become states.
_Traceable: TypeAlias = tuple[torch.nn.Module, tuple[torch.Tensor, ...], dict[torch.Tensor, int]]
_KEPT = (
    "; where its cores belong to another process, end that one: what was compiled is kept and will not be "
    "compiled again"
)


@dataclass(frozen=True, slots=True)
class FilledBucket:
    """A batch in the shape of its bucket. The first `rows` and `tokens` are real."""

    bucket: Bucket
    inputs: Mapping[str, Any]
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class TraceJob:
    """The traces that a process makes of a model. `firsts`: the first layer of each part."""

    source_folder: str
    task: str
    attention: str
    flags: list[str]
    firsts: list[int]
    outputs: dict[str, str]
    adapters: tuple[str, ...] = ()


def trace_all(job: TraceJob, outputs: Mapping[str, Path], workers: int, done: Callable[[str], None]) -> None:
    """Traces every bucket, and calls `done` with each. The first failure ends all workers. Raises SetupError."""
    names = list(outputs)
    remaining, logs = dict[Worker, list[str]](), dict[Worker, Path]()
    with ExitStack() as stack:
        for number in range(min(workers, len(names))):
            share = names[number::workers]
            worker_job = dataclasses.replace(job, outputs={name: str(outputs[name]) for name in share})
            log = Path(stack.enter_context(tempfile.NamedTemporaryFile(prefix="neuronx-")).name)
            worker = stack.enter_context(
                Worker.started(_trace, worker_job, name=f"Neuron compiler {number + 1}", log=log)
            )
            remaining[worker], logs[worker] = share, log
        while remaining:
            ready = wait([worker.pipe for worker in remaining])
            for worker in [worker for worker in remaining if worker.pipe in ready]:
                try:
                    name = worker.receive()
                except ProcessEnded as ended:
                    problem = _failure(remaining[worker][0], ended.code, logs[worker].read_text(errors="replace"))
                    raise SetupError(problem) from ended
                done(name)
                remaining[worker].remove(name)
                if not remaining[worker]:
                    del remaining[worker]


def read_inputs(trace: Path) -> list[dict[str, Any]]:
    """Reads the inputs of the trace of a part, by name and shape."""
    with zipfile.ZipFile(trace) as file:
        name = next(file_name for file_name in file.namelist() if file_name.endswith(f"extra/{_INPUTS_FILE}"))
        return json.loads(file.read(name))


def _failure(bucket: str, code: int | None, errors: str) -> str:
    if code == -9 or "failed with -9" in errors:
        advice = "compile on a machine with more of it, or with fewer --compile-workers"
        return f"bucket {bucket}: the Neuron compiler was killed, as it is where memory runs out: {advice}"
    return f"bucket {bucket}: the Neuron compiler failed: {_last_lines(errors)}"


def run_all(
    folder: Path, inputs: Sequence[str], outputs: Sequence[str], parts: Sequence[FilledBucket], cores: int = 1
) -> list[dict[str, Any]]:
    """Computes the outputs of traces on this machine's device, with a core for each part of the model.

    Raises SetupError.
    """
    batches = [(part_names(str(part.bucket), cores), {name: part.inputs[name] for name in inputs}) for part in parts]
    with tempfile.NamedTemporaryFile("r", prefix="neuronx-", errors="replace") as log:
        try:
            with Worker.started(_run, folder, batches, cores, name="Neuron runtime", log=Path(log.name)) as worker:
                return [dict(zip(outputs, worker.receive(), strict=True)) for _ in parts]
        except ProcessEnded as ended:
            last_lines = _last_lines(log.read())
            problem = f"the traces cannot be run on this machine's Neuron device: {last_lines}{_KEPT}"
            raise SetupError(problem) from ended


def _last_lines(text: str) -> str:
    return " | ".join([line for line in text.splitlines() if line.strip()][-_ERROR_LINES:])


def _trace(pipe: "Connection[str, None]", job: TraceJob) -> None:
    """Traces in a process of its own, as its main function. Sends the name of each finished trace."""
    # A trace runs the model three times; on a busy machine threads would mostly wait for each other.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    register_own_graphs()
    folder = Path(job.source_folder)
    source = load_module(folder, job.task, SOURCE_TASKS[job.task].load_tokenizer(folder), job.attention, job.adapters)
    for name, path in job.outputs.items():
        bucket_name, is_encoder = split_name(name)
        bucket_name, _, part = bucket_name.partition("-")
        bucket = parse_bucket(bucket_name)
        if part:
            _trace_part(source, bucket, int(part) - 1, job, path)
        else:
            module, example, aliases = _encoder(source, bucket, job) if is_encoder else _traceable(source, bucket)
            _trace_module(module, example, aliases, job, path)
        pipe.send(name)


def _trace_part(source: SourceModule, bucket: Bucket, number: int, job: TraceJob, path: str) -> None:
    model = PipelinedModel(source, _example(source, bucket), job.firsts)
    with model.part(number, has_fixed_shapes=True) as (part, example):
        module = Positional(part.module, part.inputs, part.outputs).eval()
        _trace_module(
            module=module, example=tuple(example.values()), aliases={}, job=job, path=path, inputs=part.inputs
        )


def _trace_module(
    module: torch.nn.Module,
    example: tuple[torch.Tensor, ...],
    aliases: dict[torch.Tensor, int],
    job: TraceJob,
    path: str,
    inputs: Sequence[str] = (),
) -> None:
    """Writes a trace, with the names of its inputs if they differ from the model's inputs."""
    import torch_neuronx

    # The trace needs no device: the target is among the flags, and another process may use the cores.
    traced = torch_neuronx.trace(
        module, example, input_output_aliases=aliases, compiler_args=job.flags, cpu_backend=True
    )
    described = [{"name": name, "shape": list(tensor.shape)} for name, tensor in zip(inputs, example, strict=False)]
    torch.jit.save(traced, path, _extra_files={_INPUTS_FILE: json.dumps(described)} if described else {})


def _example(source: SourceModule, bucket: Bucket) -> dict[str, torch.Tensor]:
    """Fills inputs of a bucket, by name in the module's order. A row of padding alone would be masked completely."""
    values = {"input_ids": source.tokenizer.pad_token_id, "attention_mask": 1}
    inputs = bucket_inputs(source.inputs, bucket, source.image)
    return {
        name: torch.full(shape, values.get(name, 0), dtype=getattr(torch, dtype))
        for name, (shape, dtype) in inputs.items()
    }


def _traceable(source: SourceModule, bucket: Bucket) -> _Traceable:
    if TASKS[source.task].generates:
        step = slot_step(source, bucket)
        return step, step.example(), step.aliases()
    module = Positional(source.module, source.inputs, source.outputs).eval()
    return module, tuple(_example(source, bucket).values()), {}


def _encoder(source: SourceModule, bucket: Bucket, job: TraceJob) -> _Traceable:
    token_ids = torch.zeros(1, bucket.tokens, dtype=torch.int64)
    return source_encoder(source, job.attention), (token_ids, torch.ones(1, dtype=torch.int64)), {}


def _run(
    pipe: "Connection[list[Any], None]",
    folder: Path,
    batches: Sequence[tuple[Sequence[str], Mapping[str, Any]]],
    cores: int,
) -> None:
    """Runs batches through traces, as the main function of a process. Sends the outputs of each batch."""
    os.environ["NEURON_RT_NUM_CORES"] = str(cores)
    import torch_neuronx

    # Before release 2.25 of the SDK the function is in `experimental`.
    place = getattr(torch_neuronx, "neuron_cores_context", None) or torch_neuronx.experimental.neuron_cores_context
    parts: dict[str, Any] = {}
    for names, inputs in batches:
        values = {name: torch.from_numpy(array) for name, array in inputs.items()}
        for core, name in enumerate(names):
            if name not in parts:
                with place(start_nc=core, nc_count=1):
                    parts[name] = torch.jit.load(folder / f"{name}.pt")
            described = json.loads((folder / f"{name}.json").read_text())
            outputs = parts[name](*(values[spec["name"]] for spec in described["inputs"]))
            values[HIDDEN] = outputs[0]
        pipe.send([output.float().numpy() for output in outputs])
