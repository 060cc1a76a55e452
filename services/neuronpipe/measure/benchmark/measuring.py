"""Measures cells on the whole pipeline in this process: pre-process, prediction and post-process, without a network.

A batch is a window of the batch transform's engine: its rows are tokenized side by side, computed together, and each
gets its result. The latency is the time of all rows, as in the published figures.
"""

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from neuronpipe.api.v1.tasks_pb2 import TaskInput, TokenizationInput
from neuronpipe.bulk.transform.near_engine import NearEngine, TransformSettings, running_near_engine
from neuronpipe.bulk.transform.request import InputAnswer
from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, SetupError
from neuronpipe.core.items import Execute, ExecuteItem, Prediction
from neuronpipe.measure.benchmark.matrix import Cell, Variant
from neuronpipe.measure.figures import bootstrap, p95
from neuronpipe.measure.load.inputs import builtin_texts, make_input
from neuronpipe.stages.neuron_executor.runtimes.neuron import runtime_environment

# A word that is one token of every tokenizer for English.
_FILLER = "the"


async def texts_of_length(count_tokens: Callable[[str], Awaitable[int]], length: int, number: int) -> list[str]:
    """Returns different English texts of exactly `length` tokens, special tokens included; any length for 0.

    `count_tokens`: returns the tokens of a text, special tokens included.
    """
    texts = builtin_texts(0)
    if not length:
        return texts[:number]
    words = itertools.cycle(" ".join(texts).split())
    return [await _text(count_tokens, length, words) for _ in range(number)]


async def _text(count_tokens: Callable[[str], Awaitable[int]], length: int, words: Iterator[str]) -> str:
    candidates = list(itertools.islice(words, length))
    # Finds the most words that fit by bisection; then adds one-token words.
    low, high = 0, len(candidates)
    while low < high:
        middle = (low + high + 1) // 2
        if await count_tokens(" ".join(candidates[:middle])) <= length:
            low = middle
        else:
            high = middle - 1
    text = " ".join(candidates[:low]) or _FILLER
    return " ".join([text, *[_FILLER] * (length - await count_tokens(text))])


# The number of different inputs of a length; larger batches repeat them, which nothing caches.
_INPUTS = 16
# The interval is computed again when the number of calls has grown by this factor.
_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class CellEffort:
    """The time that measuring a cell may take.

    After the warm-up, a cell is measured until there are `calls`, and the bootstrap interval of the 95th percentile is
    within `precision` on either side. It also ends when `seconds` have passed and there are `least_calls`.
    """

    warm_up_calls: int = 10
    calls: int = 100
    least_calls: int = 3
    seconds: float = 4.0
    precision: float = 0.05


@dataclass(slots=True)
class CellSamples:
    """The times of each call of a cell in ms: the whole, and its three parts, which sum to it. `tokens`: per input."""

    latency_ms: list[float] = field(default_factory=list)
    preprocess_ms: list[float] = field(default_factory=list)
    predict_ms: list[float] = field(default_factory=list)
    postprocess_ms: list[float] = field(default_factory=list)
    tokens: float = 0.0


@dataclass(slots=True)
class _Prediction:
    """The begin and the end of a window's prediction; several batches of a window count as one prediction."""

    began_s: float = float("inf")
    ended_s: float = 0.0


_CURRENT: ContextVar[_Prediction] = ContextVar("prediction")


def _observed(execute: Execute) -> Execute:
    async def observed(item: ExecuteItem) -> Prediction:
        current = _CURRENT.get()
        current.began_s = min(current.began_s, time.perf_counter())
        try:
            return await execute(item)
        finally:
            current.ended_s = max(current.ended_s, time.perf_counter())

    return observed


class Bench:
    """A loaded model, ready to be measured."""

    def __init__(self, engine: NearEngine, bundle: Bundle) -> None:
        self._engine = engine
        self._spec = bundle.spec

    async def measure(self, cell: Cell, effort: CellEffort) -> CellSamples:
        """Measures a cell. Raises NeuronpipeError if the model or its back end does not take the inputs."""
        if cell.length > self._spec.max_tokens:
            raise InvalidInput("length", f"{cell.length} tokens, the model takes {self._spec.token_limit}")
        texts = await texts_of_length(self._tokens_of, cell.length, _INPUTS)
        inputs = [make_input(self._spec.task, text) for text in texts]
        windows = itertools.cycle(_windows(inputs, cell.batch))
        warm_up_ends_s = time.perf_counter() + effort.seconds / 4
        for _ in range(effort.warm_up_calls):
            await self._call(next(windows), CellSamples())
            if time.perf_counter() > warm_up_ends_s:
                break
        samples = CellSamples()
        enough = _Enough(effort)

        async def caller() -> None:
            while not enough.check(samples.latency_ms):
                await self._call(next(windows), samples)

        async with asyncio.TaskGroup() as group:
            for _ in range(cell.callers):
                group.create_task(caller())
        return samples

    async def _call(self, inputs: Sequence[TaskInput], samples: CellSamples) -> None:
        prediction = _Prediction()
        _CURRENT.set(prediction)
        began_s = time.perf_counter()
        outcomes = await self._engine.infer(inputs)
        ended_s = time.perf_counter()
        answers = [outcome for outcome in outcomes if isinstance(outcome, InputAnswer)]
        for failure in outcomes:
            if isinstance(failure, NeuronpipeError):
                raise failure
        samples.latency_ms.append((ended_s - began_s) * 1e3)
        samples.preprocess_ms.append((prediction.began_s - began_s) * 1e3)
        samples.predict_ms.append((prediction.ended_s - prediction.began_s) * 1e3)
        samples.postprocess_ms.append((ended_s - prediction.ended_s) * 1e3)
        samples.tokens = sum(answer.tokens for answer in answers) / len(answers)

    async def _tokens_of(self, text: str) -> int:
        (outcome,) = await self._engine.infer([TaskInput(tokenization=TokenizationInput(text=text))])
        if isinstance(outcome, NeuronpipeError):
            raise outcome
        return len(outcome.result.tokenization.tokens)


class _Enough:
    """Decides when a cell has enough calls."""

    def __init__(self, effort: CellEffort) -> None:
        self._effort = effort
        self._ends_s = time.perf_counter() + effort.seconds
        self._next_look = effort.calls

    def check(self, latencies_ms: Sequence[float]) -> bool:
        calls = len(latencies_ms)
        if time.perf_counter() >= self._ends_s:
            return calls >= self._effort.least_calls
        if calls < self._next_look:
            return False
        self._next_look = max(calls + 1, int(calls * _GROWTH))
        return bootstrap(np.asarray(latencies_ms), p95).relative_width <= self._effort.precision


def _windows(inputs: Sequence[TaskInput], batch: int) -> list[list[TaskInput]]:
    """Returns windows of `batch` inputs that contain every input at least once."""
    count = max(1, -(-len(inputs) // batch))
    repeated = itertools.cycle(inputs)
    return [list(itertools.islice(repeated, batch)) for _ in range(count)]


@asynccontextmanager
async def running_bench(folder: Path, variant: Variant, cells: Sequence[Cell]) -> AsyncIterator[Bench]:
    """Yields the model of a bundle's folder, loaded with room for the cells. Raises SetupError."""
    (bundle,) = read_repository(folder)
    tokens = bundle.spec.image.tokens if bundle.spec.image else 1
    settings = TransformSettings.of(
        backend=variant.backend,
        cores=variant.cores,
        max_batch_size=max(cell.batch for cell in cells),
        # A task may make several sequences of an input, and lengths may be rounded up.
        max_batch_tokens=4 * max(cell.batch * (max(cell.length, tokens) + 4) for cell in cells),
    )
    async with running_near_engine(bundle, settings, _observed) as engine:
        yield Bench(engine, bundle)


def work(
    pipe: "Connection[CellSamples | str, Cell]",
    folder: Path,
    variant: Variant,
    cells: Sequence[Cell],
    effort: CellEffort,
) -> None:
    """Measures the cells that it receives; the main function of a process.

    Sends an empty text once the process is ready, and then for each cell its samples, or the reason for their lack.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as in services (docs/decisions/0002)
    os.environ.update(runtime_environment(variant.cores, os.environ))

    async def measure() -> None:
        async with running_bench(folder, variant, cells) as bench:
            pipe.send("")
            while True:
                cell = await asyncio.to_thread(pipe.recv)
                try:
                    answer: CellSamples | str = await bench.measure(cell, effort)
                except* NeuronpipeError as errors:
                    answer = _first(errors)
                pipe.send(answer)

    try:
        asyncio.run(measure())
    except NeuronpipeError as error:
        pipe.send(error.message)
    except SetupError as error:
        pipe.send(str(error))


def _first(errors: BaseException) -> str:
    while isinstance(errors, BaseExceptionGroup):
        errors = errors.exceptions[0]
    return errors.message if isinstance(errors, NeuronpipeError) else str(errors)
