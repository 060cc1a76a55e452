"""The bundle of a model that is measured, compiled in a process of its own and kept for the next run."""

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing.connection import Connection
from pathlib import Path

from neuronpipe import __version__
from neuronpipe.bundles.writing import newest_bundle
from neuronpipe.core.errors import SetupError
from neuronpipe.measure.benchmark.matrix import BenchmarkModel
from neuronpipe.measure.load.inputs import builtin_texts
from neuronpipe.measure.machine import package_versions
from neuronpipe.platform.process.worker import ProcessEnded, Worker


class CannotMeasure(Exception):
    """The reason why a cell, or a whole variant, has no figures; the report shows the message instead."""


_COMPILERS = ("torch", "transformers", "openvino", "torch-neuronx", "neuronx-cc")


@dataclass(frozen=True, slots=True)
class WantedBundle:
    """A bundle to be measured. `buckets`: for neuronx, as 8x128. `cache`: the folder of compiled bundles."""

    model: BenchmarkModel
    backend: str
    dtype: str
    buckets: tuple[str, ...]
    cache: Path

    @property
    def name(self) -> str:
        """The name of the model in its repository."""
        return self.model.name.rpartition("/")[2]

    @property
    def repository(self) -> Path:
        """The folder for this state of the model, back end, dtype, buckets and versions of the compilers."""
        model = self.model
        paths = sorted(Path(model.source).rglob("*")) if model.source else []
        files = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in paths if file.is_file()]
        compilers = package_versions(*_COMPILERS)
        facts = [__version__, model.name, model.task, self.backend, self.dtype, files, compilers, *self.buckets]
        return self.cache / sha256(json.dumps(facts).encode()).hexdigest()[:16]

    def find(self) -> Path | None:
        """Returns the folder of a bundle that exists already; None if there is no bundle."""
        if self.model.bundle:
            return Path(self.model.bundle)
        try:
            present = newest_bundle(self.repository, self.name, self.backend)
        except SetupError:
            return None
        return present.folder if present else None

    def prepare(self, report: Callable[[str], None]) -> Path:
        """Compiles the bundle if needed, and returns its folder. Raises CannotMeasure with the compiler's reason."""
        if present := self.find():
            return present
        report(f"compile {self.model.name} for {self.backend}, {self.dtype}")
        try:
            with Worker.started(_compile, self, name="compiling") as worker:
                reason = worker.receive()
        except ProcessEnded as ended:
            reason = str(ended)
        finally:
            if not (folder := self.find()):  # an interrupted compilation leaves files
                shutil.rmtree(self.repository, ignore_errors=True)
        if not folder:
            raise CannotMeasure(reason or f"{self.repository}: the bundle is not there after compiling")
        return folder


def _compile(pipe: "Connection[str, None]", wanted: WantedBundle) -> None:
    """Compiles a bundle, and sends the reason why it cannot be compiled; an empty reason for success."""
    from neuronpipe.compiler import BucketRequest, CompileRequest, compile_bundle
    from neuronpipe.compiler.random_models import save_random_model

    model, reason = wanted.model, ""
    with tempfile.TemporaryDirectory(prefix="neuronpipe-benchmark-") as scratch:
        if model.is_random:
            save_random_model(model.name, Path(scratch), builtin_texts(0))
        request = CompileRequest(
            source=model.source or scratch,
            task=model.task.replace("-", "_"),
            repository=wanted.repository,
            name=wanted.name,
            backend=wanted.backend,
            dtype=wanted.dtype,
            buckets=BucketRequest(wanted.buckets),
        )
        try:
            compile_bundle(request, lambda line: None)
        except SetupError as error:
            reason = str(error).replace(f"{scratch}: ", "")
    pipe.send(reason)
