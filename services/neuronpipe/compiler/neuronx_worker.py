"""A process that traces for Neuron, or runs traces.

Started by neuronx_processes.py as: python -m neuronpipe.compiler.neuronx_worker JOB.json
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from neuronpipe.bundles.buckets import Bucket, bucket_inputs, parse_bucket
from neuronpipe.compiler.modules import Positional, SourceModule
from neuronpipe.compiler.neuronx_processes import DONE, INPUTS_FILE, TraceJob
from neuronpipe.compiler.own_graphs import register_own_graphs
from neuronpipe.compiler.pipeline import Pipeline
from neuronpipe.compiler.slots import slot_step, source_encoder
from neuronpipe.compiler.tasks import SOURCE_TASKS, load_module
from neuronpipe.stages.neuron_executor.runtimes.parts import HIDDEN
from neuronpipe.stages.neuron_executor.runtimes.slots import split_name
from neuronpipe.tasks import TASKS


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
        done.write(f"\n{DONE}{name}\n")
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
    torch.jit.save(traced, path, _extra_files={INPUTS_FILE: json.dumps(described)} if described else {})


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


if __name__ == "__main__":
    done = _own_stdout()
    _end_with_parent()
    content = json.loads(Path(sys.argv[1]).read_text())
    if "outputs" in content:
        _trace(TraceJob(**content), done)
    else:
        _run(content)
