"""One model on its device: its queue, and how its batches are formed, made of sequences, and split into results.

The scheduler of the device owns the model and runs the batches. The model knows only what the device's models share.
"""

import asyncio
import itertools
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from neuronpipe.bundles.buckets import BucketPlan
from neuronpipe.core.calls import Call
from neuronpipe.core.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidInput,
    NeuronpipeError,
    Overloaded,
    retry_delay_s,
)
from neuronpipe.core.logs import log, log_fault, log_warning
from neuronpipe.core.model import ADAPTER, ModelSpec, OutputSpec
from neuronpipe.core.tensors import Array, Arrays
from neuronpipe.core.tracing import SpanContext
from neuronpipe.stages.neuron_executor.backends.base import Backend, Finish, Prepare
from neuronpipe.stages.neuron_executor.batch_observer import BatchObserver, BatchRun
from neuronpipe.stages.neuron_executor.batching import Batch, BatchPolicy, FixedBuckets, Limits, PlannedShapes
from neuronpipe.stages.neuron_executor.cores import Cores
from neuronpipe.stages.neuron_executor.errors import stopping, uncomputable
from neuronpipe.stages.neuron_executor.forecast import BatchTimes, Forecast
from neuronpipe.stages.neuron_executor.packing import pack, unpack
from neuronpipe.stages.neuron_executor.sequence_queue import ComputedSequence, QueuedSequence, QueueRank, SequenceQueue
from neuronpipe.stages.neuron_executor.shapes import BatchShape
from neuronpipe.tasks.inputs.kind import input_kind

# The pause between two searches of the queue for late sequences, so that refusing stays cheap: 4096 sequences take
# 2.7 ms (measured 2026-11-21 on a CPU with two cores).
_SWEEP_INTERVAL_S = 0.05
_FEW_NUMBERS = 16

# The outputs of a sequence, or the error of outputs that are not finite.
RowOutputs: TypeAlias = Arrays | NeuronpipeError


class SharedDevice:
    """The parts of a device that its models share.

    - `forecasts`: the forecasts of all models.
    - `numbers`: the numbers of all models' sequences in the order of their arrival.
    - `has_work`: set when a core may find a sequence.
    """

    def __init__(self, cores: Cores) -> None:
        self.cores = cores
        self.forecasts: list[Forecast] = []
        self.numbers = itertools.count()
        self.has_work = asyncio.Event()


class ExecutorModel:
    """A model that runs sequences once a scheduler owns it, see DeviceScheduler.add_model.

    `may_use_all_cores`: a batch without others runs with the threads of all cores.
    """

    may_use_all_cores = True

    def __init__(
        self,
        backend: Backend,
        spec: ModelSpec,
        limits: Limits,
        shared: SharedDevice,
        times: BatchTimes,
        observer: BatchObserver,
    ) -> None:
        self.backend = backend
        self.spec = spec
        self.observer = observer
        self.queue = SequenceQueue()
        self.forecast = Forecast(self.queue, shared.cores, times, shared.forecasts)
        self.batches_running = 0
        self.computed_shapes: set[BatchShape] = set()
        # Set by the first batch of a request.
        self.is_used = asyncio.Event()
        self._kind = input_kind(spec)
        # The outputs of a row by the number of its adapter. Adapters may have other numbers of labels than the base.
        self._outputs = [spec.outputs, *(spec.adapted(number + 1).outputs for number in range(len(spec.adapters)))]
        self._limits = limits
        self.policy = self.batch_policy()
        self._shared = shared
        self._computed = 0
        self._unwanted = 0
        self._next_sweep_s = 0.0
        self._is_closed = False
        shapes = backend.shapes
        # The most sequences of an item that share a place in the queue, by their padded length.
        self._most_rows = shapes.most_rows if spec.is_static and not isinstance(shapes, BucketPlan) else None
        if spec.is_static:  # two threads take more time together, and each text takes little
            self.may_use_all_cores = False
        observer.watch(lambda: self.queued, self.forecast.backlog_s, lambda: self.cores_left)

    def batch_policy(self) -> BatchPolicy:
        """Makes the policy that forms the model's batches."""
        shapes = self.backend.shapes
        if isinstance(shapes, BucketPlan):
            return FixedBuckets(self.queue, self.forecast, shapes)
        return PlannedShapes(self.queue, self.forecast, shapes, self._limits)

    def planned_shapes(self) -> list[BatchShape]:
        """Lists the shapes to prepare ahead of requests. The warm-up has already run all buckets."""
        shapes, limits = self.backend.shapes, self._limits
        if isinstance(shapes, BucketPlan):
            return []
        return shapes.planned(self.backend.cores, limits.max_batch_size, limits.max_batch_tokens)

    @property
    def queued(self) -> tuple[int, int]:
        """The number of waiting sequences, and their padded tokens."""
        return len(self.queue), self.queue.tokens_before(is_bulk=True)

    @property
    def cores_left(self) -> int:
        return self._shared.cores.left

    async def run(
        self,
        sequences: Sequence[Arrays],
        call: Call,
        trace: SpanContext | None = None,
        *,
        is_beyond_share: bool = False,
    ) -> list[ComputedSequence]:
        """Runs the sequences of one input and returns their outputs in order.

        The model queues all sequences or none. Raises InvalidInput, Overloaded, DeadlineExceeded (as soon as it is
        clear that the deadline cannot be met), Unavailable, and InternalError if a sequence could not be computed. The
        caller may cancel at any time: waiting sequences are removed at once, and running sequences are still computed.
        """
        for arrays in sequences:
            self._kind.check(arrays)
        queued = self.enqueue(sequences, call, trace, is_beyond_share=is_beyond_share)
        try:
            if len(sequences) == 1:
                return await queued[0].future
            computed = await asyncio.gather(*(sequence.future for sequence in queued))
            return unpack([sequence.positions for sequence in queued], computed)
        finally:
            for sequence in queued:
                sequence.future.cancel()
                if sequence.is_waiting:
                    self.queue.forget(sequence)
            # A cancelled future keeps its error, which keeps this frame: both would wait for the garbage collector.
            del sequence, queued

    def enqueue(
        self, sequences: Sequence[Arrays], call: Call, trace: SpanContext | None, *, is_beyond_share: bool
    ) -> list[QueuedSequence]:
        """Queues the sequences of one input; see run."""
        limit = self._limits.max_queue_sequences
        if self._is_closed:
            raise stopping()
        if not sequences:
            raise InvalidInput("sequences", "holds none")
        if len(sequences) > limit:
            raise InvalidInput("input", f"{len(sequences)} sequences, the limit is {limit}; send less at once")
        if len(self.queue) + len(sequences) > limit:
            self._sweep()
        queued = len(self.queue)
        if queued + len(sequences) > limit:
            wait_s = self.forecast.queue_wait_s(is_bulk=call.is_bulk)
            problem = f"{queued} sequences wait for {self.spec.name!r}, the limit is {limit}"
            raise Overloaded(problem, retry_delay_s(wait_s))
        loop, numbers = asyncio.get_running_loop(), self._shared.numbers
        now_s, deadline_s = loop.time(), math.inf if call.deadline_s is None else call.deadline_s
        tokens = [*map(self._kind.tokens_of, sequences)]
        padded_tokens = [*map(self.backend.shapes.round_tokens, tokens)]
        new: list[QueuedSequence] = []
        for positions in pack(padded_tokens, self._most_rows):
            sequence = QueuedSequence(
                rank=QueueRank(is_beyond_share, now_s, deadline_s, next(numbers)),
                is_bulk=call.is_bulk,
                inputs=[sequences[position] for position in positions],
                tokens=sum([tokens[position] for position in positions]),
                padded_tokens=padded_tokens[positions[0]],
                future=loop.create_future(),
                trace=trace,
                positions=positions,
            )
            new.append(sequence)
        own_s = self.forecast.next_batch_s(self.policy.lone_tokens(max(padded_tokens)))
        if len(sequences) > 1:
            together = sum([sequence.rows * sequence.padded_tokens for sequence in new])
            own_s = max(own_s, self.forecast.all_cores_s(together))
        if not self._is_in_time(deadline_s - own_s, is_bulk=call.is_bulk):
            raise DeadlineExceeded("the deadline would pass in the executor's queue")
        for sequence in new:
            self.queue.push(sequence)
        self._shared.has_work.set()
        return new

    def _is_in_time(self, start_s: float, *, is_bulk: bool) -> bool:
        """Returns whether a new sequence can begin before its deadline."""
        if time.monotonic() + self.forecast.queue_wait_s(is_bulk=is_bulk) < start_s:
            return True
        self._sweep()  # late sequences in the queue must not be the reason for a refusal
        return time.monotonic() + self.forecast.queue_wait_s(is_bulk=is_bulk) < start_s

    def _sweep(self) -> None:
        """Removes the sequences that would be too late from the queue."""
        if time.monotonic() >= self._next_sweep_s:
            self.queue.expire_late()
            self._next_sweep_s = time.monotonic() + _SWEEP_INTERVAL_S

    def take(self, oldest: QueuedSequence, wait_s: float, idle_cores: int, limit_s: float) -> Batch | None:
        """Takes a batch with the oldest sequence out of the queue: a suspect alone, or else with others.

        See BatchPolicy.fill. Returns None if the oldest sequence would be too late.
        """
        self.queue.remove(oldest)
        if self.policy.deadlines.expire_if_late(oldest, wait_s):
            return None
        if oldest.lost_cores:
            return self.policy.batch_of([oldest])
        return self.policy.fill(oldest, wait_s, idle_cores, limit_s)

    def begin_batch(self, batch: Batch) -> float:
        """Counts a running batch. Returns the number of seconds that it is expected to take."""
        self.batches_running += 1
        return self.forecast.batch_s(batch.computed_tokens)

    def end_batch(self) -> None:
        self.batches_running -= 1

    def compute(self, core: int, batch: Batch, *, is_alone: bool) -> Coroutine[Any, Any, list[RowOutputs]]:
        """Makes inputs of the sequences, computes them, and makes rows of the outputs, once it is awaited."""
        prepare, finish = self._conversions(batch)
        return self.backend.run(core, prepare, finish, is_alone=is_alone)

    def _conversions(self, batch: Batch) -> tuple[Prepare, Finish[list[RowOutputs]]]:
        """Returns the functions that the back end calls in its thread before and after it computes a batch.

        The first makes the inputs, whose unused rows repeat the first sequence. The second splits the outputs into
        rows.
        """
        # Read on this thread: the model may forget a member's arrays while the back end's thread works.
        sequences = [arrays for member in batch.members for arrays in member.inputs]
        lengths = [*map(self._kind.tokens_of, sequences)]
        specs = [self._outputs[int(arrays[ADAPTER][0]) if ADAPTER in arrays else 0] for arrays in sequences]
        sequences += sequences[:1] * (batch.rows - len(sequences))

        def finish(outputs: Arrays) -> list[RowOutputs]:
            rows = [cut(outputs, row, tokens, specs[row]) for row, tokens in enumerate(lengths)]
            # Padding may hold any number, so rows are looked at alone only where the whole batch is not finite.
            is_finite = len(rows) > 1 and all(np.isfinite(array).all() for array in outputs.values())
            return [(None if is_finite else fault_of(arrays)) or arrays for arrays in rows]

        return lambda: self._kind.pad(sequences, batch.padded_tokens), finish

    def answer(self, run: BatchRun, rows: Sequence[RowOutputs]) -> None:
        """Gives the callers of a computed batch their rows, and learns from its time."""
        batch = run.batch
        self.is_used.set()
        self.computed_shapes.add(
            BatchShape(0 if run.is_alone else run.core, batch.rows, batch.padded_tokens, run.is_alone)
        )
        self.forecast.observe(batch.computed_tokens, (run.ended_ns - run.started_ns) / 1e9, is_alone=run.is_alone)
        self._computed += len(rows)
        times_and_shape = run.started_ns, run.ended_ns, len(rows), batch.padded_tokens
        end = 0
        for member in batch.members:
            own, end = rows[end : end + member.rows], end + member.rows
            self._unwanted += member.rows * member.future.done()
            if fault := next((row for row in own if isinstance(row, NeuronpipeError)), None):
                ids = member.trace.ids if member.trace else {}
                name, core, tokens = self.spec.name, run.core, member.tokens
                log_warning("a sequence's outputs are not finite", model=name, core=core, tokens=tokens, **ids)
                fail([member], fault)
            elif not member.future.done():
                outputs = [row for row in own if not isinstance(row, NeuronpipeError)]
                member.future.set_result([ComputedSequence(arrays, *times_and_shape) for arrays in outputs])

    def give_up(self, sequence: QueuedSequence, core: int, fault: Exception) -> None:
        """Fails a sequence that could not be computed in a batch of its own."""
        ids = sequence.trace.ids if sequence.trace else {}
        name, tokens = self.spec.name, sequence.tokens
        log_fault("a sequence could not be computed", fault, model=name, core=core, tokens=tokens, **ids)
        fail([sequence], uncomputable())

    def requeue(self, sequence: QueuedSequence) -> None:
        """Puts a sequence of a lost core back into the queue, for the remaining cores."""
        if self._is_closed:
            fail([sequence], stopping())
        elif not sequence.future.done():
            self.queue.push(sequence)
            self._shared.has_work.set()

    def close(self) -> None:
        """Takes no more sequences. Waiting callers get Unavailable.

        Logs the number of computed sequences, and the number of sequences that were computed in vain.
        """
        if not self._is_closed:
            name, version = self.spec.name, self.spec.version
            log("computed", model=name, version=version, sequences=self._computed, unwanted=self._unwanted)
        self._is_closed = True
        waiting = list(self.queue)
        fail(waiting, stopping())
        for sequence in waiting:
            self.queue.forget(sequence)


def fail(members: Iterable[QueuedSequence], error: NeuronpipeError) -> None:
    """Gives the error to all callers that still wait."""
    for member in members:
        if not member.future.done():
            member.future.set_exception(error)


def cut(outputs: Arrays, row: int, tokens: int, specs: Sequence[OutputSpec]) -> dict[str, Array]:
    """Copies the outputs of one sequence without padding. A view would keep the memory of the batch."""
    arrays = {}
    for output in specs:
        array = outputs[output.name][row]
        if array.shape != output.axes:  # padding to the batch's longest row, or to the most labels of an adapter
            array = array[tuple(slice(tokens if axis == "tokens" else axis) for axis in output.axes)]
        arrays[output.name] = array.copy()
    return arrays


def fault_of(arrays: Arrays) -> InternalError | None:
    """Returns the error of a sequence with NaN or infinite outputs."""
    for name, array in arrays.items():
        # Adding a few numbers takes a sixth of the time, and no sum of float32 exceeds Python's float.
        is_small = array.ndim == 1 and len(array) <= _FEW_NUMBERS
        if not (math.isfinite(sum(array.tolist())) if is_small else np.isfinite(array).all()):
            return InternalError(f"the model's output {name!r} is not finite for this input")
    return None
