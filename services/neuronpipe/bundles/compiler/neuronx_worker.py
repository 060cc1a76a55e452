"""A process that traces for Neuron, or runs traces.

Started by neuronx_processes.py as: python -m neuronpipe.bundles.compiler.neuronx_worker JOB.json
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch

from neuronpipe.bundles.buckets import Bucket, bucket_inputs, parse_bucket
from neuronpipe.bundles.compiler.jina_bert import register_jina_bert
from neuronpipe.bundles.compiler.modules import SourceModule
from neuronpipe.bundles.compiler.neuronx_processes import DONE, TraceJob
from neuronpipe.bundles.compiler.positional import Positional
from neuronpipe.bundles.compiler.slots import slot_step, source_encoder
from neuronpipe.bundles.compiler.tasks import SOURCE_TASKS, load_module
from neuronpipe.runtimes.slots import split_name
from neuronpipe.tasks import TASKS


def _trace(job: TraceJob, done: TextIO) -> None:
    import torch_neuronx

    register_jina_bert()
    folder = Path(job.source_folder)
    source = load_module(folder, job.task, SOURCE_TASKS[job.task].load_tokenizer(folder), attention=job.attention)
    for name, path in job.outputs.items():
        bucket_name, is_encoder = split_name(name)
        bucket = parse_bucket(bucket_name)
        module, example, aliases = _encoder(source, bucket, job) if is_encoder else _traceable(source, bucket)
        # Without a device even if there is one: the target is among the flags, and the cores may be in use by
        # another process.
        traced = torch_neuronx.trace(
            module, example, input_output_aliases=aliases, compiler_args=job.flags, cpu_backend=True
        )
        torch.jit.save(traced, path)
        done.write(f"\n{DONE}{name}\n")
        done.flush()


def _traceable(
    source: SourceModule, bucket: Bucket
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], dict[torch.Tensor, int]]:
    """What is traced for a bucket, with an example, and the outputs that become states."""
    if TASKS[source.task].generates:
        step = slot_step(source, bucket)
        return step, step.example(), step.aliases()
    # By name, in the module's order; a row of padding alone would be masked completely.
    values = {"input_ids": source.tokenizer.pad_token_id, "attention_mask": 1}
    inputs = bucket_inputs(source.inputs, bucket, source.image)
    example = tuple(
        torch.full(shape, values.get(name, 0), dtype=getattr(torch, dtype)) for name, (shape, dtype) in inputs.items()
    )
    return Positional(source.module, source.inputs, source.outputs).eval(), example, {}


def _encoder(
    source: SourceModule, bucket: Bucket, job: TraceJob
) -> tuple[torch.nn.Module, tuple[torch.Tensor, ...], dict[torch.Tensor, int]]:
    """As `_traceable`."""
    token_ids = torch.zeros(1, bucket.tokens, dtype=torch.int64)
    return source_encoder(source, job.attention), (token_ids, torch.ones(1, dtype=torch.int64)), {}


def _run(job: Mapping[str, Any]) -> None:
    import torch_neuronx  # noqa: F401 (without it the files cannot be read)

    modules: dict[str, Any] = {}
    for number, name in enumerate(job["buckets"]):
        if name not in modules:
            modules[name] = torch.jit.load(Path(job["folder"]) / f"{name}.pt")
        with np.load(Path(job["work"]) / f"in-{number}.npz") as arrays:
            outputs = modules[name](*(torch.from_numpy(arrays[input]) for input in job["inputs"]))
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
