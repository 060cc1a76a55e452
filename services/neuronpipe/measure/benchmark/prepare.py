"""Bundles for a run: compiled in a process of their own, and kept, so that none is compiled twice."""

import json
import multiprocessing
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path

from neuronpipe import __version__
from neuronpipe.bundles.repository import newest_bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.models import BenchmarkModel
from neuronpipe.measure.benchmark.worker import CannotMeasure
from neuronpipe.measure.load.texts import builtin_texts

_COMPILERS = ("torch", "transformers", "openvino", "torch-neuronx", "neuronx-cc")


def find_bundle(
    model: BenchmarkModel, backend: str, dtype: str, cache: Path, buckets: tuple[str, ...] = ()
) -> Path | None:
    """The folder of a bundle that is there already; None if there is none. `buckets`: for neuronx, as 8x128."""
    if model.bundle:
        return Path(model.bundle)
    try:
        present = newest_bundle(_repository(model, backend, dtype, cache, buckets), _name(model), backend)
    except SetupError:
        return None
    return present.folder if present else None


def prepare_bundle(
    model: BenchmarkModel,
    backend: str,
    dtype: str,
    cache: Path,
    buckets: tuple[str, ...],
    report: Callable[[str], None],
) -> Path:
    """The folder of the bundle, compiled if it is not there yet; see find_bundle.

    Raises CannotMeasure with the compiler's reason.
    """
    if present := find_bundle(model, backend, dtype, cache, buckets):
        return present
    report(f"compile {model.name} for {backend}, {dtype}")
    repository = _repository(model, backend, dtype, cache, buckets)
    try:
        with tempfile.TemporaryDirectory(prefix="neuronpipe-benchmark-") as scratch:
            reason = _run(_compile, model, backend, dtype, repository, buckets, scratch)
        found = find_bundle(model, backend, dtype, cache, buckets)
        if reason or not found:
            raise CannotMeasure(reason or f"{repository}: the bundle is not there after compiling")
        return found
    finally:
        if not find_bundle(model, backend, dtype, cache, buckets):  # what an interrupted compilation leaves
            shutil.rmtree(repository, ignore_errors=True)


def _run(target: Callable[..., str], *arguments: object) -> str:
    """What a function returns that runs in a process of its own, which ends with this one's interruption."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_result, args=(theirs, target, arguments), name="compile", daemon=True)
    process.start()
    theirs.close()
    try:
        return str(ours.recv())
    except EOFError:
        raise CannotMeasure("the compiling process was ended; there may be too little memory") from None
    finally:
        process.terminate()
        process.join()
        ours.close()


def _send_result(pipe: "Connection[str, None]", target: Callable[..., str], arguments: Sequence[object]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send(target(*arguments))


def _compile(
    model: BenchmarkModel, backend: str, dtype: str, repository: Path, buckets: tuple[str, ...], scratch: str
) -> str:
    """The reason where it cannot be compiled; empty where it is."""
    from neuronpipe.compiler import BucketRequest, CompileRequest, compile_bundle
    from neuronpipe.compiler.random_models import save_random_model

    if model.is_random:
        save_random_model(model.name, Path(scratch), builtin_texts(0))
    request = CompileRequest(
        source=model.source or scratch,
        task=model.task.replace("-", "_"),
        repository=repository,
        name=_name(model),
        backend=backend,
        dtype=dtype,
        buckets=BucketRequest(buckets),
    )
    try:
        compile_bundle(request, lambda line: None)
    except SetupError as error:
        return str(error).replace(f"{scratch}: ", "")
    return ""


def _name(model: BenchmarkModel) -> str:
    return model.name.rpartition("/")[2]


def _repository(model: BenchmarkModel, backend: str, dtype: str, cache: Path, buckets: tuple[str, ...]) -> Path:
    """One for each model as it is now, back end, dtype, buckets and version of what compiles."""
    folder = Path(model.source)
    files = (
        [
            [str(file), file.stat().st_size, file.stat().st_mtime_ns]
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        ]
        if model.source
        else []
    )
    compilers = [_version(name) for name in _COMPILERS]
    facts = [__version__, model.name, model.task, backend, dtype, files, compilers, *buckets]
    return cache / sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
