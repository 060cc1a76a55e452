"""Measures cells on the whole pipeline in this process: pre-process, prediction and post-process, without a network.

A batch is a window of the batch transform's engine: its rows are tokenized side by side, computed together, and each
gets its result. The latency is that of all rows, as the published figures count it.
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
from neuronpipe.bulk.transform.request import Answer
from neuronpipe.bundles.repository import Bundle, read_repository
from neuronpipe.core.errors import InvalidInput, NeuronpipeError, SetupError
from neuronpipe.core.items import Execute, ExecuteItem, Prediction
from neuronpipe.measure.benchmark.matrix import Cell, Variant
from neuronpipe.measure.figures import bootstrap, p95
from neuronpipe.measure.load.inputs import builtin_texts, make_input
from neuronpipe.stages.neuron_executor.runtimes.neuron import runtime_environment

# One token of every tokenizer that knows English.
_FILLER = "the"


async def texts_of_length(count_tokens: Callable[[str], Awaitable[int]], length: int, number: int) -> list[str]:
    """Different English texts of exactly `length` tokens, special ones included; of any length for 0.

    `count_tokens`: of a text, special ones included.
    """
    texts = builtin_texts(0)
    if not length:
        return texts[:number]
    words = itertools.cycle(" ".join(texts).split())
    return [await _text(count_tokens, length, words) for _ in range(number)]


async def _text(count_tokens: Callable[[str], Awaitable[int]], length: int, words: Iterator[str]) -> str:
    taken = list(itertools.islice(words, length))
    # The most words that fit, found by halving; then one token each.
    low, high = 0, len(taken)
    while low < high:
        middle = (low + high + 1) // 2
        if await count_tokens(" ".join(taken[:middle])) <= length:
            low = middle
        else:
            high = middle - 1
    text = " ".join(taken[:low]) or _FILLER
    return " ".join([text, *[_FILLER] * (length - await count_tokens(text))])


# Different inputs of a length; larger batches repeat them, which nothing caches.
_INPUTS = 16
# The interval is computed again when there are this many times as many calls.
_GROWTH = 1.25


@dataclass(frozen=True, slots=True)
class Effort:
    """How long a cell is measured.

    After the warm-up, until there are `calls` and the bootstrap interval of the 95th percentile is within `precision`
    on either side, or until `seconds` have passed and there are `least_calls`.
    """

    warm_up_calls: int = 10
    calls: int = 100
    least_calls: int = 3
    seconds: float = 4.0
    precision: float = 0.05


@dataclass(slots=True)
class Samples:
    """Of each call of a cell in ms: the whole, and its three parts, which sum to it. `tokens`: of an input."""

    latency_ms: list[float] = field(default_factory=list)
    preprocess_ms: list[float] = field(default_factory=list)
    predict_ms: list[float] = field(default_factory=list)
    postprocess_ms: list[float] = field(default_factory=list)
    tokens: float = 0.0


@dataclass(slots=True)
class _Prediction:
    """When the prediction of a window began and ended; several batches of a window count as one."""

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

    async def measure(self, cell: Cell, effort: Effort) -> Samples:
        """Raises NeuronpipeError for inputs that the model or its back end does not take."""
        if cell.length > self._spec.max_tokens:
            raise InvalidInput("length", f"{cell.length} tokens, the model takes {self._spec.token_limit}")
        texts = await texts_of_length(self._tokens_of, cell.length, _INPUTS)
        inputs = [make_input(self._spec.task, text) for text in texts]
        windows = itertools.cycle(_windows(inputs, cell.batch))
        warm_up_ends_s = time.perf_counter() + effort.seconds / 4
        for _ in range(effort.warm_up_calls):
            await self._call(next(windows), Samples())
            if time.perf_counter() > warm_up_ends_s:
                break
        samples = Samples()
        enough = _Enough(effort)

        async def caller() -> None:
            while not enough.reached(samples.latency_ms):
                await self._call(next(windows), samples)

        async with asyncio.TaskGroup() as group:
            for _ in range(cell.callers):
                group.create_task(caller())
        return samples

    async def _call(self, inputs: Sequence[TaskInput], samples: Samples) -> None:
        prediction = _Prediction()
        _CURRENT.set(prediction)
        began_s = time.perf_counter()
        outcomes = await self._engine.infer(inputs)
        ended_s = time.perf_counter()
        answers = []
        for outcome in outcomes:
            if not isinstance(outcome, Answer):
                raise outcome
            answers.append(outcome)
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
    """Decides when a cell has been measured."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self._ends_s = time.perf_counter() + effort.seconds
        self._next_look = effort.calls

    def reached(self, latencies_ms: Sequence[float]) -> bool:
        calls = len(latencies_ms)
        if time.perf_counter() >= self._ends_s:
            return calls >= self._effort.least_calls
        if calls < self._next_look:
            return False
        self._next_look = max(calls + 1, int(calls * _GROWTH))
        return bootstrap(np.asarray(latencies_ms), p95).relative_width <= self._effort.precision


def _windows(inputs: Sequence[TaskInput], batch: int) -> list[list[TaskInput]]:
    """Every input once at least, in windows of a batch."""
    count = max(1, -(-len(inputs) // batch))
    every = itertools.cycle(inputs)
    return [list(itertools.islice(every, batch)) for _ in range(count)]


@asynccontextmanager
async def running_bench(folder: Path, variant: Variant, cells: Sequence[Cell]) -> AsyncIterator[Bench]:
    """The model of a bundle's folder, loaded with room for the cells. Raises SetupError."""
    (bundle,) = read_repository(folder)
    tokens = bundle.spec.image.tokens if bundle.spec.image else 1
    settings = TransformSettings(
        backend=variant.backend,
        cores=variant.cores,
        max_batch_size=max(cell.batch for cell in cells),
        # A task may make several sequences of an input, and some are rounded up.
        max_batch_tokens=4 * max(cell.batch * (max(cell.length, tokens) + 4) for cell in cells),
    )
    async with running_near_engine(bundle, settings, _observed) as engine:
        yield Bench(engine, bundle)


def work(
    pipe: "Connection[Samples | str, Cell]", folder: Path, variant: Variant, cells: Sequence[Cell], effort: Effort
) -> None:
    """The main function of a process that measures the cells that it is given. It says an empty reason once it is
    ready, and of each cell the samples; or the reason why not.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # as of services (docs/decisions/0002)
    os.environ.update(runtime_environment(variant.cores, os.environ))

    async def measure() -> None:
        async with running_bench(folder, variant, cells) as bench:
            pipe.send("")
            while True:
                cell = await asyncio.to_thread(pipe.recv)
                try:
                    answer: Samples | str = await bench.measure(cell, effort)
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
