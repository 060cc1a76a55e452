"""A process that loads one variant of a model and measures its cells, so that a crash ends no other's."""

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Self, TypeAlias

from neuronpipe.core.errors import NeuronpipeError, SetupError
from neuronpipe.measure.benchmark.matrix import Cell, Variant
from neuronpipe.measure.benchmark.measuring import Effort, Samples, running_bench

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
