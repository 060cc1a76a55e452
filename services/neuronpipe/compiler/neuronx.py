"""Converts PyTorch to AWS Neuron: a trace for each bucket, made in separate processes and kept in a cache.

The Neuron SDK's own cache does not cover the results of traces.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import transformers

from neuronpipe import __version__
from neuronpipe.bundles.buckets import Bucket, BucketPlan, bucket_inputs, fill_bucket
from neuronpipe.bundles.manifest import Artifact, file_sha256
from neuronpipe.compiler import neuronx_processes
from neuronpipe.compiler.conversion import CASTS, Conversion, Ran
from neuronpipe.compiler.modules import Outputs, SampleBatch, SourceModule
from neuronpipe.compiler.neuronx_processes import FilledBucket, TraceJob
from neuronpipe.compiler.source import walk_files
from neuronpipe.compiler.stacked_adapters import stacks_sha256
from neuronpipe.core.errors import SetupError
from neuronpipe.core.files import reporting_os_errors
from neuronpipe.stages.neuron_executor.runtimes.neuron import CORES_PER_DEVICE, device_count, sdk_release
from neuronpipe.stages.neuron_executor.runtimes.parts import part_names
from neuronpipe.stages.neuron_executor.runtimes.slots import CHUNK_PROPERTY, CHUNK_TOKENS, encoder_file
from neuronpipe.tasks import TASKS

Stamp: TypeAlias = Mapping[str, Any]


class ArtifactCache:
    """A folder with artefacts, <digest>.pt, and stamps, <digest>.json, that name them. Processes may share it."""

    def __init__(self, folder: Path) -> None:
        """Raises SetupError if the folder cannot be created."""
        self._folder = folder
        with reporting_os_errors(f"{folder}: cannot be made", "; see --compile-cache"):
            folder.mkdir(parents=True, exist_ok=True)

    def find(self, stamp: Stamp) -> Path | None:
        """Finds the artefact of a stamp; None if it is missing or broken."""
        try:
            described = json.loads(self._description(stamp).read_text())
            path = self._artifact(described["sha256"])
            is_whole = described["stamp"] == stamp and described["sha256"] == file_sha256(path)
        except (OSError, ValueError, KeyError, TypeError):  # missing, or not written by this class
            return None
        return path if is_whole else None

    def add(self, stamp: Stamp, artifact: Path) -> None:
        """Stores an artefact, completely or not at all. Raises SetupError if it cannot be written."""
        with (
            reporting_os_errors(f"{self._folder}: cannot be written", "; see --compile-cache"),
            tempfile.TemporaryDirectory(prefix=".", dir=self._folder) as folder,
        ):
            copy, description = Path(folder) / "artifact", Path(folder) / "description"
            shutil.copyfile(artifact, copy)
            sha256 = file_sha256(copy)
            description.write_text(json.dumps({"stamp": stamp, "sha256": sha256}, indent=2) + "\n")
            copy.replace(self._artifact(sha256))
            description.replace(self._description(stamp))

    def _artifact(self, sha256: str) -> Path:
        return self._folder / f"{sha256}.pt"

    def _description(self, stamp: Stamp) -> Path:
        return self._folder / (hashlib.sha256(json.dumps(stamp, sort_keys=True).encode()).hexdigest() + ".json")


DTYPES = tuple(CASTS)
BUCKETS = "required"

_FOLDER = "artifacts/neuronx"


def convert(conversion: Conversion) -> Artifact:
    """Traces the module for each bucket that the cache lacks; see ArtifactCompiler."""
    options = conversion.neuronx
    if options.workers < 1:
        raise SetupError(f"--compile-workers {options.workers}: must be 1 or more")
    flags = options.flags(conversion.dtype)
    versions = _versions()
    firsts = list(conversion.pipeline.firsts) if conversion.pipeline else []
    buckets = BucketPlan(conversion.buckets).buckets
    # By the names of the traces.
    stamps = {
        name: _stamp(conversion, bucket, flags, versions) | ({"part": part, "firsts": firsts} if firsts else {})
        for bucket in buckets
        for part, name in enumerate(part_names(str(bucket), conversion.parts))
    }
    if conversion.module.config.is_encoder_decoder and TASKS[conversion.module.task].generates:
        stamps |= {encoder_file(bucket): stamps[str(bucket)] | {"part": "encoder"} for bucket in buckets}
    cache = ArtifactCache(options.cache.expanduser())
    missing = [name for name, stamp in stamps.items() if cache.find(stamp) is None]
    if missing:
        with tempfile.TemporaryDirectory(prefix="neuronx-") as folder:
            source, task = str(conversion.source.folder), conversion.module.task
            job = TraceJob(
                source_folder=source,
                task=task,
                attention=options.attention,
                flags=list(flags),
                firsts=firsts,
                outputs={},
                adapters=conversion.adapters,
            )
            outputs = {name: Path(folder) / f"{name}.pt" for name in missing}
            neuronx_processes.trace_all(
                job, outputs, options.workers, lambda name: cache.add(stamps[name], outputs[name])
            )
    (conversion.folder / _FOLDER).mkdir(parents=True)
    files = []
    for name, stamp in stamps.items():
        path = cache.find(stamp)
        if path is None:
            problem = f"lost the artefact of the bucket {name} again; is the folder being cleaned?"
            raise SetupError(f"{options.cache}: {problem}")
        files += [f"{_FOLDER}/{name}.pt", f"{_FOLDER}/{name}.json"]
        shutil.copyfile(path, conversion.folder / files[-2])
        described = stamp | {"inputs": neuronx_processes.read_inputs(path)} if firsts else stamp
        (conversion.folder / files[-1]).write_text(json.dumps(described, indent=2) + "\n")
    return Artifact(
        backend="neuronx",
        dtype=conversion.dtype,
        files=tuple(files),
        properties={"compiler_args": " ".join(flags)}
        | ({CHUNK_PROPERTY: str(CHUNK_TOKENS)} if TASKS[conversion.module.task].generates else {}),
        versions=versions,
        buckets=tuple(buckets),
        pipeline_cores=conversion.parts,
    )


def run(conversion: Conversion, artifact: Artifact, batches: Sequence[SampleBatch]) -> Ran:
    """Runs the artefact, or PyTorch on the same buckets where there is no device; see ArtifactCompiler."""
    cores = device_count() * CORES_PER_DEVICE
    has_device = cores >= artifact.pipeline_cores
    module, plan = conversion.module, BucketPlan(artifact.buckets)
    parts = [[*_fill(batch, plan, module)] for batch in batches]
    flat = [part for batch_parts in parts for part in batch_parts]
    if has_device:
        names, folder = (module.inputs, module.outputs), conversion.folder / _FOLDER
        on_device = neuronx_processes.run_all(folder, *names, flat, artifact.pipeline_cores)
        computed: Iterator[Outputs] = iter(on_device)
    else:
        computed = iter(_emulate(conversion, flat))
    outputs: list[Outputs] = []
    for batch_parts in parts:
        cut = [
            {
                name: array[: part.rows, : part.tokens] if name in module.per_token_outputs else array[: part.rows]
                for name, array in next(computed).items()
            }
            for part in batch_parts
        ]
        outputs.append({name: np.concatenate([rows[name] for rows in cut]) for name in module.outputs})
    at_hand = "the model has more parts than the device cores" if cores else "no Neuron device was at hand"
    return Ran(outputs, artifact.dtype, "" if has_device else f"PyTorch, as {at_hand}")


def _fill(batch: SampleBatch, plan: BucketPlan, module: SourceModule) -> Iterator[FilledBucket]:
    """Splits a batch into as many buckets as its rows need."""
    rows, tokens = module.shape_of(batch)
    size = plan.batches(plan.round_tokens(tokens))[-1]
    for first in range(0, rows, size):
        inputs = {name: batch[name][first : first + size] for name in module.inputs}
        taken = min(size, rows - first)
        bucket = plan.find(taken, tokens)
        assert bucket is not None  # noqa: S101 (texts are cut to the longest bucket)
        yield FilledBucket(bucket, fill_bucket(inputs, bucket, module.tokenizer.pad_token_id), taken, tokens)


def _emulate(conversion: Conversion, parts: Sequence[FilledBucket]) -> list[Outputs]:
    batches = [{name: torch.from_numpy(part.inputs[name]) for name in conversion.module.inputs} for part in parts]
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=conversion.dtype != "float32"):
        if conversion.pipeline:
            computed = conversion.pipeline.run(batches)
        else:
            computed = [conversion.module.module(**batch) for batch in batches]
    return [{name: outputs[name].float().numpy() for name in conversion.module.outputs} for outputs in computed]


def _versions() -> dict[str, str]:
    try:
        torch_neuronx, compiler = import_module("torch_neuronx"), import_module("neuronxcc")
    except ImportError as error:
        raise SetupError(
            f"compiling for neuronx needs AWS's package {error.name}; docs/neuron.md says how to install it"
        ) from error
    version = str(torch_neuronx.__version__)
    return {
        "sdk": sdk_release(version),
        "torch-neuronx": version,
        "neuronx-cc": str(compiler.__version__),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def _stamp(conversion: Conversion, bucket: Bucket, flags: Sequence[str], versions: Mapping[str, str]) -> dict[str, Any]:
    """Returns the values on which an artefact depends. Their digest is the key in the cache."""
    module = conversion.module
    inputs = bucket_inputs(module.inputs, bucket, module.image)
    return {
        "bucket": str(bucket),
        "inputs": [{"name": name, "shape": shape, "dtype": dtype} for name, (shape, dtype) in inputs.items()],
        "outputs": list(module.outputs),
        "chunk_tokens": CHUNK_TOKENS if TASKS[module.task].generates else 0,
        "task": module.task,
        "architecture": module.architecture,
        "attention": conversion.neuronx.attention,
        "flags": list(flags),
        "versions": {**versions, "neuronpipe": __version__},
        "weights_sha256": conversion.source.describe().weights_sha256,
        "configuration_sha256": _configuration_sha256(conversion.source.folder),
        **({"adapters_sha256": stacks_sha256(module.module)} if module.adapters else {}),
    }


def _configuration_sha256(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in walk_files(folder) if path.suffix == ".json"):
        digest.update(f"{path.relative_to(folder)}{os.linesep}".encode() + path.read_bytes())
    return digest.hexdigest()
