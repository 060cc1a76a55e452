"""Compiles a Transformers model into a bundle. Torch and transformers live here, and nothing that serves imports this."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from neuronpipe.bundles.compiler import accuracy, fake, openvino
from neuronpipe.bundles.compiler.modules import TASK_MODULES, load_module
from neuronpipe.bundles.compiler.samples import sample_batches
from neuronpipe.bundles.compiler.source import find_source
from neuronpipe.bundles.compiler.tokenizers import load_tokenizer
from neuronpipe.bundles.manifest import SCHEMA_VERSION, Manifest
from neuronpipe.bundles.repository import Bundle, check_writable, choose_version, new_bundle, read_bundle, write_manifest
from neuronpipe.core.errors import SetupError

Report: TypeAlias = Callable[[str], None]

COMPILERS = {"openvino": openvino, "fake": fake}
TOKENIZER_FILE = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class CompileRequest:
    """What to compile. `max_divergence` is the largest absolute difference of an output to PyTorch float32, or None for no limit."""

    source: str
    task: str
    repository: Path
    name: str
    version: int | None = None
    revision: str | None = None
    backend: str = "openvino"
    dtype: str = "float32"
    max_divergence: float | None = None


def compile_bundle(request: CompileRequest, report: Report) -> Bundle:
    """Compiles one model and adds it to the repository, whole or not at all. Raises SetupError for what cannot be compiled."""
    _check(request)
    step = _numbered_steps(report, 6)
    version = choose_version(request.repository, request.name, request.version)

    step(f"find {request.source}")
    source = find_source(request.source, request.revision)

    step("read the tokenizer")
    tokenizer = load_tokenizer(source.folder)

    step("load the model in PyTorch, float32")
    module = load_module(source.folder, request.task, tokenizer)
    batches = sample_batches(tokenizer, module.max_tokens)
    reference = accuracy.reference_outputs(module, batches)
    spec = module.spec(request.name, version, reference[0])

    with new_bundle(request.repository, request.name, version) as folder:
        step(f"convert for {request.backend}, {request.dtype}")
        (folder / TOKENIZER_FILE).write_text(tokenizer.json, encoding="utf-8")
        compiler = COMPILERS[request.backend]
        artifact = compiler.convert(module, batches[0], folder, request.dtype)

        step("compare with PyTorch on sample texts")
        measured = accuracy.measure(compiler, module, artifact, folder, batches, reference)
        if measured is not None:
            report(accuracy.describe(measured, request.dtype))
            accuracy.check(measured, request.max_divergence)

        step("write the bundle")
        manifest = Manifest(
            schema_version=SCHEMA_VERSION,
            model=spec,
            source=source.describe(),
            tokenizer_file=TOKENIZER_FILE,
            artifacts=(artifact.model_copy(update={"accuracy": measured}),),
            files={},
        )
        write_manifest(folder, manifest)
    return read_bundle(request.repository / request.name / str(version))


def _check(request: CompileRequest) -> None:
    if request.task not in TASK_MODULES:
        raise SetupError(f"task {request.task!r} is not known; there are: {', '.join(TASK_MODULES)}")
    if request.backend not in COMPILERS:
        raise SetupError(f"back end {request.backend!r} is not known; there are: {', '.join(COMPILERS)}")
    dtypes = COMPILERS[request.backend].DTYPES
    if request.dtype not in dtypes:
        raise SetupError(f"dtype {request.dtype!r} is not known for {request.backend}; there are: {', '.join(dtypes)}")
    if request.version is not None and request.version < 1:
        raise SetupError(f"version {request.version}: versions are whole numbers from 1 on")
    check_writable(request.repository, request.name)


def _numbered_steps(report: Report, count: int) -> Report:
    began_s = time.monotonic()
    done = 0

    def step(line: str) -> None:
        nonlocal done
        done += 1
        report(f"[{done}/{count}] {time.monotonic() - began_s:5.1f} s  {line}")

    return step
