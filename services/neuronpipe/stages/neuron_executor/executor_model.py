"""One model on its device: its queue, and how its batches are formed, prepared and split into results.

The scheduler of the device runs the batches.
"""

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np

from neuronpipe.core.calls import Call
from neuronpipe.core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NeuronpipeError,
    Overloaded,
    Unavailable,
)
from neuronpipe.core.logs import log, log_warning
from neuronpipe.core.model import ModelSpec, OutputSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.core.tracing import SpanContext
from neuronpipe.stages.neuron_executor.backends.base import Backend, Finish, Prepare
from neuronpipe.stages.neuron_executor.batch_observer import BatchObserver
from neuronpipe.stages.neuron_executor.batching import Batch, BatchPolicy, FixedBuckets, FreeShapes, Limits, WholeItems
from neuronpipe.stages.neuron_executor.cores import Cores
from neuronpipe.stages.neuron_executor.forecast import (
    BatchTimes,
    ComputedSequence,
    Forecast,
    QueuedSequence,
    SequenceQueue,
)
from neuronpipe.tasks.inputs.kind import input_kind

# The shortest retry delay of a refused caller; room in the queue is seldom free sooner.
_MIN_RETRY_AFTER_S = 0.05
# The shortest time between two searches of the queue for late sequences, so that refusing stays cheap: 4096 sequences
# take 2.7 ms (measured 2026-11-21 on a CPU with two cores).
_SWEEP_INTERVAL_S = 0.05

# A sequence's outputs, or the error in them.
Row: TypeAlias = Arrays | NeuronpipeError


class Device(Protocol):
    """The parts of a device that its models use and share."""

    cores: Cores
    # Of every model.
    forecasts: list[Forecast]
    # Sequences are numbered as they come, for whichever model.
    numbers: Iterator[int]

    def wake(self) -> None:
        """Tells the device that there is new work."""


class ExecutorModel:
    """A model that runs sequences. Made by DeviceScheduler.join."""

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        limits: Limits,
        device: Device,
        times: BatchTimes,
        observer: BatchObserver,
    ) -> None:
        self.backend = backend
        self.spec = spec
        self.observer = observer
        self.queue = SequenceQueue()
        self.forecast = Forecast(self.queue, device.cores, times, device.forecasts)
        plan = backend.buckets
        self.policy: BatchPolicy = (
            FixedBuckets(self.queue, self.forecast, plan) if plan else FreeShapes(self.queue, self.forecast, limits)
        )
        self.has_whole_items = False
        self.batches_running = 0
        self._kind = input_kind(spec)
        self._max_queue_sequences = limits.max_queue_sequences
        self._device = device
        self._computed = 0
        self._unwanted = 0
        self._next_sweep_s = 0.0
        self._is_closed = False
        observer.watch(lambda: self.queued, self.forecast.work_s, lambda: self.cores_left)

    def keep_items_whole(self) -> None:
        """From now on the sequences of an item are a batch, which runs with the threads of one core, alone or not: so
        that the bits of its results are always the same.
        """
        self.has_whole_items = True
        self.policy = WholeItems(self.queue, self.policy)

    @property
    def queued(self) -> tuple[int, int]:
        """The number of waiting sequences, and their padded tokens."""
        return len(self.queue), self.queue.tokens_before(is_bulk=True)

    @property
    def cores_left(self) -> int:
        """The number of cores that are not lost."""
        return self._device.cores.left

    async def run(
        self, sequences: Sequence[Arrays], call: Call, trace: SpanContext | None = None
    ) -> list[ComputedSequence]:
        """Runs the sequences of one input and returns their outputs in order.

        Either all are queued or none. Raises InvalidInput, Overloaded, DeadlineExceeded (as soon as it is clear that
        the deadline cannot be met), Unavailable, and InternalError if a sequence could not be computed. The caller may
        cancel at any time: waiting sequences are removed at once, and only those that already run are computed.
        """
        for arrays in sequences:
            self._kind.check(arrays)
        queued = self._enqueue(sequences, call, trace)
        try:
            return (
                [await queued[0].future]
                if len(queued) == 1
                else list(await asyncio.gather(*(one.future for one in queued)))
            )
        finally:
            for one in queued:
                one.future.cancel()
                if one.is_waiting:
                    self.queue.forget(one)
            # A cancelled future keeps its error, which keeps this frame: both would wait for the garbage collector.
            del one, queued

    def _enqueue(self, sequences: Sequence[Arrays], call: Call, trace: SpanContext | None) -> list[QueuedSequence]:
        limit = self._max_queue_sequences
        if self._is_closed:
            raise stopping()
        if not sequences:
            raise InvalidInput("sequences", "holds none")
        if len(sequences) > limit:
            raise InvalidInput(
                "input", f"{len(sequences)} sequences, the limit is {limit} (the executor's max_queue_sequences)"
            )
        if len(self.queue) + len(sequences) > limit:
            self._sweep()
        queued = len(self.queue)
        if queued + len(sequences) > limit:
            retry_after_s = max(_MIN_RETRY_AFTER_S, self.forecast.queue_s(is_bulk=call.is_bulk))
            setting = f"the limit is {limit} (the executor's max_queue_sequences)"
            raise Overloaded(f"{queued} sequences wait for {self.spec.name!r}, {setting}", retry_after_s)
        loop, numbers, round_tokens = asyncio.get_running_loop(), self._device.numbers, self.backend.round_tokens
        now_s, deadline_s = loop.time(), math.inf if call.deadline_s is None else call.deadline_s
        new: list[QueuedSequence] = []
        for arrays in sequences:
            tokens = self._kind.tokens_of(arrays)
            key = call.is_beyond_share, now_s, deadline_s, next(numbers), call.is_bulk
            new.append(QueuedSequence(*key, arrays, tokens, round_tokens(tokens), loop.create_future(), trace))
            if self.has_whole_items:
                new[-1].mates = new
        own_s = self.forecast.alone_s(self.policy.lone_tokens(max(one.padded_tokens for one in new)))
        if len(new) > 1:
            own_s = max(own_s, self.forecast.together_s(sum(one.padded_tokens for one in new)))
        if not self._is_in_time(deadline_s - own_s, is_bulk=call.is_bulk):
            raise DeadlineExceeded("the deadline would pass in the executor's queue")
        for one in new:
            self.queue.push(one)
        self._device.wake()
        return new

    def _is_in_time(self, start_s: float, *, is_bulk: bool) -> bool:
        """Whether a new sequence can begin before its deadline."""
        if time.monotonic() + self.forecast.queue_s(is_bulk=is_bulk) < start_s:
            return True
        self._sweep()  # late sequences in the queue must not be the reason for refusing it
        return time.monotonic() + self.forecast.queue_s(is_bulk=is_bulk) < start_s

    def _sweep(self) -> None:
        """Removes the sequences that would be too late from the queue."""
        if time.monotonic() >= self._next_sweep_s:
            self.queue.forget_unwanted()
            self._next_sweep_s = time.monotonic() + _SWEEP_INTERVAL_S

    def work(self, batch: Batch) -> tuple[Prepare, Finish[list[Row]]]:
        """The functions that the back end calls in its thread before and after it computes a batch.

        The first makes the batch; the second splits the outputs into rows.
        """
        # Taken here: a member's arrays may be forgotten while the thread works.
        sequences, lengths = [one.arrays for one in batch.members], [one.tokens for one in batch.members]

        def finish(outputs: Arrays) -> list[Row]:
            rows = (cut(outputs, row, tokens, self.spec.outputs) for row, tokens in enumerate(lengths))
            return [fault_of(arrays) or arrays for arrays in rows]

        return lambda: self._kind.pad(sequences, batch.padded_tokens), finish

    def answer(self, core: int, batch: Batch, rows: Sequence[Row], started_ns: int, ended_ns: int) -> None:
        """Gives each caller of a batch the result of its sequence."""
        members = batch.members
        self._computed += len(members)
        self._unwanted += sum(one.future.done() for one in members)
        for one, row in zip(members, rows, strict=True):
            if isinstance(row, NeuronpipeError):
                ids = one.trace.ids if one.trace else {}
                log_warning(
                    "a sequence's outputs are not finite", model=self.spec.name, core=core, tokens=one.tokens, **ids
                )
                fail([one], row)
            elif not one.future.done():
                one.future.set_result(ComputedSequence(row, started_ns, ended_ns, len(members), batch.padded_tokens))

    def give_back(self, one: QueuedSequence) -> None:
        """Puts a sequence of a lost core back into the queue, for the remaining cores."""
        if self._is_closed:
            fail([one], stopping())
        elif not one.future.done():
            self.queue.push(one)
            self._device.wake()

    def close(self) -> None:
        """Takes no more sequences. Callers that still wait get the error that the executor stops.

        Logs how many sequences were computed, and how many in vain.
        """
        if not self._is_closed:
            log(
                "computed",
                model=self.spec.name,
                version=self.spec.version,
                sequences=self._computed,
                unwanted=self._unwanted,
            )
        self._is_closed = True
        waiting = list(self.queue)
        fail(waiting, stopping())
        for one in waiting:
            self.queue.forget(one)


def fail(members: Iterable[QueuedSequence], error: NeuronpipeError) -> None:
    """Gives the error to all callers that still wait."""
    for one in members:
        if not one.future.done():
            one.future.set_exception(error)


def uncomputable() -> InternalError:
    """The error of a caller whose sequence a back end could not compute."""
    return InternalError("the model could not compute this input")


def stopping() -> Unavailable:
    """The error of waiting callers when a model, or the executor, ends."""
    return Unavailable("the neuron-executor is stopping")


def cut(outputs: Arrays, row: int, tokens: int, specs: Sequence[OutputSpec]) -> dict[str, Array]:
    """One sequence's outputs without padding, copied so that they do not keep the batch alive."""
    arrays = {}
    for output in specs:
        without_padding = tuple(slice(tokens) if axis == "tokens" else slice(None) for axis in output.axes)
        arrays[output.name] = outputs[output.name][(row, *without_padding)].copy()
    return arrays


def fault_of(arrays: Arrays) -> InternalError | None:
    """The error of a sequence with outputs that are NaN or infinite."""
    for name, array in arrays.items():
        if not np.isfinite(array).all():
            return InternalError(f"the model's output {name!r} is not finite for this input")
    return None
