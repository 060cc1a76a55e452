"""One generating model of the executor: takes items, and gives their callers the tokens of each step."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager

import numpy as np

from neuronpipe.core.errors import (
    DeadlineExceeded,
    InternalError,
    NeuronpipeError,
    Overloaded,
    retry_delay_s,
)
from neuronpipe.core.generated import NewTokens, TokenSink
from neuronpipe.core.items import ExecuteItem, Prediction
from neuronpipe.core.logs import log_fault
from neuronpipe.core.metrics import Telemetry
from neuronpipe.core.model import ModelSpec
from neuronpipe.core.packed import TensorSets
from neuronpipe.core.tensors import Arrays, ArraySets
from neuronpipe.stages.neuron_executor.backends.base import CoreLost
from neuronpipe.stages.neuron_executor.cores import CoresLost
from neuronpipe.stages.neuron_executor.errors import stopping
from neuronpipe.stages.neuron_executor.generation.beams import BeamSearch
from neuronpipe.stages.neuron_executor.generation.blocks import BlockPool
from neuronpipe.stages.neuron_executor.generation.grammars import Grammars
from neuronpipe.stages.neuron_executor.generation.observer import GenerationObserver, StepRecord
from neuronpipe.stages.neuron_executor.generation.pace import Pace
from neuronpipe.stages.neuron_executor.generation.planner import Planner
from neuronpipe.stages.neuron_executor.generation.sequence import (
    GeneratedSequence,
    TextRecord,
)
from neuronpipe.stages.neuron_executor.generation.sequence_maker import SequenceMaker
from neuronpipe.stages.neuron_executor.generation.steps import SequenceProgress, StepLoop
from neuronpipe.stages.neuron_executor.runtimes.decoder import DecoderLost, DecoderModel
from neuronpipe.stages.neuron_executor.runtimes.host import ComputeThread
from neuronpipe.stages.settings import EngineSettings
from neuronpipe.tasks.text_generation import logprob_arrays, part_arrays, prompt_arrays

# Memory for scores beyond those after a step's tokens, 4 bytes per word of the vocabulary. Without this limit, scored
# prompts took 155 MB in a step, with a vocabulary of 152,000.
_SPARE_SCORES_BYTES = 16 << 20
# Pause between two attempts to get the planner, which is almost always free.
_LOOK_AGAIN_S = 0.0005


class TextGenerator:
    """Generates texts with one model. Its owner runs `work`, and closes the generator."""

    def __init__(
        self,
        model: DecoderModel,
        spec: ModelSpec,
        telemetry: Telemetry,
        observer: GenerationObserver,
        tokenizer_json: Callable[[], bytes],
        settings: EngineSettings,
    ) -> None:
        """`tokenizer_json`: reads the model's tokenizer, when the first text with a grammar needs it."""
        self.spec = spec
        pool = BlockPool(model.blocks, model.block_tokens)
        spare_scores = max(model.part_tokens, _SPARE_SCORES_BYTES // (4 * spec.vocabulary_size))
        pace, rows = Pace(model.part_tokens), settings.max_batch_size
        self.planner = Planner(pool, pace, rows, settings.step_tokens, spare_scores)
        self._grammars = Grammars(spec, tokenizer_json)
        self._maker = SequenceMaker(
            spec,
            self._grammars,
            self.planner.blocks,
            most_scored=model.part_tokens if model.scores_all else 1,
            # A model that scores only the ends of runs has no drafts.
            draft_tokens=settings.prompt_lookup_tokens if model.scores_all else 0,
        )
        self._tracer = telemetry.tracer
        self._observer = observer
        self._max_queue_sequences = settings.max_queue_sequences
        self._max_prompt_wait_s = settings.max_prompt_wait_s or float("inf")
        self._steps = StepLoop(spec.name, model, self.planner, self._tell_from_thread, settings.batch_limit_s)
        self._thread = ComputeThread(f"generate-{spec.name}")
        self._working = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        observer.watch(
            running=lambda: len(self.planner.running),
            waiting=lambda: len(self.planner.waiting),
            blocks=lambda: self.planner.blocks.in_use / model.blocks,
        )

    @asynccontextmanager
    async def _planning(self) -> AsyncIterator[None]:
        """Locks the planner for the block. The event loop does other work until the planner is free."""
        while not self._steps.lock.acquire(blocking=False):  # noqa: ASYNC110 (the thread is no task)
            await asyncio.sleep(_LOOK_AGAIN_S)
        try:
            yield
        finally:
            self._steps.lock.release()

    async def generate(self, item: ExecuteItem, sink: TokenSink | None = None) -> Prediction:
        """Generates the text of one item, and puts its tokens into the sink as they come.

        Raises InvalidInput, Overloaded, DeadlineExceeded, Unavailable and InternalError. After a cancellation, the next
        step does not contain the sequence.
        """
        arrived_ns, trace = time.monotonic_ns(), self._tracer.joined(item.work.trace)
        record = TextRecord(arrived_ns, trace.child() if trace else None)
        sequence = await self._maker.make(item, sink, record)
        async with self._planning():
            if displaced := self._admit(sequence):
                self._end_displaced(displaced)
        # At the end of this turn of the loop, so that items that come together are in the same step.
        asyncio.get_running_loop().call_soon(self._steps.wake)
        try:
            finish_reason = await sequence.caller.future
        except BaseException as error:
            self._observer.failed(sequence, trace, error)
            self._steps.abandon(sequence)  # if it was cancelled, the next plan frees its blocks
            raise
        self._observer.finished(sequence, trace)
        figures = record.figures
        return Prediction(
            TensorSets(arrays=_outputs(sequence, finish_reason)),
            queue_ns=figures.queue_ns,
            compute_ns=figures.prefill_ns + figures.decode_ns,
            generation=figures,
        )

    async def work(self) -> None:
        """Runs steps until the generator is closed. Raises CoresLost if a step hangs, and abandons its thread."""
        async with self._working:
            self._loop = loop = asyncio.get_running_loop()
            stepping, look_s = asyncio.wrap_future(self._thread.submit(self._steps.run)), self._steps.step_time.look_s
            try:
                while not stepping.done():
                    await asyncio.wait([stepping], timeout=look_s)
                    if self._steps.hangs(loop.time()):
                        raise CoreLost(f"a step did not end within {self._steps.limit_s:g} s")
                await stepping
            except (CoreLost, DecoderLost) as fault:
                log_fault("core lost", fault, model=self.spec.name, sequences=len(self.planner.running))
                raise CoresLost(f"no core is left for the model {self.spec.name!r}") from fault
            finally:
                self._thread.close()
                await self._stop()

    async def close(self) -> None:
        """Ends all sequences, and waits until `work` has ended and the running step is over, unless it hangs."""
        await self._stop()
        async with self._working:
            self._observer.unwatch()

    async def _stop(self) -> None:
        """Takes no more sequences, begins no more steps, and ends the present sequences."""
        self._steps.close()  # first, because the thread would plan further steps while this waits for the planner
        self._grammars.close()
        async with self._planning():
            for sequence in self.planner:
                if not sequence.caller.future.done():
                    sequence.caller.future.set_exception(stopping())

    def _tell_from_thread(self, progress: Iterable[SequenceProgress], record: StepRecord | None) -> None:
        assert self._loop  # noqa: S101 (steps run only while `work` does)
        self._loop.call_soon_threadsafe(self._tell, progress, record)

    def _tell(self, progress: Iterable[SequenceProgress], record: StepRecord | None) -> None:
        """Gives callers the progress of a step, on the event loop, while the next step is computed."""
        for entry in progress:
            if entry.sequence.caller.future.done():  # the caller has left
                continue
            try:
                self._tell_caller(entry)
            except Exception as fault:  # no later step knows an ended sequence, so the other callers get their tokens
                log_fault("tokens could not be passed on", fault, model=self.spec.name)
                entry.sequence.caller.future.set_exception(InternalError("the text's tokens could not be passed on"))
        if record:  # last, because an error of the observer must not keep tokens back
            self._observer.step(record)

    def _tell_caller(self, progress: SequenceProgress) -> None:
        future, sink = progress.sequence.caller.future, progress.sequence.caller.sink
        if progress.gap_ns is not None:
            self._observer.tokens(progress.count, progress.gap_ns, is_first=progress.is_first)
        if sink and progress.tokens:
            sink.put(progress.tokens)
        elif sink and progress.is_first and progress.ends_by is None:
            sink.put(NewTokens(is_waiting=True))  # a beam search has begun; its tokens come at its end
        if isinstance(progress.ends_by, NeuronpipeError):
            future.set_exception(progress.ends_by)
        elif progress.ends_by is not None:
            future.set_result(progress.ends_by)

    def _admit(self, sequence: GeneratedSequence) -> GeneratedSequence | None:
        """Adds a sequence to the planner. Returns the waiting sequence that must end for it, if the queue was full.

        Raises Overloaded, DeadlineExceeded and Unavailable.
        """
        if self._steps.is_closed:
            raise stopping()
        wait_s, displaced = self.planner.wait_s(sequence), None
        if len(self.planner.waiting) >= self._max_queue_sequences:
            displaced = self.planner.waiting.displaced_by(sequence)
            if not displaced:
                raise self._queue_full(wait_s)
        self._refuse_late(sequence, wait_s)
        self.planner.add(sequence)
        return displaced

    def _refuse_late(self, sequence: GeneratedSequence, wait_s: float) -> None:
        """Raises Overloaded or DeadlineExceeded if the forecast wait is too long."""
        if wait_s > self._max_prompt_wait_s:
            raise Overloaded(
                f"a prompt would wait {wait_s:.2g} s for its first step, the limit is {self._max_prompt_wait_s:g} s "
                "(the executor's max_prompt_wait_s)",
                retry_delay_s(wait_s - self._max_prompt_wait_s),
            )
        if time.monotonic() + wait_s > sequence.caller.deadline_s:
            raise DeadlineExceeded(f"the first step would begin in {wait_s:.2g} s, after the deadline")

    def _end_displaced(self, displaced: GeneratedSequence) -> None:
        """Ends a waiting sequence whose place in the queue another sequence has got."""
        self.planner.remove(displaced)
        if not displaced.caller.future.done():
            displaced.caller.future.set_exception(self._queue_full(self.planner.wait_s(displaced)))

    def _queue_full(self, wait_s: float) -> Overloaded:
        problem = f"{len(self.planner.waiting)} prompts wait for {self.spec.name!r}, the limit is "
        return Overloaded(f"{problem}{self._max_queue_sequences}", retry_delay_s(wait_s))


def _outputs(sequence: GeneratedSequence, finish_reason: int) -> ArraySets:
    """Returns the text of a sequence that has ended, or the texts that its search has found, best first."""
    start, chooser = sequence.prompt_tokens, sequence.chooser
    if not isinstance(chooser, BeamSearch):
        (whole,) = part_arrays(sequence.token_ids[start:], finish_reason)
        if sequence.prompt_scores:
            whole = {**whole, **prompt_arrays(sequence.token_ids[:start], sequence.prompt_scores.logprobs)}
        return [whole]
    outputs: list[Arrays] = []
    for text in chooser.best:
        (arrays,) = part_arrays(text.token_ids[start:], text.finish_reason)
        outputs.append({**arrays, "score": np.array(text.score, np.float32)})
        if sequence.options.HasField("top_logprobs"):
            outputs[-1] = {**outputs[-1], **logprob_arrays(text.logprobs)}
    return outputs
