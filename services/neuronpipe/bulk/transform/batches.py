"""Batches that follow from the rows alone, so that a run which is resumed computes the same bits as one that is not.

The rows of a window go through the pipeline side by side. Each arrives here with its sequences, in place of the
executor. When all have arrived, or failed before, the sequences are sorted by length, cut into batches, and each batch
is one item for the executor (stages/neuron_executor/batching.py).
"""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from neuronpipe.bundles.buckets import BucketPlan
from neuronpipe.bundles.repository import Bundle
from neuronpipe.core.errors import InternalError
from neuronpipe.core.items import Execute, ExecuteItem, Prediction
from neuronpipe.core.packed import TensorSets
from neuronpipe.core.tensors import Arrays
from neuronpipe.stages.settings import EngineSettings
from neuronpipe.tasks.inputs.kind import input_kind

# Batches at the executor at once: enough for all cores, few enough for windows to end one after the other.
_BATCHES = 64
# As the OpenVINO back end pads. Within a step the order is that of the rows.
_TOKEN_STEP = 4

CutBatches = Callable[[Sequence[int]], Iterator[list[int]]]


@dataclass(slots=True)
class _Row:
    """A row's sequences, and what is known of their outputs."""

    item: ExecuteItem
    done: "asyncio.Future[Prediction]"
    outputs: list[Arrays | None]
    missing: int
    padded_tokens: int = 0
    batch_size: int = 0
    bucket_tokens: int = 0


@dataclass(slots=True)
class Window:
    """The rows that share batches. `expected`: those that have neither arrived nor failed."""

    expected: int
    rows: dict[int, _Row] = field(default_factory=dict)
    running: "asyncio.Task[None] | None" = None


class BatchMaker:
    """The executor's place in the pipeline: its `execute` is the stage function."""

    def __init__(self, execute: Execute, bundle: Bundle, settings: EngineSettings) -> None:
        self._execute = execute
        self._tokens_of = input_kind(bundle.spec).tokens_of
        self._cut = cut_batches(bundle, settings)
        self._windows: dict[int, Window] = {}
        self._opened = 0
        self._places = asyncio.Semaphore(_BATCHES)

    def open(self, rows: int) -> int:
        """A window of so many rows, whose requests have the ids that `request_id` makes."""
        self._opened += 1
        self._windows[self._opened] = Window(rows)
        return self._opened

    async def close(self, number: int) -> None:
        """Ends a window whose rows have all left."""
        if running := self._windows.pop(number).running:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    def leave(self, number: int, row: int) -> None:
        """A row has ended, with its result or an error."""
        window = self._windows[number]
        if row not in window.rows:
            window.expected -= 1
            self._begin(window)

    async def execute(self, item: ExecuteItem) -> Prediction:
        """Waits for the row's window, and computes it. Raises InternalError where the model cannot compute the row."""
        number, row = map(int, item.call.request_id.split("/"))
        window, count = self._windows[number], len(item.sequences)
        done: asyncio.Future[Prediction] = asyncio.get_running_loop().create_future()
        window.rows[row] = _Row(item, done, [None] * count, count)
        window.expected -= 1
        self._begin(window)
        return await done

    def _begin(self, window: Window) -> None:
        if not window.expected and window.rows and not window.running:
            window.running = asyncio.create_task(self._compute(window))

    async def _compute(self, window: Window) -> None:
        """Computes all rows, and answers each as soon as its last sequence is computed."""
        rows = [window.rows[number] for number in sorted(window.rows)]
        places = [(row, index) for row in rows for index in range(len(row.outputs))]
        lengths = [self._tokens_of(row.item.sequences.arrays[index]) for row, index in places]
        async with asyncio.TaskGroup() as group:
            for batch in self._cut(lengths):
                await self._places.acquire()
                task = group.create_task(self._run([places[place] for place in batch]))
                task.add_done_callback(lambda _: self._places.release())

    async def _run(self, batch: list[tuple[_Row, int]]) -> None:
        first = batch[0][0].item
        arrays = [row.item.sequences.arrays[index] for row, index in batch]
        try:
            found = await self._execute(ExecuteItem(first.call, first.model, TensorSets(arrays=arrays)))
        except InternalError as error:
            if len(batch) > 1:  # one of them is the reason
                for one in batch:
                    await self._run([one])
                return
            _fail(batch, error)
        except Exception as error:  # the rows that wait get it, and the pipeline tells faults from errors
            _fail(batch, error)
        else:
            for (row, index), outputs in zip(batch, found.outputs.arrays, strict=True):
                _note(row, index, outputs, found)


def request_id(window: int, row: int) -> str:
    """The id of a row's request."""
    return f"{window}/{row}"


def _fail(batch: Sequence[tuple[_Row, int]], error: Exception) -> None:
    for row, _ in batch:
        if not row.done.done():
            row.done.set_exception(error)


def _note(row: _Row, index: int, outputs: Arrays, found: Prediction) -> None:
    """Keeps the outputs of a sequence; the row's last one answers it."""
    row.outputs[index] = outputs
    row.missing -= 1
    row.padded_tokens += found.bucket_tokens
    row.batch_size, row.bucket_tokens = found.batch_size, found.bucket_tokens
    if not row.missing and not row.done.done():
        complete = [one for one in row.outputs if one is not None]
        row.done.set_result(
            Prediction(
                TensorSets(arrays=complete),
                batch_size=row.batch_size,
                bucket_tokens=row.bucket_tokens,
                padded_tokens=row.padded_tokens,
            )
        )


def cut_batches(bundle: Bundle, settings: EngineSettings) -> CutBatches:
    """What cuts sequences, given by their lengths, into batches of their places, the longest first."""
    if buckets := bundle.artifact(settings.backend).buckets:
        plan = BucketPlan(buckets)

        def most(length: int) -> int:
            return plan.batches(plan.round_tokens(length))[-1]
    else:

        def most(length: int) -> int:
            padded = -(-length // _TOKEN_STEP) * _TOKEN_STEP
            return max(1, min(settings.max_batch_size, settings.max_batch_tokens // padded))

    def cut(lengths: Sequence[int]) -> Iterator[list[int]]:
        order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
        start = 0
        while start < len(order):
            end = start + most(lengths[order[start]])
            yield order[start:end]
            start = end

    return cut
