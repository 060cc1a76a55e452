"""The processes of a run: one that measures a variant of a model, and one that compiles it, kept for the next run.

A crash of one ends no other.
"""

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Self, TypeAlias

from neuronpipe import __version__
from neuronpipe.bundles.repository import newest_bundle
from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.measure.benchmark.matrix import BenchmarkModel, Cell, Variant
from neuronpipe.measure.benchmark.measuring import Effort, Samples, running_bench
from neuronpipe.measure.load.inputs import builtin_texts

_STOP_LIMIT_S = 10.0

# What a process answers: the samples of a cell, an empty reason once it is ready, or the reason why not.
_Answer: TypeAlias = Samples | str
_Order: TypeAlias = Cell | None


class CannotMeasure(Exception):
    """Why a cell, or a whole variant, has no figures; the message is shown in its place."""


class VariantProcess:
    """The process, as its parent sees it."""

    def __init__(self, process: SpawnProcess, pipe: "Connection[_Order, _Answer]") -> None:
        self._process, self._pipe = process, pipe

    @property
    def is_running(self) -> bool:
        """Whether further cells can be measured."""
        return self._process.is_alive()

    def measure(self, cell: Cell) -> Samples:
        """Blocks until the cell is measured. Raises CannotMeasure."""
        try:
            self._pipe.send(cell)
        except OSError as error:
            raise CannotMeasure(self._ending()) from error
        answer = self._receive()
        if isinstance(answer, str):
            raise CannotMeasure(answer)
        return answer

    @classmethod
    @contextmanager
    def started(cls, folder: Path, variant: Variant, cells: Sequence[Cell], effort: Effort) -> Iterator[Self]:
        """A process with the bundle of a folder, loaded; ended with the block. Raises CannotMeasure."""
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_work, args=(theirs, folder, variant, list(cells), effort), name="benchmark", daemon=True
        )
        process.start()
        theirs.close()
        running = cls(process, ours)
        try:
            if reason := running._receive():
                raise CannotMeasure(str(reason))
            yield running
        finally:
            ours.close()
            process.join(_STOP_LIMIT_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _receive(self) -> _Answer:
        try:
            return self._pipe.recv()
        except (EOFError, ConnectionError):
            raise CannotMeasure(self._ending()) from None

    def _ending(self) -> str:
        self._process.join(_STOP_LIMIT_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            name = signal.Signals(-code).name
            return f"its process was ended by {name}" + (
                "; there may be too little memory" if name == "SIGKILL" else ""
            )
        return f"its process ended with exit code {code}"


def _work(
    pipe: "Connection[_Answer, _Order]", folder: Path, variant: Variant, cells: Sequence[Cell], effort: Effort
) -> None:
    from neuronpipe.stages.neuron_executor.runtimes.neuron import runtime_environment

    # Ctrl-C reaches all processes of a terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as of services (docs/decisions/0002)
    os.environ.update(runtime_environment(variant.cores, os.environ))
    try:
        asyncio.run(_serve(pipe, folder, variant, cells, effort))
    except (EOFError, ConnectionError):  # the parent has gone, or needs no more
        return
    except NeuronpipeError as error:
        pipe.send(error.message)
    except SetupError as error:
        pipe.send(str(error))


async def _serve(
    pipe: "Connection[_Answer, _Order]", folder: Path, variant: Variant, cells: Sequence[Cell], effort: Effort
) -> None:
    async with running_bench(folder, variant, cells) as bench:
        pipe.send("")
        while cell := await asyncio.to_thread(pipe.recv):
            try:
                answer: _Answer = await bench.measure(cell, effort)
            except* NeuronpipeError as errors:
                answer = _first(errors)
            pipe.send(answer)


def _first(errors: BaseException) -> str:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors.message if isinstance(errors, NeuronpipeError) else str(errors)


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
